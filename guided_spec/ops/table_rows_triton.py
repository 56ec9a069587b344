"""Steps along tables as kernels: addresses are read, and what lies there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch

__all__ = ["advance", "copy_rows"]

WORDS = 1024  # of a row in a program
TEXTS = 128  # of a program


def copy_rows(sources: Tensor, out: Tensor) -> None:
    """See ``guided_spec.ops.table_rows``; the rows may lie in pinned memory of the host, too."""
    count, words = out.shape
    # Rows begin at multiples of their length, in memory that begins at a multiple of more.
    is_aligned = words % 4 == 0
    grid = (count, triton.cdiv(words, WORDS))
    with torch.cuda.device_of(out):  # Triton launches on the current device
        launch(_copy, grid)(sources, out, words, is_aligned=is_aligned, block=WORDS)


def advance(token_ids: Tensor, cursors: Tensor, out: Tensor) -> None:
    """See ``guided_spec.ops.table_rows``; contiguous, all on one device."""
    count = len(token_ids)
    with torch.cuda.device_of(cursors):
        grid = (triton.cdiv(count, TEXTS),)
        launch(_advance, grid)(token_ids, cursors, out, count, block=TEXTS)


# Triton reads annotations as its own, so the arguments have none.
@triton.jit(do_not_specialize=["words"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    sources, out, words, is_aligned: tl.constexpr, block: tl.constexpr
):
    """Copy a chunk of a row from its address."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    address = tl.load(sources + row)
    source = address.to(tl.pointer_type(tl.int32))
    target = out + row.to(tl.int64) * words
    at = chunk * block + tl.arange(0, block)
    length = tl.where(address != 0, words, 0)
    if is_aligned:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        length = tl.multiple_of(length, 4)
    inside = at < length
    # ".cv" looks into no cache: the host may have written there since.
    found = tl.load(source + at, mask=inside, other=0, cache_modifier=".cv")
    tl.store(target + at, found, mask=inside)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _advance(token_ids, cursors, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token of each text. A cursor's numbers are in the order of ``table_rows.CURSOR``."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    cursor = cursors + row * 6
    token = tl.load(token_ids + row, mask=row < count, other=-1)
    classes = tl.load(cursor, mask=row < count, other=0)
    goes_on = (classes != 0) & (token >= 0)
    of = tl.load(classes.to(tl.pointer_type(tl.int32)) + token, mask=goes_on, other=0)
    then = tl.load(cursor + 1, mask=goes_on, other=0)
    width = tl.load(cursor + 2, mask=goes_on, other=0)
    rows = tl.load(cursor + 3, mask=goes_on, other=0)
    state = tl.load(cursor + 4, mask=goes_on, other=0)
    at = state * width + of
    found = tl.load(then.to(tl.pointer_type(tl.int16)) + at, mask=goes_on, other=-1).to(tl.int64)
    goes_on = goes_on & (found >= 0)
    source = tl.load(rows.to(tl.pointer_type(tl.int64)) + found, mask=goes_on, other=0)
    tl.store(cursor, tl.where(goes_on, classes, 0), mask=row < count)
    tl.store(cursor + 4, tl.where(goes_on, found, 0), mask=row < count)
    tl.store(cursor + 5, source, mask=row < count)
    tl.store(out + row, source, mask=row < count)
