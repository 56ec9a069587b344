"""What a draft's tokens were drawn from: looked up, and written out over the target's vocabulary.

A head with D of the target's V tokens hands on [B, K, D] and where each target token stands in it.
The wide tensor would be the largest of a step, and a verifier reads one row of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.types import Draft

__all__ = ["DraftChoice", "dense_probs", "draft_at", "proposed_probs"]


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
    """Of each row the one position ``positions[b]``, int64 [B] in [0, K): K is 1 behind it."""
    rows = torch.arange(len(positions), device=positions.device)
    probs, is_certain = draft.probs, draft.is_certain
    return draft._replace(
        token_ids=draft.token_ids[rows, positions].unsqueeze(1),
        probs=None if probs is None else probs[rows, positions].unsqueeze(1),
        is_certain=None if is_certain is None else is_certain[rows, positions].unsqueeze(1),
    )
