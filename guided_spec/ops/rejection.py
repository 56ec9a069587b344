"""The rejection sampler: which draft tokens stay, and the one token that follows them.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (2023),
algorithm 1, with the strict test ``u * draft_prob < target_prob``: a token the grammar masks has
target probability 0 and is refused even at u = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guided_spec.ops.draft_probs import dense_probs, draft_at, proposed_probs
from guided_spec.types import Accepted, Draft, Noise

__all__ = ["rejection_sample"]


def rejection_sample(target_probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
    """Accept a prefix of every row's draft and draw one more token; exact for any draft.

    target_probs: [B, K + 1, V] float32, row i given the draft tokens before i; a row of zeros
        means that no token is legal there.
    draft: K tokens a row, see ``Draft``. ``probs`` None means one-hot.
    noise: ``accept`` [B, >= K], ``sample`` [B, V]; further columns of ``accept`` are not used.

    The emitted tokens are distributed as if each were drawn from ``target_probs`` in turn. Where
    the row to draw from is all zeros the drawn token is -1. All tensors on one device, no sync.
    """
    batch, num_draft = draft.token_ids.shape
    if num_draft == 0:
        return Accepted(_race(target_probs[:, 0], noise.sample).unsqueeze(1), draft.num_tokens)
    depth = torch.arange(num_draft, device=target_probs.device)
    target = target_probs[:, :num_draft].gather(-1, draft.token_ids.unsqueeze(-1)).squeeze(-1)
    passed = (noise.accept[:, :num_draft] * proposed_probs(draft) < target) & (
        depth < draft.num_tokens.unsqueeze(1)
    )
    num_accepted = passed.long().cumprod(1).sum(1)
    next_token = _draw_next(target_probs, draft, num_accepted, noise.sample)
    token_ids = torch.full((batch, num_draft + 1), -1, device=target_probs.device)
    token_ids[:, :num_draft] = torch.where(depth < num_accepted.unsqueeze(1), draft.token_ids, -1)
    token_ids.scatter_(1, num_accepted.unsqueeze(1), next_token.unsqueeze(1))
    return Accepted(token_ids, num_accepted)


def _draw_next(
    target_probs: Tensor, draft: Draft, num_accepted: Tensor, exponential: Tensor
) -> Tensor:
    """[B] int64: drawn from the residual after a refusal, else from the target; -1 if it is 0."""
    rows = torch.arange(len(num_accepted), device=target_probs.device)
    probs = target_probs[rows, num_accepted]
    drafted = draft_at(draft, num_accepted.clamp_max(draft.token_ids.shape[1] - 1))
    residual = (probs - dense_probs(drafted, probs.shape[1]).squeeze(1)).clamp_min(0)
    # Rounding can leave nothing of a residual that is not empty in exact arithmetic (target and
    # draft equal up to an ulp): the target itself is then the right distribution.
    refused = (num_accepted < draft.num_tokens) & (residual > 0).any(1)
    return _race(torch.where(refused.unsqueeze(1), residual, probs), exponential)


def _race(probs: Tensor, exponential: Tensor) -> Tensor:
    """[B] int64: a draw from each row of [B, V], which need not sum to 1; -1 if it is all zeros.

    The exponential race: the argmax of p / exponential(1) is distributed as p.
    """
    winner = (probs / exponential).max(1)
    return torch.where(winner.values > 0, winner.indices, -1)
