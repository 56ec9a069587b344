"""Traces that are put together by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guided_spec.trace.record import Outcome, StepTrace, TokenTrace, Trace


def make_token(text: str, outcome: Outcome, **fields: Any) -> TokenTrace:
    """A token that "ngram" drafted, or one of the target's."""
    source = "target" if outcome in ("replacement", "bonus") else "ngram"
    return TokenTrace(**{"id": 7, "text": text, "source": source, "outcome": outcome, **fields})


def make_step(
    drafted: Sequence[TokenTrace], drawn: TokenTrace | None, num_kept: int, at: float = 0.5
) -> StepTrace:
    """A step of a quarter of a second."""
    return StepTrace(
        start=0,
        drafted=tuple(drafted),
        drawn=drawn,
        num_kept=num_kept,
        at=at,
        seconds=0.25,
        mask_seconds=0.001,
        num_requests=1,
    )


def make_trace(steps: Sequence[StepTrace], **fields: Any) -> Trace:
    """A greedy text under a JSON schema, by "ngram"."""
    return Trace(
        **{
            "proposer": "ngram",
            "verifier": "rejection",
            "temperature": 0.0,
            "grammar": "json_schema",
            "vocab_size": 403,
            "prompt_tokens": 5,
            "stop_token_ids": (0,),
            "text": "{}",
            "finish_reason": "stop",
            "steps": tuple(steps),
            **fields,
        }
    )
