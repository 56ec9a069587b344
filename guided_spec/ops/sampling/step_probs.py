"""How likely a step's drafted and drawn tokens were, and how many tokens the grammar left there.

For those who look at a step, not for those who decide it: the verifier needs none of this, so that
it is computed for the requests that are watched and for no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.host import to_device
from guided_spec.ops.sampling.logprobs import Scores
from guided_spec.ops.sampling.rejection import proposed_probs
from guided_spec.types import Draft

__all__ = ["PositionProbs", "StepProbs", "gather_step_probs"]


class PositionProbs(NamedTuple):
    """One position of one request's step, on the host.

    draft_id: the drafted token; one past the end of the draft means nothing.
    allowed: tokens that the mask row admits.
    draft_prob: what it was drawn with; NaN where the draft is one-hot, and past its end.
    draft_masked, draft_processed: the target's probability of it, in these modes of
        ``SamplingParams.logprobs_mode``.
    masked, processed: that of the token which was accepted or drawn there; where there is none,
        nothing.
    """

    draft_id: int
    allowed: int
    draft_prob: float
    draft_masked: float
    draft_processed: float
    masked: float
    processed: float


class StepProbs(NamedTuple):
    """What ``gather_step_probs`` found, still on the device.

    values: float64 [R, K + 1, 7], the fields of ``PositionProbs``.
    """

    values: Tensor

    def rows(self) -> list[list[PositionProbs]]:
        """[R] lists of the K + 1 positions; one download."""
        return [
            [PositionProbs(int(row[0]), int(row[1]), *row[2:]) for row in rows]
            for rows in self.values.tolist()
        ]


def gather_step_probs(
    scores: Scores, draft: Draft, token_ids: Tensor, requests: Sequence[int]
) -> StepProbs:
    """Probabilities of the drafted tokens and of ``token_ids``, for some requests.

    draft: of K tokens. token_ids: int64 [B, K + 1], what was accepted and drawn, padded with -1.
    requests: R of them, by their rows.

    Computes in float32 on the device of the scores, which are not changed; no sync.
    """
    rows = to_device(requests, token_ids.device)
    chosen = token_ids[rows].clamp_min(0)
    drafted = torch.nn.functional.pad(draft.token_ids[rows], (0, 1))
    pairs = torch.stack([drafted, chosen], -1)
    masked = scores.logprobs("masked", rows).gather(-1, pairs).exp()
    processed = scores.logprobs("processed", rows).gather(-1, pairs).exp()
    columns = [
        drafted,
        _allowed(scores, rows),
        _draft_probs(draft)[rows],
        masked[..., 0],
        processed[..., 0],
        masked[..., 1],
        processed[..., 1],
    ]
    # float64 holds every float32 and every token id, so that one download takes them all.
    return StepProbs(torch.stack([column.double() for column in columns], -1))


def _draft_probs(draft: Draft) -> Tensor:
    """float [B, K + 1]: NaN where no distribution was drawn from."""
    probs = proposed_probs(draft)
    if draft.probs is None:
        probs = torch.full_like(probs, torch.nan)
    elif draft.is_certain is not None:
        probs = probs.masked_fill(draft.is_certain, torch.nan)
    return torch.nn.functional.pad(probs, (0, 1), value=torch.nan)


def _allowed(scores: Scores, rows: Tensor) -> Tensor:
    """int64 [R, K + 1]: set bits of the mask rows, V without a mask."""
    vocab_size = scores.logits.shape[-1]
    if scores.bitmask is None:
        shape = (len(rows), scores.logits.shape[1])
        return torch.full(shape, vocab_size, device=rows.device)
    return unpack_bitmask(scores.bitmask[rows], vocab_size).sum(-1)
