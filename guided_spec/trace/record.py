"""What a trace holds: every step of one text, and every token of a step; as JSON and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from guided_spec.errors import ConfigError

__all__ = [
    "FORCED",
    "TARGET",
    "Outcome",
    "StepTrace",
    "TokenTrace",
    "Trace",
    "from_json",
    "to_json",
]

Outcome = Literal["accepted", "rejected", "unused", "replacement", "bonus"]

FORCED = "forced"
"""The source of a token that the grammar left no choice about."""
TARGET = "target"
"""The source of a token that was drawn from the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTrace:
    """One token that was drafted, or drawn from the target.

    id, text: the token; bytes that are no UTF-8 are written as ``\\\\xe4``, and a token that shows
        no text, such as one that ends it, has "".
    source: "forced" by the grammar, the name of the proposer that drafted it, or "target".
    outcome: "accepted", "rejected", or "unused" behind a rejected one; "replacement", drawn in the
        place of a rejected one, or "bonus", drawn behind a draft that was accepted whole.
    draft_prob: what the drafter drew it with; None where it was certain of it: forced, looked up,
        or a greedy choice.
    target_prob: the target's probability under the grammar, before temperature and filters; None
        behind a token that the grammar refuses.
    processed_prob: that of the distribution which decided: after penalties, temperature and
        filters.
    allowed: tokens that the grammar allowed in its place; None for free text, and behind a token
        that it refuses.
    place: JSON pointer of the value that was being written before it; None unless the text is JSON.
    """

    id: int
    text: str
    source: str
    outcome: Outcome
    draft_prob: float | None = None
    target_prob: float | None = None
    processed_prob: float | None = None
    allowed: int | None = None
    place: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """One speculative step of one request.

    start: output tokens before it. drafted: its draft, in order. drawn: the token behind what was
    accepted; None where the accepted tokens ended the text, or none was legal.
    num_kept: accepted and drawn tokens that the text has; a stop or ``max_tokens`` drops the rest.
    at: seconds from the start of the request's first step to the end of this one. seconds: that
    this one took, from the making of its batch to its commit. mask_seconds: host time on the masks
    of all its requests, a part of it or beside the target's forward. num_requests: in its batch.
    """

    start: int
    drafted: tuple[TokenTrace, ...]
    drawn: TokenTrace | None
    num_kept: int
    at: float
    seconds: float
    mask_seconds: float
    num_requests: int

    @property
    def tokens(self) -> tuple[TokenTrace, ...]:
        """The accepted tokens and the drawn one, as far as the text has them."""
        accepted = [token for token in self.drafted if token.outcome == "accepted"]
        drawn = [] if self.drawn is None else [self.drawn]
        return tuple([*accepted, *drawn][: self.num_kept])


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One text, step by step.

    proposer, verifier, temperature: as it was generated. grammar: its kind, None for free text.
    vocab_size: of the target. prompt_tokens: read before the first step.
    text, finish_reason: of its ``Completion``. stop_token_ids: that end a text of this vocabulary.
    """

    proposer: str
    verifier: str
    temperature: float
    grammar: str | None
    vocab_size: int
    prompt_tokens: int
    stop_token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: tuple[StepTrace, ...]

    @property
    def token_ids(self) -> list[int]:
        """Every token of the text."""
        return [token.id for step in self.steps for token in step.tokens]

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last one."""
        return self.steps[-1].at if self.steps else 0.0

    def drafted_at(self) -> list[int]:
        """How many steps drafted a token at each position."""
        return self._count([len(step.drafted) for step in self.steps])

    def accepted_at(self) -> list[int]:
        """How many of these were accepted, in step with ``drafted_at``."""
        lengths = [sum(t.outcome == "accepted" for t in step.drafted) for step in self.steps]
        counts = self._count(lengths)
        return counts + [0] * (len(self.drafted_at()) - len(counts))

    @staticmethod
    def _count(lengths: Sequence[int]) -> list[int]:
        return [sum(n > at for n in lengths) for at in range(max(lengths, default=0))]


def to_json(traces: Sequence[Trace], *, indent: int | None = None) -> str:
    """A JSON array of traces, which ``from_json`` reads."""
    return _adapter().dump_json(list(traces), indent=indent).decode()


def from_json(text: str) -> list[Trace]:
    """The traces that ``to_json`` wrote. Raises ConfigError for any other text."""
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(str(part) for part in first["loc"])
        fix = f"{first['msg']} at {place!r}; pass what to_json wrote"
        raise ConfigError("trace", f"{text[:40]}...", fix) from error


@cache
def _adapter() -> TypeAdapter[list[Trace]]:
    return TypeAdapter(list[Trace])
