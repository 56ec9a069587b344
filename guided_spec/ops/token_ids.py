"""The token ids that a request's parameters name: checked, and bad words spelled in tokens."""

from __future__ import annotations

from typing import Any

from guided_spec.errors import ConfigError
from guided_spec.types import SamplingParams

__all__ = ["check_token_ids", "spell_bad_words"]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ConfigError for an id that the vocabulary does not have."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": dict(params.logit_bias),
        "bad_words": [token for word in words for token in word],
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, token_ids in named.items():
        for token in token_ids:
            if token >= vocab_size:
                fix = f"ids must be below the vocabulary's {vocab_size}"
                raise ConfigError(name, token, fix)


def spell_bad_words(
    params: SamplingParams, tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Every token sequence that ``params.bad_words`` stand for, each once.

    A str gives its tokens as they are at the start of a text and behind a space; a spelling with a
    token that the model cannot write is left out. Raises ConfigError for a str without any tokens.
    """
    spelled: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            spelled[tuple(word)] = None
            continue
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            fix = "it holds half of a surrogate pair, which no tokenizer can read; replace it"
            raise ConfigError("bad_words", word, fix)
        for text in (word, f" {word}"):
            token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            if not token_ids:
                raise ConfigError("bad_words", word, "it has no tokens; name at least a letter")
            if max(token_ids) < vocab_size:
                spelled[token_ids] = None
    return tuple(spelled)
