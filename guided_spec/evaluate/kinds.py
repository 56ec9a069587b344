"""Tokens by what a grammar left of the vocabulary, and how drafts for them fared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from guided_spec.trace.record import TokenTrace, Trace


class KindCount(NamedTuple):
    """Tokens of one kind. written: of the texts. drafted, accepted: of the drafts for them."""

    written: int = 0
    drafted: int = 0
    accepted: int = 0


class KindCounts(NamedTuple):
    """Tokens by what the grammar left: one token, some, or all of them.

    forced: whoever drafted it. free: without a grammar, or before its start.
    A drafted token that the grammar refuses stands where it leaves some; drafts that were not used
    after a rejected token are not counted.
    """

    forced: KindCount
    constrained: KindCount
    free: KindCount

    @classmethod
    def from_traces(cls, traces: Iterable[Trace]) -> KindCounts:
        """Add up whole texts."""
        written = dict.fromkeys(cls._fields, 0)
        drafted, accepted = dict(written), dict(written)
        for trace in traces:
            for step in trace.steps:
                for token in step.tokens:
                    written[_kind(token, trace)] += 1
                for token in step.drafted:
                    if token.outcome != "unused":
                        drafted[_kind(token, trace)] += 1
                        accepted[_kind(token, trace)] += token.outcome == "accepted"
        return cls(*(KindCount(written[n], drafted[n], accepted[n]) for n in cls._fields))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an object a kind."""
        return {name: count._asdict() for name, count in self._asdict().items()}


def _kind(token: TokenTrace, trace: Trace) -> str:
    if trace.grammar is None or token.allowed == trace.vocab_size:
        return "free"
    return "forced" if token.allowed == 1 else "constrained"
