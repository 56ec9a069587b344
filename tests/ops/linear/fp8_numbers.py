"""A kernel that converts numbers in fp8 alone, as the products do."""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.linear.fp8_linear_triton import bfloat16_of


# Triton reads annotations as its own, so the arguments have none.
@triton.jit
def converted(values, found, count):  # type: ignore[no-untyped-def]
    """values: bytes. found: float32. count: up to 256."""
    at = tl.arange(0, 256)
    value = tl.load(values + at, mask=at < count, other=0)
    tl.store(found + at, bfloat16_of(value, HAS_ASM=False).to(tl.float32), mask=at < count)
