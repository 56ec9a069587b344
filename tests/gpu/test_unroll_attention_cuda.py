"""Attention of an unroll without a mask on CUDA: by FlashAttention's kernels."""

from __future__ import annotations

import pytest
import torch

from guided_spec.training.unroll_attention import has_kernel
from tests.training.test_unroll_attention import dense, draw, run, unmasked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("repeats", [0, 3])
@pytest.mark.parametrize("shape", [(2, 8, 2, 129, 128), (1, 4, 4, 64, 40)])
def test_it_is_what_the_dense_mask_gives(
    shape: tuple[int, int, int, int, int], repeats: int
) -> None:
    """In bfloat16, against float32: of the kernels' precision."""
    parts = draw(shape, repeats, dtype=torch.bfloat16, device="cuda")
    wanted = run(dense, [part.float() for part in parts])
    for ours, exact in zip(run(unmasked, parts), wanted, strict=True):
        error = (ours.float() - exact).abs().max() / exact.abs().max()
        assert error < 0.01
    assert not has_kernel(parts[0].float(), 128)  # no such kernels for 32 bits
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert has_kernel(parts[0].float(), 128)
        assert unmasked(*(part.float() for part in parts)).dtype == torch.bfloat16
