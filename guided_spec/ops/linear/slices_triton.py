"""How programs of a product that each have a slice of the inputs add up what they found.

The program that comes last adds the slices, in their order, so that a sum never depends on who came
when.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALL = tl.constexpr(2048)  # numbers of a part, of which several fit into registers


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
