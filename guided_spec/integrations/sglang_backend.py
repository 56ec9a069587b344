"""The two classes that SGLang asks of a grammar backend, put together once SGLang is imported.

Masks have the format of SGLang's own xgrammar backend, so what allocates, moves and applies them is
SGLang's.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache, partial
from typing import Any

from guided_spec.errors import GuidedSpecError
from guided_spec.grammar.auto_backend import build_backend
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.unique_keys import NotedGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.sglang_place import Place
from guided_spec.integrations.sglang_specs import spec_of

__all__ = ["GuidedBackend", "GuidedGrammar", "make_backend"]


def make_backend(kind: str, vocabulary: Vocabulary, *, any_whitespace: bool) -> Any:
    """A ``GuidedBackend`` that is a ``BaseGrammarBackend`` of SGLang's as well."""
    return _classes()[1](kind, vocabulary, any_whitespace=any_whitespace)


class GuidedGrammar:
    """One request's grammar, as SGLang's scheduler and verifiers use it.

    place: this request's. stats: SGLang's ``GrammarStats``.
    backend: which of guided_spec's took the grammar, "xgrammar" or "llguidance".
    """

    def __init__(self, place: Place, backend: str, stats: Any) -> None:
        super().__init__()
        self.backend = backend
        self.grammar_stats = stats
        self._place = place

    def accept_token(self, token: int) -> None:
        """Advance by one token. Raises ValueError where the grammar refuses it."""
        self._place.accept(token)
        self.current_token = token

    def rollback(self, k: int) -> None:
        """Take back the last ``k`` tokens."""
        self._place.rollback(k)

    def is_terminated(self) -> bool:
        """Whether the text is complete."""
        return self._place.is_terminated

    def constraint(self) -> Constraint | None:
        """The same place for a proposer to draft from; None where nothing can be drafted."""
        return self._place.constraint()

    def copy(self) -> GuidedGrammar:
        """An independent one at the same place; its grammar is not compiled again."""
        stats = replace(self.grammar_stats, is_cache_hit=True, tree_traversal_time=[])
        return type(self)(self._place.copy(), self.backend, stats)

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Any:
        """int32 [batch_size, W] on the host, all ones."""
        return _xgrammar().XGrammarGrammarBackend.allocate_vocab_mask(
            vocab_size, batch_size, device
        )

    def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
        """Write what may come next into row ``idx``."""
        self._place.fill(vocab_mask, idx)

    @staticmethod
    def reset_vocab_mask(vocab_mask: Any) -> None:
        """Set all rows to ones."""
        vocab_mask.fill_(-1)

    @staticmethod
    def move_vocab_mask(vocab_mask: Any, device: Any) -> Any:
        """The mask on ``device``."""
        return _xgrammar().XGrammarGrammarBackend.move_vocab_mask(vocab_mask, device)

    @staticmethod
    def apply_vocab_mask(logits: Any, vocab_mask: Any) -> None:
        """Set the logits of forbidden tokens to -inf, in place."""
        # A method there, but one without a use for its object.
        _xgrammar().XGrammarGrammar.apply_vocab_mask(None, logits, vocab_mask)


class GuidedBackend:
    """Compiles SGLang's grammars with guided_spec.

    kind: "auto", "xgrammar" or "llguidance".
    any_whitespace: whether the model chooses the whitespace between JSON values.

    What cannot be enforced in full is refused: the request fails before its first token, with the
    reason. Large grammars are tried out in a process of their own.
    """

    def __init__(self, kind: str, vocabulary: Vocabulary, *, any_whitespace: bool) -> None:
        super().__init__()
        self._any_whitespace = any_whitespace
        backend = build_backend(kind, vocabulary)
        make = partial(build_backend, kind)
        self._compiler = GrammarPipeline(backend, GrammarLimits(), make=make)

    def dispatch_json(self, key_string: str) -> Any:
        """A JSON schema as text, or SGLang's word for any JSON value."""
        return self._compile("json", key_string)

    def dispatch_regex(self, key_string: str) -> Any:
        """A regular expression for the whole text."""
        return self._compile("regex", key_string)

    def dispatch_ebnf(self, key_string: str) -> Any:
        """A grammar in xgrammar's GBNF dialect."""
        return self._compile("ebnf", key_string)

    def dispatch_structural_tag(self, key_string: str) -> Any:
        """A structural tag in either of SGLang's forms."""
        return self._compile("structural_tag", key_string)

    @property
    def is_support_token_filter(self) -> bool:
        """Whether ``set_token_filter`` works, which strict thinking needs."""
        return True

    def set_token_filter(self, *args: Any, **kwargs: Any) -> None:
        """As in SGLang's xgrammar backend: the masks have the same format."""
        _xgrammar().XGrammarGrammarBackend.set_token_filter(*args, **kwargs)

    @staticmethod
    def allocate_vocab_mask(vocab_size: int, batch_size: int, device: Any) -> Any:
        """As a grammar's: reasoning without a grammar asks the backend."""
        return _xgrammar().XGrammarGrammarBackend.allocate_vocab_mask(
            vocab_size, batch_size, device
        )

    move_vocab_mask = staticmethod(GuidedGrammar.move_vocab_mask)
    apply_vocab_mask = staticmethod(GuidedGrammar.apply_vocab_mask)

    def _compile(self, key_type: str, key_string: str) -> Any:
        base = _base()
        try:
            spec = spec_of(key_type, key_string, any_whitespace=self._any_whitespace)
            compiled = self._compiler.compile(spec)
        except GuidedSpecError as error:
            return base.InvalidGrammarObject(str(error))
        stats = base.GrammarStats(dispatch_type=key_type)
        name = compiled.backend if isinstance(compiled, NotedGrammar) else ""
        return _classes()[0](Place.at_start(compiled), name, stats)


@cache
def _classes() -> tuple[type[GuidedGrammar], type[GuidedBackend]]:
    # SGLang asks for its own base classes, which cannot be named where it is not installed.
    base = _base()
    return (
        type("SGLangGrammar", (GuidedGrammar, base.BaseGrammarObject), {}),
        type("SGLangBackend", (GuidedBackend, base.BaseGrammarBackend), {}),
    )


def _base() -> Any:
    return importlib.import_module("sglang.srt.constrained.base_grammar_backend")


def _xgrammar() -> Any:
    return importlib.import_module("sglang.srt.constrained.xgrammar_backend")
