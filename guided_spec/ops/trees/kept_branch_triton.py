"""The move of an accepted branch as one kernel for all layers that are alike, by addresses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch


def keep_branch(
    addresses: Tensor, like: Tensor, tables: Tensor, rows: Tensor, path: Tensor
) -> None:
    """See ``guided_spec.ops.trees.kept_branch``; the arguments on one CUDA device.

    addresses: of ``LayerMemory``. like: one of its buffers.
    """
    batch, depths = path.shape
    _, heads, block, size = like.shape
    grid = (batch, len(addresses), heads)
    with torch.cuda.device_of(path):  # Triton launches on the current device
        launch(_move, grid)(
            *(addresses, like, tables, rows.contiguous(), path.contiguous(), batch),
            *(depths, tables.stride(0), block),
            size=size,
            padded=triton.next_power_of_2(size),
            num_warps=1,
        )


# Triton reads annotations as its own, so the arguments have none. A number that changes from call
# to call must not become part of the kernel: a new one would be compiled for it.
@triton.jit(do_not_specialize=["batch", "depths", "table_row", "block"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def] # noqa: PLR0913
    addresses,
    like,
    tables,
    rows,
    path,
    batch,
    depths,
    table_row,
    block,
    size: tl.constexpr,
    padded: tl.constexpr,
):
    """One row's branch, in one buffer and of one head.

    No place is read behind the step that writes it: the tokens of a branch only move forward.
    """
    row, head = tl.program_id(0), tl.program_id(2)
    buffer = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(like.dtype.element_ty))
    table = tables + tl.load(rows + row) * table_row
    start = tl.load(rows + batch + row)
    column = tl.arange(0, padded)
    for depth in range(depths):
        token = tl.load(path + row * depths + depth)
        source, to = start + token, start + depth + 1
        is_there = token > depth + 1
        is_moved = column < tl.where(is_there, size, 0)
        at = tl.load(table + source // block, mask=is_there, other=0).to(tl.int64)
        at = (at * tl.num_programs(2) + head) * block + source % block
        found = tl.load(buffer + at * size + column, mask=is_moved)
        at = tl.load(table + to // block, mask=is_there, other=0).to(tl.int64)
        at = (at * tl.num_programs(2) + head) * block + to % block
        tl.store(buffer + at * size + column, found, mask=is_moved)
