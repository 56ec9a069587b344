"""What speculation did for one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["RequestStats"]


@dataclass(slots=True)
class RequestStats:
    """Counters of one request, final when it ends.

    prompt_tokens, output_tokens: lengths, the end-of-text token included.
    steps: target forwards that decoded this request, prefill not counted.
    drafted, accepted: [K] draft tokens proposed and accepted at each position of a draft.
    forced, forced_accepted: those of them that the grammar left no choice about.
    planned: K of each of its steps, added up; forced tokens come on top of K.
    starved: draft positions at which a draft head's smaller vocabulary had no legal token.
    steered: output tokens chosen where the mask lacked tokens behind which the text could no longer
        have ended within its budget, see ``SamplingParams.complete``.
    ends_lost: 1 where no way to end the text within its budget was known any more, so that it may
        be cut off. The grammar holds all the same.
    resyncs: matchers rebuilt from the committed tokens because they disagreed with them.
    mask_seconds: host time spent on filling masks, this request's share of its batches.
    seconds: from the start of the request's prefill to its end.
    seed: the seed that was used, given or drawn.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    forced: int = 0
    forced_accepted: int = 0
    planned: int = 0
    starved: int = 0
    steered: int = 0
    ends_lost: int = 0
    resyncs: int = 0
    mask_seconds: float = 0.0
    seconds: float = 0.0
    seed: int = 0
    _started: float = field(default=0.0, repr=False, compare=False)

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward: 1.0 without speculation."""
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def forwards_per_token(self) -> float:
        """Target forwards per output token: 1.0 without speculation."""
        return self.steps / self.output_tokens if self.output_tokens else 0.0

    @property
    def draft_length(self) -> float:
        """The mean K of its steps."""
        return self.planned / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of ``seconds``."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Every counter and every ratio, for JSON."""
        counters = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        ratios = ("acceptance_length", "draft_length", "forwards_per_token", "tokens_per_second")
        return counters | {name: getattr(self, name) for name in ratios}

    def start(self) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock; a request that never ran took no time."""
        if self._started:
            self.seconds = time.perf_counter() - self._started

    def count_step(self, drafted: int, accepted: int, forced: list[int]) -> None:
        """Add one step: ``accepted`` of ``drafted`` tokens, those at ``forced`` being forced."""
        self.steps += 1
        if drafted:
            _count(self.drafted, drafted)
            _count(self.accepted, accepted)
        if forced:
            self.forced += len(forced)
            self.forced_accepted += sum(position < accepted for position in forced)


def _count(positions: list[int], length: int) -> None:
    if len(positions) < length:
        positions.extend([0] * (length - len(positions)))
    for position in range(length):
        positions[position] += 1
