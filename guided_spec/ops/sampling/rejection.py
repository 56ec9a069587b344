"""The rejection sampler: which draft tokens stay, and the one token that follows them.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (2023),
algorithm 1, with the strict test ``u * draft_prob < target_prob``: a token the grammar masks has
target probability 0 and is refused even at u = 0.

What a draft's tokens were drawn from: looked up, and written out over the target's vocabulary.

A head with D of the target's V tokens returns [B, K, D] and the column of each target token.
The wide tensor would be the largest of a step, and a verifier reads one row of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.types import Accepted, Draft, Noise


class DraftChoice(NamedTuple):
    """One drafted token for each request, on the device of the logits.

    tokens: int64 [B] target ids, -1 where none was drawn.
    probs: float32 [B, D] what the tokens were drawn from, zeros where nothing could be; None when
        every request is greedy.
    starved: bool [B], where no legal token is in the draft vocabulary though the drafter has
        logits; None with the target's own vocabulary.
    rescued: int64 [B] the only legal token of a starved row, which is its token then; -1 in every
        other row. None with the target's own vocabulary.
    """

    tokens: Tensor
    probs: Tensor | None
    starved: Tensor | None
    rescued: Tensor | None


def proposed_probs(draft: Draft) -> Tensor:
    """float [B, K]: with which probability each token was proposed; 1 where it was certain."""
    if draft.probs is None:
        return torch.ones(draft.token_ids.shape, device=draft.token_ids.device)
    at = draft.token_ids if draft.columns is None else draft.columns[draft.token_ids].long()
    probs = draft.probs.gather(-1, at.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    if draft.columns is not None:
        probs = probs.masked_fill(at < 0, 0.0)
    return probs if draft.is_certain is None else probs.masked_fill(draft.is_certain, 1.0)


def dense_probs(draft: Draft, vocab_size: int) -> Tensor:
    """float [B, K, V]: the distribution of every token, one-hot where it was certain."""
    ids, probs = draft.token_ids, draft.probs
    if probs is not None and draft.columns is not None:
        columns = draft.columns.long()
        probs = probs[..., columns.clamp_min(0)].masked_fill(columns < 0, 0.0)
    if probs is not None and draft.is_certain is None:
        return probs
    one_hot = torch.zeros(*ids.shape, vocab_size, device=ids.device)
    one_hot.scatter_(-1, ids.unsqueeze(-1), 1.0)
    if probs is None or draft.is_certain is None:
        return one_hot
    return torch.where(draft.is_certain.unsqueeze(-1), one_hot.to(probs.dtype), probs)


def draft_at(draft: Draft, positions: Tensor) -> Draft:
    """A draft of width 1 with position ``positions[b]`` of each row, int64 [B] in [0, K)."""
    rows = torch.arange(len(positions), device=positions.device)
    probs, is_certain = draft.probs, draft.is_certain
    return draft._replace(
        token_ids=draft.token_ids[rows, positions].unsqueeze(1),
        probs=None if probs is None else probs[rows, positions].unsqueeze(1),
        is_certain=None if is_certain is None else is_certain[rows, positions].unsqueeze(1),
    )


def rejection_sample(target_probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
    """Accept a prefix of every row's draft and draw one more token; exact for any draft.

    target_probs: [B, K + 1, V] float32, row i after the draft tokens before i; a row of zeros
        means that no token is legal there.
    draft: K tokens a row, see ``Draft``. ``probs`` None means one-hot.
    noise: ``accept`` [B, >= K], ``sample`` [B, V]; further columns of ``accept`` are not used.

    The emitted tokens are distributed as if each were drawn from ``target_probs`` in turn. Where
    the row to draw from is all zeros the drawn token is -1. All tensors on one device, no sync.
    """
    batch, num_draft = draft.token_ids.shape
    if num_draft == 0:
        return Accepted(draw(target_probs[:, 0], noise.sample).unsqueeze(1), draft.num_tokens)
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
    return draw(torch.where(refused.unsqueeze(1), residual, probs), exponential)


def draw(probs: Tensor, exponential: Tensor) -> Tensor:
    """int64 [...]: a draw from each row of [..., V], of any sum; -1 if it is all zeros.

    The exponential race: the argmax of p / exponential(1) is distributed as p.
    """
    winner = (probs / exponential).max(-1)
    return torch.where(winner.values > 0, winner.indices, -1)
