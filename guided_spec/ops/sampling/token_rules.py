"""What requests ask of single tokens (biases, bans, penalties), and the table of a whole batch.

The table depends on the requests alone, not on their texts: it is made once for as long as the same
requests run together. ``guided_spec.ops.sampling.adjust`` applies it at a place in their texts.

The token ids that a request's parameters name: checked, and bad words spelled in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.host import to_device
from guided_spec.types import SamplingParams

__all__ = [
    "ANY",
    "Bans",
    "Penalties",
    "RuleTable",
    "TokenRules",
    "check_token_ids",
    "spell_bad_words",
]

ANY = -2  # in a ban's prefix: any token, or none
FOR_EVER = 2**62


class TokenRules(NamedTuple):
    """One request's rules.

    params: of which ``logit_bias``, ``allowed_token_ids``, ``min_tokens`` and the penalties count.
    bad_words: every spelling of ``params.bad_words``, at least one token each.
    stop_ids: the tokens that would end the text, forbidden for ``params.min_tokens`` tokens.
    """

    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()

    @property
    def is_used(self) -> bool:
        """Whether the request asks for anything at all."""
        return bool(self.has_bias or self.bad_words or self.params.min_tokens or self.has_penalty)

    @property
    def has_bias(self) -> bool:
        """Whether some tokens gain or lose the same everywhere."""
        return bool(self.params.logit_bias) or self.params.allowed_token_ids is not None

    @property
    def has_penalty(self) -> bool:
        """Whether tokens lose by standing in the text."""
        params = self.params
        return bool(
            params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        )

    def bans_after(self, num_output: int) -> list[str]:
        """The parameters that may forbid a token after ``num_output`` tokens of output."""
        params = self.params
        found = {
            "logit_bias": float("-inf") in dict(params.logit_bias).values(),
            "bad_words": bool(self.bad_words),
            "allowed_token_ids": params.allowed_token_ids is not None,
            "min_tokens": num_output < params.min_tokens,
        }
        return [name for name, is_banning in found.items() if is_banning]


class Bans(NamedTuple):
    """M tokens that are forbidden, each to one request, behind a prefix or up to a length.

    owners: int64 [M] rows of the table. tokens: int64 [M].
    prefixes: int64 [M, P], right-aligned behind ``ANY``: what the text has to end with.
    until: int64 [M] output tokens from which on the ban is lifted.
    """

    owners: Tensor
    tokens: Tensor
    prefixes: Tensor
    until: Tensor


class Penalties(NamedTuple):
    """float32 [U, 1, 1] each, U rows of the table; 1, 0 and 0 change nothing."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class RuleTable:
    """The rules of the U of B requests that have any, on ``device``.

    rules: [U]; requests: [U] which of the B requests each row is, ``index`` the same on the device.
    bias: float32 [U, V], -inf for forbidden tokens; None when no row has one.
    bans, penalties: None when no row has any.
    """

    rules: tuple[TokenRules, ...]
    requests: tuple[int, ...]
    index: Tensor
    batch_size: int
    vocab_size: int
    bias: Tensor | None
    bans: Bans | None
    penalties: Penalties | None

    @classmethod
    def stack(
        cls, rules: Sequence[TokenRules | None], vocab_size: int, device: torch.device
    ) -> RuleTable | None:
        """From the rules of B requests; None when nobody has any."""
        used = {row: one for row, one in enumerate(rules) if one is not None and one.is_used}
        if not used:
            return None
        listed = tuple(used.values())
        return cls(
            rules=listed,
            requests=tuple(used),
            index=to_device(list(used), device),
            batch_size=len(rules),
            vocab_size=vocab_size,
            bias=_stack_bias(listed, vocab_size, device),
            bans=_stack_bans(listed, device),
            penalties=_stack_penalties(listed, device),
        )

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.index.device

    @property
    def depth(self) -> int:
        """P, the last tokens of a text that its bans look at."""
        return 0 if self.bans is None else self.bans.prefixes.shape[1]


def _stack_bias(
    rules: Sequence[TokenRules], vocab_size: int, device: torch.device
) -> Tensor | None:
    if not any(one.has_bias for one in rules):
        return None
    bias = torch.zeros(len(rules), vocab_size)
    for row, one in zip(bias, rules, strict=True):
        if one.params.allowed_token_ids is not None:
            allowed = torch.tensor(one.params.allowed_token_ids)
            row.fill_(float("-inf")).index_fill_(0, allowed, 0.0)
        if one.params.logit_bias:
            tokens, values = zip(*dict(one.params.logit_bias).items(), strict=True)
            row.index_add_(0, torch.tensor(tokens), torch.tensor(values))
    return bias.to(device, non_blocking=True)


def _stack_bans(rules: Sequence[TokenRules], device: torch.device) -> Bans | None:
    bans = [
        (row, word[-1], word[:-1], FOR_EVER)
        for row, one in enumerate(rules)
        for word in one.bad_words
    ]
    bans += [
        (row, token, (), one.params.min_tokens)
        for row, one in enumerate(rules)
        for token in one.stop_ids
        if one.params.min_tokens > 0
    ]
    if not bans:
        return None
    depth = max(len(prefix) for _, _, prefix, _ in bans)
    prefixes = [[ANY] * (depth - len(prefix)) + list(prefix) for _, _, prefix, _ in bans]
    return Bans(
        owners=to_device([row for row, *_ in bans], device),
        tokens=to_device([token for _, token, *_ in bans], device),
        prefixes=to_device(prefixes, device).view(len(bans), depth),
        until=to_device([until for *_, until in bans], device),
    )


def _stack_penalties(rules: Sequence[TokenRules], device: torch.device) -> Penalties | None:
    if not any(one.has_penalty for one in rules):
        return None
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    values = [[float(getattr(one.params, name)) for name in names] for one in rules]
    columns = to_device(values, device, torch.float32).view(len(rules), 3, 1, 1)
    return Penalties(*columns.unbind(1))


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
