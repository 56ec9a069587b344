"""Masks applied and translated as kernels: one pass each, and never a boolean for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch

WORDS = 32  # mask words a program, 32 tokens each
WARPS = 4


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Logits [N, V] with illegal tokens at -inf; a mask row each, at least one logit."""
    rows, masks = logits.reshape(-1, logits.shape[-1]), bitmask.reshape(-1, bitmask.shape[-1])
    masked = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    x = rows if rows.stride(1) == 1 else rows.contiguous()
    words = masks if masks.stride(1) == 1 else masks.contiguous()
    grid = (len(rows), triton.cdiv(rows.shape[1], WORDS * 32))
    launch(_apply, grid)(
        x, x.stride(0), words, words.stride(0), words.shape[1], masked, rows.shape[1], WORDS,
        num_warps=WARPS,
    )  # fmt: skip
    return masked.view(logits.shape)


def translate_bitmask(bitmask: Tensor, target_ids: Tensor) -> Tensor:
    """Masks int32 [N, W] to [N, ceil(D / 32)]; at least one row and one target id."""
    masks, size = bitmask.reshape(-1, bitmask.shape[-1]), len(target_ids)
    num_words = triton.cdiv(size, 32)
    found = torch.empty(len(masks), num_words, dtype=torch.int32, device=bitmask.device)
    words = masks if masks.stride(1) == 1 else masks.contiguous()
    grid = (len(masks), triton.cdiv(num_words, WORDS))
    launch(_translate, grid)(
        words, words.stride(0), words.shape[1], target_ids.contiguous(), size, found, num_words,
        WORDS, num_warps=WARPS,
    )  # fmt: skip
    return found.view(*bitmask.shape[:-1], num_words)


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    logits, row_stride, bitmask, mask_stride, num_words, masked, columns, words: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    word, lane = tl.program_id(1) * words + tl.arange(0, words), tl.arange(0, 32)
    column = word[:, None] * 32 + lane[None, :]
    inside = column < columns
    # A word for 32 logits: their loads stay wide, and fall away where none is legal.
    bits = tl.load(bitmask + row * mask_stride + word, mask=word < num_words, other=0)[:, None]
    no = float("-inf")
    x = tl.load(logits + row * row_stride + column, mask=inside & (bits != 0), other=no)
    x = tl.where(((bits >> lane[None, :]) & 1) != 0, x, no)
    tl.store(masked + row * columns + column, x, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _translate(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    bitmask, mask_stride, mask_words, target_ids, size, found, num_words, words: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    word, lane = tl.program_id(1) * words + tl.arange(0, words), tl.arange(0, 32)
    column = word[:, None] * 32 + lane[None, :]
    inside = column < size
    target = tl.load(target_ids + column, mask=inside, other=0)
    at = target >> 5
    source = tl.load(bitmask + row * mask_stride + at, mask=inside & (at < mask_words), other=0)
    bits = (source >> (target & 31).to(tl.int32)) & 1
    packed = tl.sum(bits << lane[None, :], 1)
    tl.store(found + row * num_words + word, packed, mask=word < num_words)
