"""FlashAttention 3 over blocks gives what the kernels here give, where it is installed.

The variable FLASH_ATTENTION_3 names vLLM's library of it where its own package is not there.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.lmdeploy_attention import provide_flash_attention
from benchmarks.lines import num_blocks, places_of
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.ops.attention import flash_attention as module
from guided_spec.ops.attention.slot_attention import KeyValues, slot_attention

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def installed() -> None:
    library = os.environ.get("FLASH_ATTENTION_3")
    if library is not None:
        provide_flash_attention(Path(library))
    module.is_installed.cache_clear()
    if not module.is_installed():
        pytest.skip("FlashAttention 3 is not installed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("starts", "width"), [((0,), 4096), ((3000, 17, 700), 400)])
def test_a_long_line(
    dtype: torch.dtype, starts: tuple[int, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest, shape = 8000, (num_blocks(len(starts), 8000), 4, BLOCK, 128)
    places = replace(places_of(starts, width, longest, CUDA), fits=True)
    query = torch.randn(len(starts) * width, 16, 128, dtype=dtype, device=CUDA)
    buffers = KeyValues(*(torch.randn(shape, dtype=dtype, device=CUDA) for _ in range(2)))
    assert module.serves(query, buffers, places)
    found = slot_attention(query, None, buffers, places, scale=0.1)
    monkeypatch.setattr(module, "is_installed", lambda: False)
    expected = slot_attention(query, None, buffers, places, scale=0.1)
    assert not torch.equal(found, expected)  # two kernels round in two ways
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-2)
