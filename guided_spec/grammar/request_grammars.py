"""What the grammars of one model's requests go through: a marker, a compiler, an end in time."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from guided_spec.config import EngineConfig
from guided_spec.grammar.after import AfterBackend
from guided_spec.grammar.auto_backend import build_backend
from guided_spec.grammar.backends import import_path
from guided_spec.grammar.compiler import GrammarCompileQueue
from guided_spec.grammar.completion import EndingsCache, PreparingBackend
from guided_spec.grammar.isolation import IsolatedBackend
from guided_spec.grammar.markers import Markers
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["RequestGrammars"]


class RequestGrammars(NamedTuple):
    """The three parts that every request's grammar meets, in this order.

    markers: bind a spec behind its prompt, where it begins after a marker.
    queue: compiles it in threads, within limits, and keeps it.
    endings: how its texts end, to end one within its budget.
    """

    markers: Markers
    queue: GrammarCompileQueue
    endings: EndingsCache

    @classmethod
    def build(cls, config: EngineConfig, vocabulary: Vocabulary, tokenizer: Any) -> RequestGrammars:
        """As ``config`` says: its ``grammar_*`` fields and ``compile_threads``.

        Raises ConfigError for a backend that is not registered, not installed, or cannot be made.
        """
        name = config.grammar_backend
        backend = AfterBackend.from_tokenizer(build_backend(name, vocabulary), tokenizer)
        endings = EndingsCache(vocabulary)
        isolated = IsolatedBackend(
            PreparingBackend(backend, endings),
            config.grammar_limits,
            # Where no other process can import it, that one is for specs which name another.
            make=partial(build_backend, name if import_path(name) else "auto"),
            name=name,
        )
        queue = GrammarCompileQueue(
            isolated,
            max_workers=config.compile_threads,
            cache_bytes=config.grammar_cache_bytes,
            size_of_more=endings.size_of,
        )
        return cls(backend.markers, queue, endings)
