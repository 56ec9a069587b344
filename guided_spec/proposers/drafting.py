"""What all proposers share: how a draft is put together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch
from guided_spec.models.padding import pad_ids
from guided_spec.ops.draft_probs import dense_probs
from guided_spec.ops.host_integers import host_integers
from guided_spec.types import Draft

__all__ = ["concatenate", "host_draft", "no_draft", "shared_prompts"]


def host_draft(batch: DecodeBatch, token_ids: Sequence[Sequence[int]]) -> Draft:
    """A one-hot draft on the batch's device from [B] lists of token ids."""
    longest = max(map(len, token_ids), default=0)
    ids = pad_ids(token_ids, longest)
    lengths = host_integers([len(row) for row in token_ids])
    device = batch.device
    return Draft(ids.to(device, non_blocking=True), lengths.to(device, non_blocking=True))


def no_draft(batch: DecodeBatch) -> Draft:
    """[B, 0] tokens."""
    return host_draft(batch, [()] * len(batch))


def shared_prompts(batch: DecodeBatch) -> list[list[int]]:
    """The rows of each prompt that the target read once for several requests of the batch."""
    if len(set(batch.prefills)) == len(batch.prefills):
        return []
    groups: dict[Hashable, list[int]] = {}
    for row, prefill in enumerate(batch.prefills):
        groups.setdefault(prefill, []).append(row)
    return [rows for rows in groups.values() if len(rows) > 1]


def concatenate(first: Draft, second: Draft) -> Draft:
    """Each request's tokens of ``first``, then those of ``second``; no sync."""
    batch, left = first.token_ids.shape
    width = left + second.token_ids.shape[1]
    device = first.token_ids.device
    columns = torch.arange(width, device=device)
    index = first.num_tokens.unsqueeze(1) + columns[: width - left]
    parts = [(first, columns[:left].expand(batch, -1)), (second, index)]
    ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
    for draft, at in parts:
        ids.scatter_(1, at, draft.token_ids)
    joined = Draft(ids, first.num_tokens + second.num_tokens)
    if first.probs is None and second.probs is None:
        return joined
    if first.probs is not None and second.probs is not None and first.columns is not second.columns:
        parts = [(_over_target(draft), at) for draft, at in parts]
    return _with_probs(joined, parts)


def _with_probs(joined: Draft, parts: Sequence[tuple[Draft, Tensor]]) -> Draft:
    """parts: what was joined, and where each token of it went, int64 [B, its width]."""
    source = next(draft for draft, _ in parts if draft.probs is not None)
    assert source.probs is not None
    size = source.probs.shape[-1]
    probs = torch.zeros(*joined.token_ids.shape, size, device=joined.token_ids.device)
    is_certain = torch.ones_like(joined.token_ids, dtype=torch.bool)
    for draft, at in parts:
        is_certain.scatter_(1, at, _certain(draft))
        if draft.probs is not None:
            probs.scatter_(1, at.unsqueeze(-1).expand(-1, -1, size), draft.probs)
    return joined._replace(probs=probs, columns=source.columns, is_certain=is_certain)


def _certain(draft: Draft) -> Tensor:
    if draft.probs is not None and draft.is_certain is not None:
        return draft.is_certain
    return torch.full_like(draft.token_ids, draft.probs is None, dtype=torch.bool)


def _over_target(draft: Draft) -> Draft:
    """The same with a probability for each of the target's tokens."""
    if draft.columns is None:
        return draft
    probs = dense_probs(draft, len(draft.columns))
    return draft._replace(probs=probs, columns=None)
