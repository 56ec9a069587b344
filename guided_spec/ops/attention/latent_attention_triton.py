"""Latent attention as kernels: keep what a token leaves, attend by parts of the text, combine.

A program has queries of many heads, whose scores and sums are products of matrices on tensor
cores, and reads a latent once for both. Rows, tiles and parts are those of ``slot_attention``.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from guided_spec.ops.attention.latent_attention import LatentKeys, LatentQueries
from guided_spec.ops.attention.slot_attention import KeyValues, Rotation, SlotIndex
from guided_spec.ops.attention.slot_attention_triton import (
    LOG2_E,
    VARYING,
    Parts,
    Tiling,
    as_asked,
    as_kept,
    combine,
    count_lines,
    offsets_of,
    row_at,
    row_of,
    seen_from,
    span_of,
    with_rows,
)
from guided_spec.ops.launch_triton import await_previous, launch

PROGRAMS = 132  # what an H200 runs at a time: one on each multiprocessor
MOST_SPLITS = 32  # that a program combines
FEW_SPLITS = 8  # up to which four warps do
LARGE_MEMORY = 200_000  # bytes of shared memory of a program, as a Hopper has them
HEADS = 16  # queries that a program rotates


def choose_tiling(query: Tensor, width: int, view: int, memory: int) -> Tiling:
    """The tiling for latent queries [N, Hq, C] in rows of about ``width`` tokens.

    view: positions that the texts will have at most. memory: bytes that a program may share.
    """
    tokens, heads, size = query.shape
    width = max(min(width, tokens), 1)
    asked = max(16, triton.next_power_of_2(width * heads))
    if query.dtype == torch.float32:  # exact products take no tensor cores but registers
        tile = Tiling(16, 16, 1, 4, 1)
    elif memory >= LARGE_MEMORY or size <= 256:
        tile = Tiling(min(asked, 64), 32, 1, 8 if asked >= 64 else 4, 2)
    else:
        tile = Tiling(min(asked, 16), 32, 1, 4, 1)
    programs = triton.cdiv(tokens, width) * triton.cdiv(width * heads, tile.rows)
    wanted = min(max(PROGRAMS // programs, 1), MOST_SPLITS)
    useful = triton.next_power_of_2(triton.cdiv(view, tile.block))
    return tile._replace(splits=min(1 << (wanted.bit_length() - 1), useful))


def latent_attention(
    query: LatentQueries,
    buffers: KeyValues,
    index: SlotIndex,
    *,
    scale: float,
    tiling: Tiling | None = None,
) -> Tensor:
    """[N, Hq, C]: ``guided_spec.ops.attention.latent_attention`` on one CUDA device.

    tiling: None by ``choose_tiling``."""
    count, heads, size = query.latent.shape
    output = query.latent.new_empty(query.latent.shape)
    if output.numel() == 0:
        return output
    latent, rotary = (with_rows(as_asked(part, buffers.keys)) for part in query)
    rows, tables = index.rows.contiguous(), index.tables
    num_rows, block, turned = rows.shape[1], buffers.keys.shape[2], rotary.shape[2]
    tile = _tiling(latent, index) if tiling is None else tiling
    padded, lines = max(triton.next_power_of_2(size), 16), count_lines(rows)
    tiles, is_only = count * heads // tile.rows + num_rows, tile.splits == 1
    parts = None if is_only else Parts.allocate(latent, tiles, 1, tile)
    with torch.cuda.device_of(latent):  # Triton launches on the current device
        launch(_attend_latents, (tiles, tile.splits), latent)(
            *(latent, rotary, *buffers, rows, output, *(parts or (output, output))),
            *(scale * LOG2_E.value, num_rows, tables, tables.stride(0), index.max_length, block),
            *(*latent.stride()[:2], *rotary.stride()[:2], tile.halvings, heads, size, padded),
            *(turned, max(triton.next_power_of_2(turned), 16), lines, tile.rows, tile.block),
            is_only,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if parts is not None:
            few = tile.splits <= FEW_SPLITS
            launch(combine, (count, heads), latent)(
                *(*parts, *parts, rows, rows, rows, count, num_rows, output, latent, num_rows),
                *(index.max_length, tile.halvings, 1, heads, size, padded, lines, 0, tile.rows),
                *(FEW_SPLITS if few else MOST_SPLITS, tile.block, 0, 0, 0, 0, False),
                num_warps=4 if few else 8,
            )
    return output


def _tiling(latent: Tensor, index: SlotIndex) -> Tiling:
    width = len(latent) if index.width is None else index.width
    view = index.max_length if index.view is None else index.view
    memory = _shared_memory(latent.get_device()) if latent.is_cuda else LARGE_MEMORY
    return choose_tiling(latent, width, view, memory)


@cache
def _shared_memory(device: int) -> int:
    """Bytes that a program may share on this CUDA device."""
    found: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return found


def keep_latents(  # noqa: PLR0913 - what is kept, how, and where
    query: Tensor,
    packed: Tensor,
    keys: LatentKeys,
    rotation: Rotation,
    buffers: KeyValues,
    index: SlotIndex,
) -> Tensor:
    """[N, Hq, R]: ``latent_attention.keep_latents`` with the arguments on one CUDA device."""
    count, heads, turned = query.shape
    rotated = query.new_empty(query.shape)
    if rotated.numel() == 0:
        return rotated
    tables, size = index.tables, len(keys.norm)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        launch(_keep_latents, (count, 1 + triton.cdiv(heads, HEADS)), query)(
            *(query, packed, keys.norm, *rotation[:2], len(rotation.cos), keys.eps, rotated),
            *(*buffers, index.tokens.contiguous(), count, tables, tables.stride(0)),
            *(index.max_length, buffers.keys.shape[2], *query.stride()[:2], packed.stride(0)),
            *(heads, size, triton.next_power_of_2(size), turned),
            *(triton.next_power_of_2(turned // 2), HEADS, keys.reads_pairs, keys.writes_pairs),
            num_warps=4,
        )
    return rotated


# Triton reads annotations as its own, so the arguments have none.
@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _attend_latents(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0915
    query,
    rotary,
    latents,
    keys,
    rows,
    output,
    partial,
    lse,
    scale,
    num_rows,
    tables,
    table_row,
    max_length,
    POSITIONS: tl.constexpr,
    query_token,
    query_head,
    rotary_token,
    rotary_head,
    halvings,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ONLY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS queries of one row of tokens over one split (IS_ONLY: all) of what they see."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row, within_row = row_of(tile, rows, num_rows, HEADS, LINES, ROWS)
    slot, start, first_token, num_tokens = row_at(row, rows, num_rows)
    await_previous(IS_DEPENDENT)
    if within_row * ROWS < num_tokens * HEADS:
        low, end, share = span_of(
            start * 0, start, max_length, within_row, num_tokens, halvings, HEADS, ROWS, BLOCK, 0
        )
        low += split * share
        end = tl.minimum(low + share, end)
        member = within_row * ROWS + tl.arange(0, ROWS)
        token, head, is_asked = member // HEADS, member % HEADS, member < num_tokens * HEADS
        line_of = (first_token + token).to(tl.int64)
        column, turn = tl.arange(0, PADDED), tl.arange(0, TURNED_PADDED)
        within, is_turn = (column < WIDTH)[None, :], (turn < TURNED)[None, :]
        source = (line_of * query_token + head * query_head)[:, None] + column[None, :]
        asked = tl.load(query + source, mask=is_asked[:, None] & within, other=0.0)
        source = (line_of * rotary_token + head * rotary_head)[:, None] + turn[None, :]
        turned = tl.load(rotary + source, mask=is_asked[:, None] & is_turn, other=0.0)
        top, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
        gathered = tl.zeros([ROWS, PADDED], tl.float32)
        table = tables + slot * table_row
        for first in range(low, end, BLOCK):
            stored = first + tl.arange(0, BLOCK)
            is_there = stored < end
            offset = offsets_of(table, first, stored, is_there, 0, 1, POSITIONS, BLOCK)[:, None]
            there = is_there[:, None]
            key = tl.load(keys + offset * TURNED + turn, mask=there & is_turn, other=0.0)
            latent = tl.load(latents + offset * WIDTH + column, mask=there & within, other=0.0)
            key, latent = key.to(asked.dtype), latent.to(asked.dtype)
            scores = tl.dot(turned, tl.trans(key), input_precision="ieee")
            scores = tl.dot(asked, tl.trans(latent), scores, input_precision="ieee") * scale
            visible = seen_from(start + token, stored, is_there, 0)
            scores = tl.where(visible, scores, -1e30)
            higher = tl.maximum(top, tl.max(scores, 1))
            probs = tl.where(visible, tl.exp2(scores - higher[:, None]), 0.0)
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(probs, 1)
            probs, gathered = probs.to(latent.dtype), gathered * fade[:, None]
            gathered = tl.dot(probs, latent, gathered, input_precision="ieee")
            top = higher
        gathered = gathered / tl.where(total > 0, total, 1.0)[:, None]
        if IS_ONLY:
            target = output + ((line_of * HEADS + head) * WIDTH)[:, None] + column[None, :]
            written = is_asked[:, None] & within
            tl.store(target, gathered.to(output.dtype.element_ty), mask=written)
        else:
            target = ((tile.to(tl.int64) << halvings) + split) * ROWS + tl.arange(0, ROWS)
            logs = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -1e30)
            is_written = member < tl.where(low < end, num_tokens * HEADS, 0)
            tl.store(lse + target, logs, mask=is_written)
            target = partial + target[:, None] * WIDTH + column[None, :]
            tl.store(target, gathered, mask=is_written[:, None] & within)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def] # noqa: PLR0913
    source,
    target,
    at,
    cos,
    sin,
    mask,
    HALF: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Rotate halves or pairs of what is at ``source``; pairs where READS, WRITES are true."""
    from_low, from_high = (2 * at, 2 * at + 1) if READS else (at, at + HALF)
    low = tl.load(source + from_low, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + from_high, mask=mask, other=0.0).to(tl.float32)
    to_low, to_high = (2 * at, 2 * at + 1) if WRITES else (at, at + HALF)
    out = source.dtype.element_ty
    tl.store(target + to_low, as_kept((low * cos - high * sin).to(out), target), mask=mask)
    tl.store(target + to_high, as_kept((high * cos + low * sin).to(out), target), mask=mask)


