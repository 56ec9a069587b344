"""Attention over slots as three kernels: write, attend by parts of the text, combine the parts.

A part is a program of its own, so that one long text fills the device as well as many texts do
(split keys and values, "Flash-Decoding", Dao, Haziza, Massa and Sizov, 2023). A program holds the
queries of all heads that share its keys, which are then read once. Softmax goes block by block
with a running maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018),
in powers of 2.

Positions that several texts have in the same blocks are attended to by all of their queries at
once, in a pass before the rows' own one, and combined as one part more.

How many rows there are, and into how many parts texts are cut, are numbers that a kernel gets: each
constant more is a kernel to compile before the first step.

The grids depend on shapes only. The device finds out which row a tile belongs to, and how texts are
cut: row r has the tiles from ``first query of r // ROWS + r`` on, as many as it needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from guided_spec.ops.attention.flash_attention import flash_attention, serves
from guided_spec.ops.attention.slot_attention import FP8, KeyValues, SlotIndex, Window, window_code
from guided_spec.ops.launch_triton import await_previous, launch

LOG2_E = tl.constexpr(1.4426950408889634)
PROGRAMS = 396  # what an H200 (132 multiprocessors) runs at a time: three programs on each
MAX_SPLITS = 64
TOKENS_STORED = 4  # by one program
# The positions of a pass: all that a row sees, those after what its group shares, or these.
WHOLE_TEXT, AFTER_SHARED, SHARED = 0, 1, 2
# Parts of what is shared, and of what comes after it.
SHARED_SPLITS, AFTER_SPLITS = 16, 2
FEW_SPLITS = 16  # up to which one warp combines the parts
LEAST_LINES = 32  # rows that one warp looks through at once
# Queries of a program: from so many on it reads whole tiles; and where each multiprocessor has two.
WHOLE_FROM, LARGE = 64, 128


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

    @property
    def halvings(self) -> int:
        """How often a text is cut in two."""
        return self.splits.bit_length() - 1


def choose_tiling(
    query: Tensor, num_kv_heads: int, width: int, view: int, window: int = 0
) -> Tiling:
    """The tiling for query [N, Hq, D] in rows of about ``width`` tokens.

    view: positions that the texts will have at most. window: see ``window_code``.
    """
    tokens, heads, size = query.shape
    group, width = heads // num_kv_heads, min(width, tokens)
    tile = _tile(query, width * group)
    is_whole = tile.rows == WHOLE_FROM and size <= 128 and not window
    if is_whole and 3 * width * group * num_kv_heads >= 2 * LARGE * PROGRAMS:
        tile = tile._replace(rows=LARGE)
    programs = triton.cdiv(tokens, width) * triton.cdiv(width * group, tile.rows) * num_kv_heads
    wanted = min(max(PROGRAMS // programs, 1), MAX_SPLITS)
    useful = triton.next_power_of_2(triton.cdiv(view, tile.block))
    return tile._replace(splits=min(1 << (wanted.bit_length() - 1), useful))


def _tile(query: Tensor, num_queries: int) -> Tiling:
    """For rows of so many queries, texts in one part each."""
    padded = max(triton.next_power_of_2(query.shape[2]), 16)
    if query.dtype == torch.float32:
        # Exact products take no tensor cores but registers: small tiles.
        largest, block, stages = (32, 32, 1) if padded <= 64 else (16, 16, 1)
    else:
        largest, block, stages = (64, 64, 3) if padded <= 128 else (64, 32, 3)
    rows = min(max(16, triton.next_power_of_2(num_queries)), largest)
    if rows >= WHOLE_FROM and padded <= 128:
        stages = 2  # so that more programs run at a time
    return Tiling(rows, block, 1, 8 if rows * padded > 64 * 128 else 4, stages)


class Parts(NamedTuple):
    """What the programs of a pass found: partial [tiles * Hkv, splits, rows, D], lse without D."""

    partial: Tensor
    lse: Tensor

    @classmethod
    def allocate(cls, query: Tensor, tiles: int, num_kv_heads: int, tile: Tiling) -> Parts:
        """Memory for a pass of so many tiles of queries."""
        shape = (tiles * num_kv_heads, tile.splits, tile.rows)
        partial = query.new_empty(*shape, query.shape[2], dtype=torch.float32)
        return cls(partial, query.new_empty(shape, dtype=torch.float32))


def slot_attention(  # noqa: PLR0913 - what attends, to what, and how
    query: Tensor,
    new: KeyValues | None,
    buffers: KeyValues,
    index: SlotIndex,
    *,
    scale: float,
    window: Window | None = None,
    sinks: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """[N, Hq, D]: ``guided_spec.ops.attention.slot_attention`` on one CUDA device. With a
    window, groups of ``SharedPositions`` are ignored. tiling: None by ``choose_tiling``."""
    is_plain = new is None and not window and sinks is None and tiling is None
    if is_plain and serves(query, buffers, index):
        return flash_attention(query, buffers, index, scale=scale)
    keys, values = buffers
    tables, max_length = index.tables, index.max_length
    width = len(query) if index.width is None else index.width
    view = max_length if index.view is None else index.view
    code = window_code(window)
    count, heads, size = query.shape
    output = query.new_empty(query.shape)
    if output.numel() == 0:
        return output
    query, tokens = with_rows(as_asked(query, keys)), index.tokens.contiguous()
    rows = index.rows.contiguous()
    num_kv_heads, block = keys.shape[1:3]
    padded = max(triton.next_power_of_2(size), 16)
    tile = choose_tiling(query, num_kv_heads, width, view, code) if tiling is None else tiling
    group, num_rows = heads // num_kv_heads, rows.shape[1]
    memory = (tables, tables.stride(0), max_length, block)
    fixed = (num_kv_heads, group, size, padded)
    shared_by = None if code else index.shared
    order, groups = shared_by or (rows, rows)
    lines = 0 if shared_by is None else count_lines(groups)
    shared = (order.contiguous(), groups.contiguous(), count, groups.shape[1])
    sunk = (query if sinks is None else sinks, sinks is not None)

    def attend(of: Tensor, how: Tiling, stage: int) -> Parts | None:
        """One pass over the rows or groups ``of``; None where it wrote the output itself."""
        tiles, is_whole = count * group // how.rows + of.shape[1], stage == 0 and how.splits == 1
        parts = None if is_whole else Parts.allocate(query, tiles, num_kv_heads, how)
        tiled = _tiles(keys, values, how, code)
        launch(_attend, (tiles, num_kv_heads, how.splits), query)(
            *(query, keys, values, *(tiled or (None, None)), of, *shared, output),
            *(*(parts or (output, output)), sunk[0], scale * LOG2_E.value, of.shape[1], *memory),
            *(
                *query.stride()[:2],
                how.halvings,
                *fixed,
                count_lines(of),
                lines,
                how.rows,
                how.block,
            ),
            *(code, sunk[1], tiled is not None, stage, is_whole),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )
        return parts

    with torch.cuda.device_of(query):  # Triton launches on the current device
        if new is not None:
            key, value = with_rows(new.keys), with_rows(new.values)
            launch(_store, (triton.cdiv(count, TOKENS_STORED), num_kv_heads), query)(
                *(key, value, keys, values, tokens, count, *memory),
                *(*key.stride()[:2], *value.stride()[:2], size, padded, TOKENS_STORED),
                num_warps=1 if TOKENS_STORED * padded <= 256 else 4,
            )
        whole, common = tile, None
        if lines and tiling is None:
            tile = tile._replace(splits=AFTER_SPLITS)
            whole = _tile(query, WHOLE_FROM)._replace(splits=SHARED_SPLITS)
        if lines:
            common = attend(shared[1], whole, SHARED)
        own = attend(rows, tile, AFTER_SHARED if lines else WHOLE_TEXT)
        if own is not None:
            parts = FEW_SPLITS if tile.splits <= FEW_SPLITS else max(tile.splits, MAX_SPLITS)
            of_shared = (whole.rows, whole.splits, whole.block) if lines else (0, 0, 0)
            launch(combine, (count, heads), query)(
                *(*own, *(common or own), rows, *shared, output, sunk[0], num_rows, max_length),
                *(tile.halvings, *fixed, count_lines(rows), lines, tile.rows, parts, tile.block),
                *(*of_shared, code, sunk[1]),
                num_warps=1 if parts * padded <= FEW_SPLITS * 128 else 4,
            )
    return output


def count_lines(rows: Tensor) -> int:
    """The number of rows or groups in which a program looks for its own, a power of 2."""
    lines: int = max(triton.next_power_of_2(rows.shape[1]), LEAST_LINES)
    return lines


def _tiles(
    keys: Tensor, values: Tensor, tile: Tiling, window: int
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """The buffers as [positions, D], whose tiles the device fetches whole; None where it cannot.

    Each tile must lie within a block, and its rows at multiples of 16 bytes.
    """
    block, size = keys.shape[2:]
    if window or tile.rows < WHOLE_FROM or block % tile.block or size * keys.itemsize % 16:
        return None
    shape, box = [keys.numel() // size, size], [tile.block, max(triton.next_power_of_2(size), 16)]
    found = (TensorDescriptor(buffer, shape, [size, 1], box) for buffer in (keys, values))
    return next(found), next(found)


def as_asked(query: Tensor, keys: Tensor) -> Tensor:
    """The queries in the dtype of products with these keys; fp8 is read as the queries' own."""
    return query if keys.dtype == FP8 else query.to(keys.dtype)


