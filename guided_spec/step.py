"""The guided speculative step: the whole algorithm on one screen."""

from __future__ import annotations

from typing import NamedTuple

import torch

from guided_spec.core import DecodeBatch, Proposer, TargetModel
from guided_spec.errors import GrammarDeadEndError, GrammarError, GrammarStateError
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.ops.bitmask import apply_token_bitmask
from guided_spec.ops.rejection import rejection_sample
from guided_spec.ops.warp import warp
from guided_spec.types import Accepted, Draft, Noise

__all__ = ["Committed", "Step", "commit", "speculative_step"]


class Step(NamedTuple):
    """One step's outcome: what was accepted, of which draft, under which masks."""

    accepted: Accepted
    draft: Draft
    lookahead: Lookahead


class Committed(NamedTuple):
    """What one request gained: its new tokens, or why it cannot go on after them."""

    token_ids: list[int]
    num_accepted: int
    error: GrammarError | None = None


def speculative_step(
    target: TargetModel, proposer: Proposer, batch: DecodeBatch, noise: Noise
) -> Step:
    """Draft, verify in one forward, and keep what the rejection sampler accepts.

    Originals of the batch's constraints are not touched: ``commit`` moves them.
    """
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft = proposer.propose(batch, lookahead)
    draft = lookahead.start(draft)  # the rows still missing are filled beside the forward
    output = target.verify(batch, draft)
    bitmask = lookahead.finish(draft.token_ids.shape[1])
    probs = warp(apply_token_bitmask(output.logits, bitmask), batch.sampling)
    return Step(rejection_sample(probs, draft, noise), draft, lookahead)


def commit(batch: DecodeBatch, accepted: Accepted) -> list[Committed]:
    """Move the original matchers over the accepted tokens; one download.

    Returns one record a request. A request whose grammar is at a dead end, or refuses a token, gets
    the error; the others are not affected.
    """
    packed = torch.cat([accepted.num_accepted.unsqueeze(1), accepted.token_ids], 1).tolist()
    return [
        _commit_row(constraint, num_accepted, row)
        for constraint, (num_accepted, *row) in zip(batch.constraints, packed, strict=True)
    ]


def _commit_row(constraint: Constraint | None, num_accepted: int, row: list[int]) -> Committed:
    token_ids = [token for token in row[: num_accepted + 1] if token >= 0]
    if constraint is not None:
        try:
            token_ids = constraint.commit(token_ids)
        except GrammarStateError as error:
            return Committed([], num_accepted, error)
    if row[num_accepted] < 0 and not (constraint is not None and constraint.is_terminated):
        reason = f"no token is legal after {num_accepted} accepted draft tokens"
        return Committed(token_ids, num_accepted, GrammarDeadEndError(reason))
    return Committed(token_ids, num_accepted)
