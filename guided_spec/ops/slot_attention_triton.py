"""Attention over slots as three kernels: write, attend by parts of the text, combine the parts.

A part is a program of its own, so that one long text fills the device as well as many texts do
(split keys and values, "Flash-Decoding", Dao, Haziza, Massa and Sizov, 2023). A program holds the
queries of all heads that share its keys, which are then read once. Softmax goes block by block
with a running maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018),
in powers of 2.

The grids depend on shapes only; how the parts of each text are cut is worked out on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.dependents_triton import follow, following

__all__ = ["Tiling", "choose_tiling", "slot_attention"]

LOG2_E = 1.4426950408889634
PROGRAMS = 396  # what an H200 (132 multiprocessors) runs at a time: three programs on each
MAX_SPLITS = 64


class Tiling(NamedTuple):
    """How the attention is divided into programs; no choice changes a result beyond rounding.

    rows: queries (token and head) of a program, a power of 2 from 16. block: keys it reads at a
    time, likewise. splits: parts of a text, a power of 2. num_warps, num_stages: of the kernel.
    """

    rows: int
    block: int
    splits: int
    num_warps: int
    num_stages: int


def choose_tiling(query: Tensor, num_kv_heads: int, view: int) -> Tiling:
    """The tiling for query [B, Hq, T, D] over texts of up to about ``view`` positions."""
    batch, heads, tokens, width = query.shape
    padded = max(triton.next_power_of_2(width), 16)
    queries = heads // num_kv_heads * tokens
    if query.dtype == torch.float32:
        # Exact products take no tensor cores but registers: small tiles.
        largest, block, stages = (32, 32, 1) if padded <= 64 else (16, 16, 1)
    else:
        largest, block, stages = (128, 64, 3) if padded <= 128 else (64, 32, 3)
    rows = min(max(16, triton.next_power_of_2(queries)), largest)
    programs = batch * num_kv_heads * triton.cdiv(queries, rows)
    wanted = min(max(PROGRAMS // programs, 1), MAX_SPLITS)
    useful = triton.next_power_of_2(triton.cdiv(view, block))
    splits = min(1 << (wanted.bit_length() - 1), useful)
    return Tiling(rows, block, splits, 8 if rows * padded > 64 * 128 else 4, stages)


def slot_attention(  # noqa: PLR0913 - the schema of the operator
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    scale: float,
    window: int,
    view: int,
    tiling: Tiling | None = None,
) -> Tensor:
    """See ``guided_spec.ops.slot_attention``; the arguments on one CUDA device.

    key, value: None where the slots hold them. window: 0 for none. view: see ``SlotPlaces``.
    tiling: by ``choose_tiling`` when None.
    """
    batch, heads, tokens, width = query.shape
    output = query.new_empty(batch, tokens, heads, width)
    if output.numel() == 0:
        return output
    query, slots, starts = _with_rows(query.to(keys.dtype)), slots.contiguous(), starts.contiguous()
    num_kv_heads, max_length = keys.shape[1], keys.shape[2] - 1
    padded = max(triton.next_power_of_2(width), 16)
    tile = choose_tiling(query, num_kv_heads, view) if tiling is None else tiling
    queries = heads // num_kv_heads * tokens
    pairs, tiles = batch * num_kv_heads, triton.cdiv(queries, tile.rows)
    parts = (pairs * tiles, tile.splits if tile.splits > 1 else 0, tile.rows)
    partial = query.new_empty(*parts, width, dtype=torch.float32)
    lse = query.new_empty(parts, dtype=torch.float32)
    cut = (num_kv_heads, heads // num_kv_heads, width, padded, tile.rows, tile.splits, tile.block)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        if key is not None and value is not None:
            few = min(triton.next_power_of_2(tokens), 16)
            key, value = _with_rows(key), _with_rows(value)
            _store[(batch * triton.cdiv(tokens, few), num_kv_heads)](
                *(key, value, keys, values, slots, starts, tokens, max_length),
                *(*key.stride()[:3], *value.stride()[:3], width, padded, few),
                num_warps=1 if few * padded <= 256 else 4,
                **following(query),
            )
        _attend[(tiles, pairs, tile.splits)](
            *(query, keys, values, slots, starts, output, partial, lse, scale * LOG2_E),
            *(tokens, max_length, *query.stride()[:3], *cut, window),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **following(query),
        )
        if tile.splits > 1:
            _combine[(queries, pairs)](
                *(partial, lse, slots, starts, output, tokens, max_length, *cut, window),
                num_warps=1 if tile.splits * padded <= 2048 else 4,
                **following(query),
            )
    return output


def _with_rows(states: Tensor) -> Tensor:
    return states if states.stride(3) == 1 else states.contiguous()


# Triton reads annotations as its own, so the arguments have none. A number that changes from call
# to call must not become part of the kernel: a new one would be compiled for it.
@triton.jit(do_not_specialize=["num_tokens", "max_length"])  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def] # noqa: PLR0913
    key,
    value,
    keys,
    values,
    slots,
    starts,
    num_tokens,
    max_length,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Writes the keys and values of TOKENS tokens of one row and head."""
    follow(FOLLOWS)
    groups = tl.cdiv(num_tokens, TOKENS)
    row, head = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(1)
    token = (tl.program_id(0) % groups) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + row)
    place = tl.minimum(tl.load(starts + row) + token, max_length)  # int64
    column = tl.arange(0, PADDED)
    written = token < tl.where(slot >= 0, num_tokens, 0)
    mask = written[:, None] & (column < WIDTH)[None, :]
    target = ((slot * tl.num_programs(1) + head) * (max_length + 1) + place) * WIDTH
    target = target[:, None] + column[None, :]
    source = row * key_row + head * key_head + token * key_token
    states = tl.load(key + source[:, None] + column[None, :], mask=mask)
    tl.store(keys + target, states, mask=mask)
    source = row * value_row + head * value_head + token * value_token
    states = tl.load(value + source[:, None] + column[None, :], mask=mask)
    tl.store(values + target, states, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _span(  # type: ignore[no-untyped-def] # noqa: PLR0913
    start,
    limit,
    tile,
    num_tokens,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The positions [low, end) that a tile sees below the limit, and a split's share of them."""
    last = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, num_tokens - 1)
    end = tl.minimum(start + last + 1, limit)
    low = end * 0
    if WINDOW > 0:
        low = tl.maximum(start + tile * ROWS // GROUP - WINDOW + 1, 0) // BLOCK * BLOCK
    blocks = tl.cdiv(tl.maximum(end - low, 0), BLOCK)
    return low, end, tl.cdiv(blocks, SPLITS) * BLOCK


@triton.jit(do_not_specialize=["num_tokens", "max_length"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0915
    query,
    keys,
    values,
    slots,
    starts,
    output,
    partial,
    lse,
    scale,
    num_tokens,
    max_length,
    query_row,
    query_head,
    query_token,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """ROWS queries of one row and key head over one split of what they see."""
    follow(FOLLOWS)
    tile, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)
    slot, start = tl.load(slots + row), tl.load(starts + row).to(tl.int32)
    end = tl.where(slot >= 0, max_length, 0)
    low, end, share = _span(start, end, tile, num_tokens, GROUP, ROWS, SPLITS, BLOCK, WINDOW)
    low += split * share
    end = tl.minimum(low + share, end)
    member = tile * ROWS + tl.arange(0, ROWS)
    token, column = member // GROUP, tl.arange(0, PADDED)
    query_heads, within = head * GROUP + member % GROUP, column < WIDTH
    source = row * query_row + query_heads * query_head + token * query_token
    mask = (token < num_tokens)[:, None] & within[None, :]
    asked = tl.load(query + source[:, None] + column[None, :], mask=mask, other=0.0)
    top, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, PADDED], tl.float32)
    text = (slot * HEADS + head) * (max_length + 1) * WIDTH
    for first in range(low, end, BLOCK):
        stored = first + tl.arange(0, BLOCK)
        there = (stored < end)[:, None]
        if WIDTH != PADDED:
            there = there & within[None, :]
        place = stored[:, None] * WIDTH + column[None, :]
        tiled = tl.load(keys + text + place, mask=there, other=0.0)
        scores = tl.dot(asked, tl.trans(tiled), input_precision="ieee") * scale
        behind = (start + token)[:, None] - stored[None, :]  # how far the key is behind the query
        visible = (behind >= 0) & (stored < end)[None, :]
        if WINDOW > 0:
            visible = visible & (behind < WINDOW)
        scores = tl.where(visible, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        probs = tl.where(visible, tl.exp2(scores - higher[:, None]), 0.0)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(probs, 1)
        tiled = tl.load(values + text + place, mask=there, other=0.0)
        probs, gathered = probs.to(tiled.dtype), gathered * fade[:, None]
        gathered = tl.dot(probs, tiled, gathered, input_precision="ieee")
        top = higher
    gathered = gathered / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        target = ((row * num_tokens + token) * (HEADS * GROUP) + query_heads) * WIDTH
        target = output + target[:, None] + column[None, :]
        tl.store(target, gathered.to(output.dtype.element_ty), mask=mask)
    else:
        program = (pair * tl.num_programs(0) + tile) * SPLITS + split
        target = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        found = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -1e30)
        written = token < tl.where(low < end, num_tokens, 0)
        tl.store(lse + target, found, mask=written)
        target = partial + target[:, None] * WIDTH + column[None, :]
        tl.store(target, gathered, mask=written[:, None] & within[None, :])


@triton.jit(do_not_specialize=["num_tokens", "max_length"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def] # noqa: PLR0913
    partial,
    lse,
    slots,
    starts,
    output,
    num_tokens,
    max_length,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Weighs the splits of one query by the sums that each of them found."""
    follow(FOLLOWS)
    member, pair = tl.program_id(0), tl.program_id(1)
    tile, token = member // ROWS, member // GROUP
    row = (pair // HEADS).to(tl.int64)
    start, end = (
        tl.load(starts + row).to(tl.int32),
        tl.where(tl.load(slots + row) >= 0, max_length, 0),
    )
    low, end, share = _span(start, end, tile, num_tokens, GROUP, ROWS, SPLITS, BLOCK, WINDOW)
    split, column = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    worked = low + split * share < end
    program = pair * tl.cdiv(num_tokens * GROUP, ROWS) + tile
    source = (program * SPLITS + split).to(tl.int64) * ROWS + member % ROWS
    sums = tl.load(lse + source, mask=worked, other=-1e30)
    highest = tl.max(sums, 0)
    weight = tl.where(sums > -1e29, tl.exp2(sums - highest), 0.0)
    total = tl.sum(weight, 0)
    mask = worked[:, None] & (column < WIDTH)[None, :]
    parts = tl.load(partial + source[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    found = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    head = pair % HEADS * GROUP + member % GROUP
    target = ((row * num_tokens + token) * (HEADS * GROUP) + head) * WIDTH + column
    tl.store(output + target, found.to(output.dtype.element_ty), mask=column < WIDTH)
