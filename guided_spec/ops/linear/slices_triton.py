"""How programs of a product that each have a slice of the inputs add up what they found.

The program that comes last adds the slices, in their order, so that a sum never depends on who came
when.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FEWEST_STEPS = 4  # of a slice
SMALL = tl.constexpr(2048)  # numbers of a part, of which several fit into registers


class Slices(NamedTuple):
    """number: of slices. steps: of each, fewer of the last one."""

    number: int
    steps: int

    @classmethod
    def of(cls, tiles: tuple[int, int], steps: int, programs: int, counters: int) -> Slices:
        """As many as make about ``programs`` of them.

        tiles: of tokens and outputs. steps: of all inputs. counters: of tiles, that there are.
        """
        tile_count = tiles[0] * tiles[1]
        wanted = min(triton.cdiv(programs, tile_count), steps // FEWEST_STEPS)
        taken = triton.cdiv(steps, max(wanted, 1)) if tile_count <= counters else steps
        return cls(triton.cdiv(steps, taken), taken)

    def parts(self, product: Tensor) -> Tensor:
        """Memory for the sums of slices: float32 [number, *product], or none for one slice."""
        number = self.number if self.number > 1 else 0
        return product.new_empty(number, *product.shape, dtype=torch.float32)


# Triton reads annotations as its own, so the arguments have none.
@triton.jit
def is_last_slice(total, part, arrived, is_written):  # type: ignore[no-untyped-def]
    """Store a slice's ``total`` at ``part``; whether those of all slices, program_id(2), are there.

    arrived: address of the counter that the programs of these outputs share.
    """
    tl.store(part, total, mask=is_written)
    tl.debug_barrier()  # all threads have stored before one of them says so
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(2) - 1
    if is_last:
        tl.debug_barrier()
        tl.store(arrived, 0)
    return is_last


@triton.jit
def sum_of_slices(first, whole, is_written):  # type: ignore[no-untyped-def]
    """first: addresses in the first slice; whole: numbers of each slice."""
    total = tl.load(first, mask=is_written, other=0.0, cache_modifier=".cg")
    count = tl.num_programs(2)
    AT_ONCE: tl.constexpr = 4 if first.shape[0] * first.shape[1] <= SMALL else 1
    for begin in range(1, count, AT_ONCE):
        for at in tl.static_range(AT_ONCE):  # these are asked for together
            part = tl.full([1, 1], begin + at, tl.int32)
            there = is_written & (part < count)
            total += tl.load(first + part * whole, mask=there, other=0.0, cache_modifier=".cg")
    return total
