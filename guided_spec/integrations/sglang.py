"""Plugin of SGLang: guided_spec's grammars as a grammar backend, and its drafts as an algorithm.

SGLang finds ``register`` by the entry point group ``sglang.srt.plugins`` and calls it in each of
its processes. It adds names to ``--grammar-backend`` and one to ``--speculative-algorithm``;
nothing else happens until they are chosen.
"""

from __future__ import annotations

import importlib
import logging
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from guided_spec.errors import ConfigError

if TYPE_CHECKING:
    from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["BACKENDS", "TESTED_VERSIONS", "create_backend", "register", "vocabulary_of"]

TESTED_VERSIONS = ("0.5.23",)
BACKENDS = {
    "guided_spec": "auto",
    "guided_spec:llguidance": "llguidance",
    "guided_spec:xgrammar": "xgrammar",
}
"""The names for ``--grammar-backend``, and which backend of guided_spec each one is."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``BACKENDS`` and the speculative algorithm known to SGLang; again changes nothing.

    An SGLang without these registrations gets a line in its log, and goes on without us.
    """
    try:
        choices: Any = importlib.import_module("sglang.srt.arg_groups.choices")
        backends: Any = importlib.import_module("sglang.srt.constrained.base_grammar_backend")
    except ImportError as error:
        logger.warning("guided_spec is no grammar backend of this SGLang: %s", error)
        return
    known = choices.GRAMMAR_BACKEND_CHOICES
    choices.add_grammar_backend_choices([name for name in BACKENDS if name not in known])
    for name, kind in BACKENDS.items():
        backends.register_grammar_backend(name, partial(create_backend, kind))
    try:
        from guided_spec.integrations.sglang_algorithm import register_algorithm

        register_algorithm()
    except (ImportError, AttributeError, TypeError) as error:  # other versions ask for more
        logger.warning("guided_spec is no speculative algorithm of this SGLang: %s", error)


def create_backend(
    kind: str, server_args: Any, tokenizer: Any, vocab_size: int, eos_token_ids: Any = None
) -> Any:
    """What SGLang calls when it starts with one of our names; returns its ``BaseGrammarBackend``.

    kind: a value of ``BACKENDS``. The rest is SGLang's: its ``ServerArgs``, which are not read (the
    options in force are those of its runtime context), the tokenizer, the width of the logits, and
    the ids that end a text, None for the tokenizer's own.

    Raises ConfigError for an SGLang that was not tested and for a server option that cannot be
    kept, and ModelError for a tokenizer that cannot be read.
    """
    del server_args
    check_version(version("sglang"))
    serving = importlib.import_module("sglang.srt.runtime_context").get_serving()
    check_options(serving)
    # Imported here: SGLang calls ``register`` in processes that need no grammars.
    from guided_spec.integrations.sglang_backend import make_backend

    vocabulary = vocabulary_of(tokenizer, vocab_size, eos_token_ids)
    is_free = not serving.constrained_json_disable_any_whitespace
    return make_backend(kind, vocabulary, any_whitespace=is_free)


def vocabulary_of(tokenizer: Any, vocab_size: int, eos_token_ids: Any = None) -> Vocabulary:
    """The tokens of SGLang's model.

    vocab_size: the width of the logits. eos_token_ids: the ids that end a text, None for the
        tokenizer's own.

    Raises ModelError for a tokenizer that cannot be read.
    """
    from guided_spec.grammar.vocabulary import Vocabulary

    ends = eos_token_ids or tokenizer.eos_token_id
    stop_ids = [ends] if isinstance(ends, int) else sorted(ends or ())
    return Vocabulary.from_tokenizer(tokenizer, vocab_size, stop_ids)


def check_version(found: str) -> None:
    """Raises ConfigError, in one sentence, for a version of SGLang that was not tested."""
    if found not in TESTED_VERSIONS:
        fix = f"guided_spec was tested with {', '.join(TESTED_VERSIONS)}: install that"
        raise ConfigError("sglang", found, f"{fix}, or choose another --grammar-backend")


def check_options(serving: Any) -> None:
    """Raises ConfigError for options about whitespace that the grammars would not keep."""
    for name in ("constrained_json_max_whitespace_cnt", "constrained_json_whitespace_pattern"):
        value = getattr(serving, name, None)
        if value is not None:
            fix = "whitespace is free or fixed: pass --constrained-json-disable-any-whitespace"
            raise ConfigError(name, value, f"{fix} instead, or choose another --grammar-backend")
