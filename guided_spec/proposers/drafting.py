"""What all proposers share: how a draft is put together, and the loop that drafts with a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.ops.bitmask import apply_token_bitmask
from guided_spec.ops.warp import warp
from guided_spec.types import Draft

__all__ = ["concatenate", "draft_autoregressively", "host_draft"]


def host_draft(batch: DecodeBatch, token_ids: Sequence[Sequence[int]]) -> Draft:
    """A one-hot draft on the batch's device from [B] lists of token ids."""
    longest = max(map(len, token_ids), default=0)
    padded = [[*row, *[0] * (longest - len(row))] for row in token_ids]
    ids = torch.tensor(padded, dtype=torch.int64).view(len(token_ids), longest)
    lengths = torch.tensor([len(row) for row in token_ids], dtype=torch.int64)
    return Draft(ids.to(batch.device), lengths.to(batch.device))


def draft_autoregressively(
    first_logits: Tensor,
    forward: Callable[[Tensor], Tensor],
    batch: DecodeBatch,
    lookahead: Lookahead,
) -> Draft:
    """Mask, sample, accept on the fork; up to K times, for any model that maps a token to logits.

    first_logits: [B, V] after each request's context and its draft so far.
    forward: int64 [B] tokens just drafted -> [B, V] logits after them. Not called for the last.

    Greedy requests draft the largest legal logit. At temperature > 0 the draft is sampled from the
    masked, warped draft distribution, which the verifier is given. A request is left alone from
    the first position on where it may not draft or has no legal token.
    """
    logits = first_logits
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    counts: list[Tensor] = []
    first = batch.positions() + torch.tensor(
        [len(drafted) for drafted in lookahead.drafted], device=batch.device
    )
    for depth in range(batch.num_draft_tokens):
        if not any(lookahead.is_open):
            break
        if depth > 0:
            logits = forward(tokens[-1])
        opened = torch.tensor(lookahead.is_open, device=batch.device)
        masked = apply_token_bitmask(logits, lookahead.next_mask())
        row_probs = warp(masked.unsqueeze(1), batch.sampling).squeeze(1)
        token = _draw(row_probs, batch, first + depth)
        lookahead.accept(token)
        tokens.append(token.clamp_min(0))
        probs.append(row_probs)
        counts.append(opened & (token >= 0))
    if not tokens:
        return host_draft(batch, [[] for _ in lookahead.drafted])
    sampled = None if batch.sampling.all_greedy else torch.stack(probs, 1)
    return Draft(torch.stack(tokens, 1), torch.stack(counts, 1).sum(1), sampled)


def _draw(probs: Tensor, batch: DecodeBatch, positions: Tensor) -> Tensor:
    """int64 [B]; -1 where nothing has any probability."""
    scores = probs if batch.sampling.all_greedy else probs / batch.draft_noise(positions)
    best = scores.max(-1)
    return torch.where(best.values > 0, best.indices, -1)


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
