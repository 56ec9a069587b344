"""What one way of generating cost on a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from guided_spec.engine.outputs import Completion

__all__ = ["Measurement", "measure_completions"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Totals over a workload.

    name: the proposer, or the engine compared with.
    requests, failed, tokens: counts; seconds: wall time of the whole workload.
    forwards: target forwards that decoded, a forward over a batch counted once a request.
    drafted, accepted: draft tokens. mask_microseconds: host time on masks per output token; None
        where it was not measured.
    valid: share of the finished outputs that match their grammar.
    same_text: share of the requests whose text equals the first measurement's.
    """

    name: str
    requests: int
    failed: int
    tokens: int
    seconds: float
    forwards: int
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    mask_microseconds: float | None = None
    valid: float = 1.0
    same_text: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def forwards_per_token(self) -> float:
        """Target forwards per output token."""
        return self.forwards / self.tokens if self.tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Output tokens per target forward."""
        return self.tokens / self.forwards if self.forwards else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Every field and every ratio, for JSON."""
        ratios = ("tokens_per_second", "forwards_per_token", "acceptance_length")
        return asdict(self) | {name: getattr(self, name) for name in ratios}


def measure_completions(
    name: str, completions: Sequence[Completion], seconds: float, *, valid: float, same_text: float
) -> Measurement:
    """Add up the statistics of one run of our engine."""
    stats = [completion.stats for completion in completions]
    tokens = sum(s.output_tokens for s in stats)
    return Measurement(
        name=name,
        requests=len(completions),
        failed=sum(completion.error is not None for completion in completions),
        tokens=tokens,
        seconds=seconds,
        forwards=sum(s.steps for s in stats),
        drafted=sum(sum(s.drafted) for s in stats),
        accepted=sum(sum(s.accepted) for s in stats),
        forced=sum(s.forced_accepted for s in stats),
        mask_microseconds=sum(s.mask_seconds for s in stats) * 1e6 / max(tokens, 1),
        valid=valid,
        same_text=same_text,
    )
