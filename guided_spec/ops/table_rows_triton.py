"""Advancing texts in tables, as kernels: they read addresses, and what is stored there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch

WORDS = 1024  # of a row in a program
TEXTS = 128  # of a program


def copy_rows(sources: Tensor, out: Tensor, *, is_blank: bool = False) -> None:
    """Copy the rows int32 [R, W] at ``sources``; they may be in pinned memory of the host, too.

    out: contiguous.
    """
    words = out.shape[-1]
    if out.dim() == 2:
        sources, out = sources.unsqueeze(1), out.unsqueeze(1)
    count, depths = out.shape[:2]
    # Rows begin at multiples of their length, in memory that begins at a multiple of more.
    options = {"is_aligned": words % 4 == 0, "is_blank": is_blank, "block": WORDS}
    grid = (count * depths, triton.cdiv(words, WORDS))
    with torch.cuda.device_of(out):  # Triton launches on the current device
        launch(_copy, grid)(
            sources, *sources.stride(), sources.shape[1], depths, out, words, **options
        )


def advance(token_ids: Tensor, cursors: Tensor, out: Tensor) -> None:
    """Advance cursors int64 [R, 6] by a token each; contiguous, all on one device."""
    count = len(token_ids)
    with torch.cuda.device_of(cursors):
        grid = (triton.cdiv(count, TEXTS),)
        launch(_advance, grid)(token_ids, cursors, out, count, block=TEXTS)


def advance_committed(token_ids: Tensor, counts: Tensor, texts: Tensor, cursors: Tensor) -> None:
    """Advance the cursors of ``texts`` by their committed tokens [B, T]; cursors contiguous."""
    count, width = token_ids.shape
    with torch.cuda.device_of(cursors):
        launch(_advance_committed, (triton.cdiv(count, TEXTS),))(
            *(token_ids, *token_ids.stride(), counts, counts.stride(0), texts, cursors),
            *(count, width),
            block=TEXTS,
        )


# Triton reads annotations as its own, so the arguments have none.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["stride", "depth_stride", "num_sources", "depths", "words"],
    do_not_specialize_on_alignment=["sources"],
)
def _copy(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    sources, stride, depth_stride, num_sources, depths, out, words,
    is_aligned: tl.constexpr, is_blank: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Copy a chunk of a row from its address; ``num_sources`` of each ``depths`` rows have one."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    text, depth = row // depths, row % depths
    address = tl.load(
        sources + text * stride + depth * depth_stride, mask=depth < num_sources, other=0
    )
    source = address.to(tl.pointer_type(tl.int32))
    target = out + row.to(tl.int64) * words
    at = chunk * block + tl.arange(0, block)
    length = tl.where(address != 0, words, 0)
    if is_aligned:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        length, words = tl.multiple_of(length, 4), tl.multiple_of(words, 4)
    inside = at < length
    kept = inside
    if is_blank:
        kept = at < words
    # ".cv" looks into no cache: the host may have written there since.
    found = tl.load(source + at, mask=inside, other=-1, cache_modifier=".cv")
    tl.store(target + at, found, mask=kept)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["count"], do_not_specialize_on_alignment=["token_ids", "cursors", "out"]
)
def _advance(token_ids, cursors, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token of each text."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    token = tl.load(token_ids + row, mask=row < count, other=-1)
    step(token, cursors, out, row, row < count)


@triton.jit
def step(token, cursors, out, row, inside):  # type: ignore[no-untyped-def]
    """One token of each text. A cursor's numbers are in the order of ``table_rows.CURSOR``."""
    cursor = cursors + row * 6
    classes = tl.load(cursor, mask=inside, other=0)
    state = tl.load(cursor + 4, mask=inside & (classes != 0), other=0)
    goes_on = (classes != 0) & (token >= 0)
    state, goes_on = _next_state(token, cursor, state, goes_on)
    source = _put(cursor, tl.where(goes_on, classes, 0), state, goes_on, inside)
    tl.store(out + row, source, mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["token_stride", "column_stride", "count_stride", "count", "width"],
    do_not_specialize_on_alignment=["token_ids", "counts", "texts", "cursors"],
)
def _advance_committed(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    token_ids, token_stride, column_stride, counts, count_stride, texts, cursors, count, width,
    block: tl.constexpr,
):  # fmt: skip
    """All tokens that each text got in a step."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < count
    cursor = cursors + tl.load(texts + row, mask=inside, other=0) * 6
    length = tl.load(counts + row * count_stride, mask=inside, other=0)
    classes = tl.load(cursor, mask=inside, other=0)
    state = tl.load(cursor + 4, mask=inside, other=0)
    goes_on = classes != 0
    for column in range(width):
        at = token_ids + row * token_stride + column * column_stride
        token = tl.load(at, mask=inside & (column < length), other=-1)
        then, is_legal = _next_state(token, cursor, state, goes_on & (token >= 0))
        state = tl.where(token >= 0, then, state)
        goes_on = goes_on & (is_legal | (token < 0))
    _put(cursor, tl.where(goes_on, classes, 0), state, goes_on, inside)


@triton.jit
def _next_state(token, cursor, state, goes_on):  # type: ignore[no-untyped-def]
    """The state after a token of each text that continues, and whether its table holds it."""
    classes = tl.load(cursor, mask=goes_on, other=0)
    of = tl.load(classes.to(tl.pointer_type(tl.int32)) + token, mask=goes_on, other=0)
    then = tl.load(cursor + 1, mask=goes_on, other=0)
    width = tl.load(cursor + 2, mask=goes_on, other=0)
    at = state * width + of
    found = tl.load(then.to(tl.pointer_type(tl.int16)) + at, mask=goes_on, other=-1).to(tl.int64)
    is_held = goes_on & (found >= 0)
    return tl.where(is_held, found, 0), is_held


@triton.jit
def _put(cursor, classes, state, goes_on, inside):  # type: ignore[no-untyped-def]
    """Store the texts' states; returns their rows, 0 for texts that do not continue."""
    rows = tl.load(cursor + 3, mask=inside & goes_on, other=0)
    source = tl.load(rows.to(tl.pointer_type(tl.int64)) + state, mask=inside & goes_on, other=0)
    tl.store(cursor, classes, mask=inside)
    tl.store(cursor + 4, state, mask=inside)
    tl.store(cursor + 5, source, mask=inside)
    return source
