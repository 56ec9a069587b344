"""First legal paths as one kernel: a program for each text goes from place to place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch
from guided_spec.ops.table_rows import TablePaths

__all__ = ["first_legal_paths"]

WORDS = 1024  # of a row at a time, where its only legal token is looked for


def first_legal_paths(
    token_ids: Tensor, scores: Tensor, gains: Tensor | None, cursors: Tensor, words: int
) -> TablePaths:
    """See ``guided_spec.ops.trees.lattice_paths``; all on one CUDA device."""
    count, width, size = token_ids.shape
    tokens = token_ids.new_empty(count, width)
    starved = torch.empty_like(tokens)
    sources = token_ids.new_empty(width + 1, count)
    candidates, own = token_ids.contiguous(), scores.contiguous()
    behind = own if gains is None else gains.contiguous()
    with torch.cuda.device_of(token_ids):
        launch(_walk, (count,))(
            *(candidates, own, behind, cursors, tokens, starved, sources),
            *(count, width, size, words),
            has_gains=gains is not None,
            block=triton.next_power_of_2(size),
            chunk=WORDS,
        )
    return TablePaths(tokens, starved, sources)


@triton.jit
def _bits(words):  # type: ignore[no-untyped-def]
    """How many bits of each uint32 are set."""
    found = words - ((words >> 1) & 0x55555555)
    found = (found & 0x33333333) + ((found >> 2) & 0x33333333)
    found = (found + (found >> 4)) & 0x0F0F0F0F
    found = found + (found >> 8)
    return ((found + (found >> 16)) & 0x3F).to(tl.int64)


@triton.jit(do_not_specialize=["words"])  # type: ignore[untyped-decorator]
def _only(source, words, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """The one legal token of the row at an address; -1 where there is another."""
    legal = tl.full((), 0, tl.int64)
    token = tl.full((), 0, tl.int64)
    for start in range(0, words, chunk):
        at = start + tl.arange(0, chunk)
        row = tl.load(source.to(tl.pointer_type(tl.int32)) + at, mask=at < words, other=0)
        row = row.to(tl.uint32, bitcast=True)
        legal += tl.sum(_bits(row))
        # Of a word with one bit, what is below it has as many bits as it stands high.
        token += tl.sum(tl.where(row != 0, at.to(tl.int64) * 32 + _bits(row - 1), 0))
    return tl.where(legal == 1, token, -1)


@triton.jit(do_not_specialize=["count", "width", "size", "words"])  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    token_ids,
    scores,
    gains,
    cursors,
    tokens,
    starved,
    sources,
    count,
    width,
    size,
    words,
    has_gains: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
):
    """One text. A cursor's numbers are in the order of ``table_rows.CURSOR``."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    cursor = cursors + row * 6
    classes = tl.load(cursor)
    then = tl.load(cursor + 1)
    columns = tl.load(cursor + 2)
    rows = tl.load(cursor + 3)
    state = tl.load(cursor + 4)
    source = tl.load(cursor + 5)
    is_tabled = (classes != 0).to(tl.int32)
    before = tl.full((), 0, tl.int32)
    goes_on = tl.full((), 1, tl.int32)
    tl.store(sources + row, source)
    for place in range(width):
        at = (row * width + place) * size
        own = tl.load(token_ids + at + lane, mask=lane < size, other=0)
        total = tl.load(scores + at + lane, mask=lane < size, other=-float("inf"))
        if has_gains:
            behind = (at + before) * size + lane
            is_behind = tl.where(lane < size, before, -1) >= 0
            total += tl.load(gains + behind, mask=is_behind, other=0.0)
        held = tl.where(lane < size, source, 0) != 0
        word = tl.load(source.to(tl.pointer_type(tl.int32)) + own // 32, mask=held, other=-1)
        is_legal = ((word >> (own % 32).to(tl.int32)) & 1) != 0
        total = tl.where(is_legal & (lane < size), total, -float("inf"))
        best = tl.max(total)
        taken = tl.min(tl.where((total == best) & (total > -float("inf")), lane, block))
        token = tl.sum(tl.where(lane == taken, own, 0))
        before = tl.where(taken < block, taken, -1).to(tl.int32)
        if taken >= block:
            token = tl.full((), -1, tl.int64)
            if source != 0:
                token = _only(source, words, chunk)
        is_starved = (goes_on != 0) & (token < 0)
        goes_on = ((goes_on != 0) & (token >= 0)).to(tl.int32)
        tl.store(tokens + row * width + place, tl.where(goes_on != 0, token, -1))
        tl.store(starved + row * width + place, is_starved.to(tl.int64))
        steps = (goes_on != 0) & (classes != 0)
        of = tl.load(classes.to(tl.pointer_type(tl.int32)) + token, mask=steps, other=0)
        next_at = then.to(tl.pointer_type(tl.int16)) + state * columns + of
        found = tl.load(next_at, mask=steps, other=-1).to(tl.int64)
        steps = steps & (found >= 0)
        source = tl.load(rows.to(tl.pointer_type(tl.int64)) + found, mask=steps, other=0)
        classes = tl.where(steps, classes, 0)
        state = tl.where(steps, found, 0)
        goes_on = ((goes_on != 0) & (steps | (is_tabled == 0))).to(tl.int32)
        tl.store(sources + (place + 1) * count + row, source)
    tl.store(cursor, classes)
    tl.store(cursor + 4, state)
    tl.store(cursor + 5, source)
