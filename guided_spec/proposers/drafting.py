"""What all proposers share: how a draft is put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch
from guided_spec.models.padding import pad_ids
from guided_spec.types import Draft

__all__ = ["concatenate", "host_draft"]


def host_draft(batch: DecodeBatch, token_ids: Sequence[Sequence[int]]) -> Draft:
    """A one-hot draft on the batch's device from [B] lists of token ids."""
    longest = max(map(len, token_ids), default=0)
    ids = pad_ids(token_ids, longest)
    lengths = torch.tensor([len(row) for row in token_ids], dtype=torch.int64)
    device = batch.device
    return Draft(ids.to(device, non_blocking=True), lengths.to(device, non_blocking=True))


def concatenate(first: Draft, second: Draft) -> Draft:
    """Each request's tokens of ``first``, then those of ``second``; no sync."""
    num_tokens = first.num_tokens + second.num_tokens
    width = first.token_ids.shape[1] + second.token_ids.shape[1]
    device = first.token_ids.device
    columns = torch.arange(second.token_ids.shape[1], device=device)
    index = first.num_tokens.unsqueeze(1) + columns
    ids = torch.zeros(len(num_tokens), width, dtype=torch.int64, device=device)
    ids[:, : first.token_ids.shape[1]] = first.token_ids
    ids.scatter_(1, index, second.token_ids)
    if first.probs is None and second.probs is None:
        return Draft(ids, num_tokens)
    vocab_size = next(d.probs.shape[-1] for d in (first, second) if d.probs is not None)
    probs = torch.zeros(len(num_tokens), width, vocab_size, device=device)
    probs[:, : first.token_ids.shape[1]] = _probs(first, vocab_size)
    probs.scatter_(1, index.unsqueeze(-1).expand(-1, -1, vocab_size), _probs(second, vocab_size))
    return Draft(ids, num_tokens, probs)


def _probs(draft: Draft, vocab_size: int) -> Tensor:
    if draft.probs is not None:
        return draft.probs
    return torch.nn.functional.one_hot(draft.token_ids, vocab_size).float()
