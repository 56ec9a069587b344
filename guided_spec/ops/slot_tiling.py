"""How attention over slots is divided into the programs of its kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

__all__ = ["Tiling", "choose_tiling"]

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