@triton.jit(do_not_specialize=["count", "max_length", "positions", "table_row"])  # type: ignore[untyped-decorator]
def _keep_latents(  # type: ignore[no-untyped-def] # noqa: PLR0913
    query,
    packed,
    norm,
    cos,
    sin,
    positions,
    eps,
    rotated,
    latents,
    keys,
    tokens,
    count,
    tables,
    table_row,
    max_length,
    POSITIONS: tl.constexpr,
    query_token,
    query_head,
    packed_token,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Of one token: its latent normed and its key rotated, both kept; or HEADS queries rotated."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = TURNED // 2
    at = tl.arange(0, HALF_PADDED)[None, :]
    position = tl.load(tokens + count + token)
    turn = tl.minimum(position, positions - 1) * TURNED + at
    c = tl.load(cos + turn, mask=at < half, other=1.0).to(tl.float32)
    s = tl.load(sin + turn, mask=at < half, other=0.0).to(tl.float32)
    if part == 0:
        slot = tl.load(tokens + token)
        position = tl.minimum(position, max_length)
        found = tl.load(tables + slot * table_row + position // POSITIONS, mask=slot >= 0, other=0)
        column = tl.arange(0, PADDED)
        within = column < WIDTH
        weight = tl.load(norm + column, mask=within, other=0.0).to(tl.float32)
        await_previous(IS_DEPENDENT)
        kept_at = found.to(tl.int64) * POSITIONS + position % POSITIONS
        states = tl.load(packed + token * packed_token + column, mask=within, other=0.0)
        wide = states.to(tl.float32)
        root = tl.sqrt_rn(tl.sum(wide * wide, 0) / WIDTH + eps)
        normed = (wide * tl.div_rn(1.0, root)).to(states.dtype).to(tl.float32) * weight
        normed = as_kept(normed.to(states.dtype), latents)
        is_used = tl.where(slot >= 0, 1, 0)  # an unused token keeps nothing
        tl.store(latents + kept_at * WIDTH + column, normed, mask=column < is_used * WIDTH)
        key, kept = packed + token * packed_token + WIDTH, at < is_used * half
        _turn(key, keys + kept_at * TURNED, at, c, s, kept, half, READS, WRITES)
    else:
        await_previous(IS_DEPENDENT)
        head = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        source = query + token * query_token + head * query_head
        target = rotated + (token * QUERIES + head) * TURNED
        mask = (head < QUERIES) & (at < half)
        _turn(source, target, at, c, s, mask, half, READS, WRITES)
