"""The likeliest legal tokens of a place, for whoever grows a tree around the one drafted there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.ops.bitmask import apply_token_bitmask, translate_bitmask

LISTED = 8
GROUP = 32  # tokens, of which the likeliest is looked at first


class Likeliest(NamedTuple):
    """values: the highest logits [..., C], the best first. found: int64, where they stand."""

    values: Tensor
    found: Tensor


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """``topk`` of logits [..., D] that reads a large vocabulary once.

    The ``count`` highest logits stand in the ``count`` groups with the highest peaks; so what is
    sorted are the peaks of the groups, and then the tokens of so many of them.
    """
    size = logits.shape[-1]
    if size <= 2 * GROUP * count:
        return Likeliest(*logits.topk(count))
    whole = size // GROUP * GROUP
    peaks = logits[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1)
    if whole < size:
        peaks = torch.cat([peaks, logits[..., whole:].amax(-1, keepdim=True)], -1)
    groups = peaks.topk(count, sorted=False).indices
    places = torch.arange(GROUP, device=logits.device)
    tokens = (groups.unsqueeze(-1) * GROUP + places).flatten(-2)
    held = logits.gather(-1, tokens.clamp_max(size - 1)).masked_fill(tokens >= size, -torch.inf)
    values, at = held.topk(count)
    return Likeliest(values, tokens.gather(-1, at))


def list_likely_tokens(logits: Tensor, bitmask: Tensor | None, target_ids: Tensor | None) -> Tensor:
    """int32 [B, 2, LISTED]: target ids, the best first, and the bits of their logits in float32.

    -1: no token. logits: [B, D]. bitmask: int32 [B, W] over the target's tokens; None forbids
    nothing. target_ids: int64 [D], which target token each draft token is; None: the target's own.
    All on one device; nothing waits for the host, so a CUDA graph may hold it.
    """
    if bitmask is not None and target_ids is not None:
        bitmask = translate_bitmask(bitmask, target_ids)
    count = min(LISTED, logits.shape[-1])
    values, found = likeliest(apply_token_bitmask(logits, bitmask), count)
    if target_ids is not None:
        found = target_ids[found]
    found = found.masked_fill(values.isneginf(), -1)
    listed = torch.stack([found.int(), values.float().view(torch.int32)], 1)
    return functional.pad(listed, (0, LISTED - count), value=-1)