def with_rows(states: Tensor) -> Tensor:
    return states if states.stride(2) == 1 else states.contiguous()


FP8_MOST = tl.constexpr(448.0)  # the largest number of float8_e4m3fn


# Triton reads annotations as its own, so the arguments have none. A number that changes from call
# to call must not become part of the kernel: a new one would be compiled for it.
@triton.jit
def as_kept(states, buffer):  # type: ignore[no-untyped-def]
    """``guided_spec.ops.attention.slot_attention.as_kept``, of states that go to this buffer."""
    if buffer.dtype.element_ty == tl.float8e4nv:
        states = states.to(tl.float32)
        states = tl.clamp(states, -FP8_MOST, FP8_MOST, propagate_nan=tl.PropagateNan.ALL)
    return states.to(buffer.dtype.element_ty)


VARYING = ["count", "num_rows", "num_groups", "max_length", "table_row", "halvings"]


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def] # noqa: PLR0913
    key,
    value,
    keys,
    values,
    tokens,
    count,
    tables,
    table_row,
    max_length,
    POSITIONS: tl.constexpr,
    key_token,
    key_head,
    value_token,
    value_head,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Writes the keys and values of TOKENS tokens of one head."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    slot = tl.load(tokens + token, mask=token < count, other=-1)
    position = tl.load(tokens + count + token, mask=slot >= 0, other=0)
    position = tl.minimum(position, max_length)
    found = tl.load(tables + slot * table_row + position // POSITIONS, mask=slot >= 0, other=0)
    column = tl.arange(0, PADDED)
    mask = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
    target = (found.to(tl.int64) * tl.num_programs(1) + head) * POSITIONS + position % POSITIONS
    target = target[:, None] * WIDTH + column[None, :]
    source = token * key_token + head * key_head
    states = tl.load(key + source[:, None] + column[None, :], mask=mask)
    tl.store(keys + target, as_kept(states, keys), mask=mask)
    source = token * value_token + head * value_head
    states = tl.load(value + source[:, None] + column[None, :], mask=mask)
    tl.store(values + target, as_kept(states, values), mask=mask)


@triton.jit
def row_at(row, rows, num_rows):  # type: ignore[no-untyped-def]
    """Slot and start of a row, its first token, and how many it has; none for row -1."""
    is_there = row >= 0
    slot = tl.load(rows + row, mask=is_there, other=-1)
    start = tl.load(rows + num_rows + row, mask=is_there, other=0).to(tl.int32)
    first = tl.load(rows + 2 * num_rows + row - 1, mask=row > 0, other=0).to(tl.int32)
    end = tl.load(rows + 2 * num_rows + row, mask=is_there, other=0).to(tl.int32)
    return slot, start, first, tl.where(slot >= 0, tl.maximum(end - first, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _group_of(token, order, groups, count, num_groups, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A token's rank in the order of the groups, its group, and what that shares; 0 for none."""
    rank = tl.load(order + count + token)
    line = tl.arange(0, GROUPS)
    ends = tl.load(groups + 2 * num_groups + line, mask=line < num_groups, other=0)
    index = tl.sum(((ends <= rank) & (line < num_groups)).to(tl.int32), 0)
    length = tl.load(groups + num_groups + index, mask=index < num_groups, other=0)
    return rank.to(tl.int32), index, length.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def row_of(  # type: ignore[no-untyped-def]
    tile, rows, num_rows, GROUP: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr
):
    """Which row a tile belongs to, and which of its tiles it is."""
    line = tl.arange(0, LINES)
    ends = tl.load(rows + 2 * num_rows + line - 1, mask=(line > 0) & (line < num_rows), other=0)
    begins = ends.to(tl.int32) * GROUP // ROWS + line  # the first tile of each row
    row = tl.sum(((begins <= tile) & (line < num_rows)).to(tl.int32), 0) - 1
    return row, tile - tl.sum(tl.where(line == row, begins, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def span_of(  # type: ignore[no-untyped-def] # noqa: PLR0913
    low,
    start,
    limit,
    tile,
    num_tokens,
    halvings,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The positions [low, end) that a tile sees below the limit, and a split's share of them.

    halvings: 2 ** halvings splits. A shift instead of a division, which takes longer.
    """
    last = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, num_tokens - 1)
    end = tl.minimum(start + last + 1, limit)
    first = start + tile * ROWS // GROUP
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
    elif WINDOW < 0:
        low = first // (-WINDOW) * (-WINDOW) // BLOCK * BLOCK
    blocks = tl.cdiv(tl.maximum(end - low, 0), BLOCK)
    return low, end, (blocks + (1 << halvings) - 1 >> halvings) * BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def offsets_of(  # type: ignore[no-untyped-def] # noqa: PLR0913
    table, first, at, known, head, HEADS: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr
):
    """Where a head's keys of the ``known`` of positions ``at`` are, from ``first`` on: [BLOCK]."""
    if POSITIONS % BLOCK == 0:  # they are in one block
        found = tl.load(table + first // POSITIONS).to(tl.int64) * HEADS + head
        offset = found * POSITIONS + first % POSITIONS + tl.arange(0, BLOCK)
    else:
        found = tl.load(table + at // POSITIONS, mask=known, other=0).to(tl.int64)
        offset = (found * HEADS + head) * POSITIONS + at % POSITIONS
    return offset


@triton.jit  # type: ignore[untyped-decorator]
def seen_from(position, stored, is_there, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of the positions ``stored`` each query sees from its own: [ROWS, BLOCK]."""
    distance = position[:, None] - stored[None, :]  # from the key to the query
    visible = (distance >= 0) & is_there[None, :]
    if WINDOW > 0:
        visible = visible & (distance < WINDOW)
    elif WINDOW < 0:
        of_query, of_key = position // (-WINDOW), stored // (-WINDOW)
        visible = visible & (of_query[:, None] == of_key[None, :])
    return visible


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def] # noqa: C901, PLR0913, PLR0915
    query,
    keys,
    values,
    key_tiles,
    value_tiles,
    rows,
    order,
    groups,
    count,
    num_groups,
    output,
    partial,
    lse,
    sinks,
    scale,
    num_rows,
    tables,
    table_row,
    max_length,
    POSITIONS: tl.constexpr,
    query_token,
    query_head,
    halvings,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    LINES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGE: tl.constexpr,
    IS_ONLY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS queries of one row, or group, and key head over one split (IS_ONLY: all) they see."""
    tile, split, head = tl.program_id(0), tl.program_id(2), tl.program_id(1).to(tl.int64)
    row, within_row = row_of(tile, rows, num_rows, GROUP, LINES, ROWS)
    slot, start, first_token, num_tokens = row_at(row, rows, num_rows)
    await_previous(IS_DEPENDENT)
    if within_row * ROWS < num_tokens * GROUP:
        low = start * 0
        if STAGE == 1:
            _, _, low = _group_of(first_token, order, groups, count, num_groups, GROUPS)
        limit = start if STAGE == 2 else max_length  # a group's tokens are after what it shares
        low, end, share = span_of(
            low, start, limit, within_row, num_tokens, halvings, GROUP, ROWS, BLOCK, WINDOW
        )
        low += split * share
        end = tl.minimum(low + share, end)
        member = within_row * ROWS + tl.arange(0, ROWS)
        token, column = member // GROUP, tl.arange(0, PADDED)
        query_heads, within = head * GROUP + member % GROUP, column < WIDTH
        line_of = (first_token + token).to(tl.int64)
        if STAGE == 2:
            line_of = tl.load(order + line_of, mask=token < num_tokens, other=0)
        source = line_of * query_token + query_heads * query_head
        mask = (token < num_tokens)[:, None] & within[None, :]
        asked = tl.load(query + source[:, None] + column[None, :], mask=mask, other=0.0)
        top, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
        gathered = tl.zeros([ROWS, PADDED], tl.float32)
        table, whole = tables + slot * table_row, low
        if WHOLE:  # what every query of the tile sees takes no mask
            whole = tl.minimum(start + 1 + within_row * ROWS // GROUP, end)
            whole = low + tl.maximum(whole - low, 0) // BLOCK * BLOCK
            for first in range(low, whole, BLOCK):
                found = tl.load(table + first // POSITIONS) * HEADS + tl.program_id(1)
                offset = found * POSITIONS + first % POSITIONS
                tiled = key_tiles.load([offset, 0]).to(asked.dtype)
                scores = tl.dot(asked, tl.trans(tiled), input_precision="ieee")
                higher = tl.maximum(top, tl.max(scores, 1) * scale)
                probs, fade = tl.exp2(scores * scale - higher[:, None]), tl.exp2(top - higher)
                total = total * fade + tl.sum(probs, 1)
                tiled = value_tiles.load([offset, 0]).to(asked.dtype)
                probs, gathered = probs.to(tiled.dtype), gathered * fade[:, None]
                gathered = tl.dot(probs, tiled, gathered, input_precision="ieee")
                top = higher
        for first in range(whole, end, BLOCK):
            stored = first + tl.arange(0, BLOCK)
            is_there = stored < end
            there = is_there[:, None]
            if WIDTH != PADDED:
                there = there & within[None, :]
            offset = offsets_of(table, first, stored, is_there, head, HEADS, POSITIONS, BLOCK)
            offset = (offset * WIDTH)[:, None] + column
            tiled = tl.load(keys + offset, mask=there, other=0.0).to(asked.dtype)
            scores = tl.dot(asked, tl.trans(tiled), input_precision="ieee") * scale
            visible = seen_from(start + token, stored, is_there, WINDOW)
            scores = tl.where(visible, scores, -1e30)
            higher = tl.maximum(top, tl.max(scores, 1))
            probs = tl.where(visible, tl.exp2(scores - higher[:, None]), 0.0)
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(probs, 1)
            tiled = tl.load(values + offset, mask=there, other=0.0).to(asked.dtype)
            probs, gathered = probs.to(tiled.dtype), gathered * fade[:, None]
            gathered = tl.dot(probs, tiled, gathered, input_precision="ieee")
            top = higher
        if SINKS and IS_ONLY:
            # The largest score is not raised to the sink's: where that is far above, all is 0.
            sunk = tl.load(sinks + query_heads).to(tl.float32) * LOG2_E
            total += tl.where(total > 0, tl.exp2(tl.minimum(sunk - top, 126.0)), 0.0)
        gathered = gathered / tl.where(total > 0, total, 1.0)[:, None]
        if IS_ONLY:
            target = output + ((line_of * (HEADS * GROUP) + query_heads) * WIDTH)[:, None]
            tl.store(target + column[None, :], gathered.to(output.dtype.element_ty), mask=mask)
        else:
            program = (tile.to(tl.int64) * HEADS + head << halvings) + split
            target = program * ROWS + tl.arange(0, ROWS)
            logs = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -1e30)
            written = token < tl.where(low < end, num_tokens, 0)
            tl.store(lse + target, logs, mask=written)
            target = partial + target[:, None] * WIDTH + column[None, :]
            tl.store(target, gathered, mask=written[:, None] & within[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _logs(lse, program, member, worked, PARTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: PLR0913
    """Where one query's parts are, [PARTS], and the logarithms of their sums.

    program: the first of those that had the parts.
    """
    source = (program + tl.arange(0, PARTS)) * ROWS + member % ROWS
    return source, tl.load(lse + source, mask=worked, other=-1e30)


@triton.jit  # type: ignore[untyped-decorator]
def _weighed(partial, source, weight, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of one query's parts by their weights, [PADDED]."""
    mask = (weight > 0)[:, None] & (column < WIDTH)[None, :]
    parts = tl.load(partial + source[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    return tl.sum(parts * weight[:, None], 0)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def combine(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0915
    partial,
    lse,
    shared_partial,
    shared_lse,
    rows,
    order,
    groups,
    count,
    num_groups,
    output,
    sinks,
    num_rows,
    max_length,
    halvings,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    LINES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Weighs the parts of one query by the sums that each of them found.

    PARTS: a power of two, at least ``splits``.
    """
    line_of, head = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, LINES)
    ends = tl.load(rows + 2 * num_rows + line, mask=line < num_rows, other=0)
    row = tl.sum(((ends <= line_of) & (line < num_rows)).to(tl.int32), 0)
    row = tl.where(row < num_rows, row, -1)
    _, start, first_token, num_tokens = row_at(row, rows, num_rows)
    low = start * 0
    if GROUPS > 0:
        rank, index, low = _group_of(line_of, order, groups, count, num_groups, GROUPS)
        length = tl.where(num_tokens > 0, low, 0)
    member = (line_of - first_token) * GROUP + head % GROUP
    tile = member // ROWS
    low, end, share = span_of(
        low, start, max_length, tile, num_tokens, halvings, GROUP, ROWS, BLOCK, WINDOW
    )
    column = tl.arange(0, PADDED)
    part = tl.arange(0, PARTS)
    worked = (part < (1 << halvings)) & (low + part * share < tl.where(num_tokens > 0, end, 0))
    program = (first_token * GROUP // ROWS + row + tile).to(tl.int64) * HEADS + head // GROUP
    await_previous(IS_DEPENDENT)
    source, logs = _logs(lse, program << halvings, member, worked, PARTS, ROWS)
    highest = tl.max(logs, 0)
    if GROUPS > 0:
        first = tl.load(groups + 2 * num_groups + index - 1, mask=index > 0, other=0).to(tl.int32)
        member = (rank - first) * GROUP + head % GROUP
        tile = member // SHARED_ROWS
        share = tl.cdiv(tl.cdiv(length, SHARED_BLOCK), SHARED_SPLITS) * SHARED_BLOCK
        seen = tl.arange(0, SHARED_SPLITS) * share < length
        program = (first * GROUP // SHARED_ROWS + index + tile).to(tl.int64) * HEADS + head // GROUP
        known, sums = _logs(
            shared_lse, program * SHARED_SPLITS, member, seen, SHARED_SPLITS, SHARED_ROWS
        )
        highest = tl.maximum(highest, tl.max(sums, 0))
    weight = tl.where(logs > -1e29, tl.exp2(logs - highest), 0.0)
    found, total = _weighed(partial, source, weight, column, WIDTH), tl.sum(weight, 0)
    if GROUPS > 0:
        weight = tl.where(sums > -1e29, tl.exp2(sums - highest), 0.0)
        found += _weighed(shared_partial, known, weight, column, WIDTH)
        total += tl.sum(weight, 0)
    if SINKS:
        sunk = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += tl.where(total > 0, tl.exp2(tl.minimum(sunk - highest, 126.0)), 0.0)
    found = found / tl.where(total > 0, total, 1.0)
    target = (line_of.to(tl.int64) * (HEADS * GROUP) + head) * WIDTH + column
    tl.store(output + target, found.to(output.dtype.element_ty), mask=column < WIDTH)
