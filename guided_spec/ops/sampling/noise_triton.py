"""Philox 4x32-10 as a kernel: the same bits as the torch reference, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch

BLOCK = 256  # counters a program, four columns each


def philox(seeds: Tensor, positions: Tensor, stream: int, columns: int) -> Tensor:
    """int64 [B, columns] random bits: ``noise.philox`` with the arguments on one CUDA device."""
    bits = torch.empty(len(seeds), columns, dtype=torch.int64, device=seeds.device)
    if bits.numel() == 0:
        return bits
    grid = (len(seeds), triton.cdiv(triton.cdiv(columns, 4), BLOCK))
    launch(_philox, grid)(
        seeds.contiguous(), positions.contiguous(), bits, columns, int(stream), BLOCK
    )
    return bits


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _philox(seeds, positions, bits, columns, stream, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    counter = tl.program_id(1) * block + tl.arange(0, block)
    position = tl.load(positions + row)
    zeros = tl.zeros([block], tl.uint32)
    low, high = zeros + position.to(tl.uint32), zeros + (position >> 32).to(tl.uint32)
    purpose = tl.full([block], stream, tl.uint32)
    # Triton's own rounds: key and counter words are in the order of the reference.
    words = tl.philox(tl.load(seeds + row), counter, low, high, purpose)
    for lane in tl.static_range(4):
        column = counter * 4 + lane
        word = words[lane].to(tl.uint32).to(tl.int64)
        tl.store(bits + row * columns + column, word, mask=column < columns)
