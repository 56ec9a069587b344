"""FlashAttention 3 over blocks gives what the kernels here give, where it is installed.

The variable FLASH_ATTENTION_3 names vLLM's library of it where its own package is not there.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.lmdeploy_attention import provide_flash_attention
from benchmarks.kernels.lines import num_blocks, places_of
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.packed_lm import Rows, split_index
from guided_spec.ops.attention import flash_attention as module
from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex, slot_attention

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
    places = replace(places_of(starts, width, longest, CUDA), width=None, fits=True)
    query = torch.randn(len(starts) * width, 16, 128, dtype=dtype, device=CUDA)
    buffers = KeyValues(*(torch.randn(shape, dtype=dtype, device=CUDA) for _ in range(2)))
    assert module.serves(query, buffers, places)
    found = slot_attention(query, None, buffers, places, scale=0.1)
    monkeypatch.setattr(module, "is_installed", lambda: False)
    expected = slot_attention(query, None, buffers, places, scale=0.1)
    assert not torch.equal(found, expected)  # two kernels round in two ways
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-2)


def test_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decodes beside a piece of a prompt; rows may change between two replays."""
    longest, sizes = 4000, (num_blocks(3, 4000), 4, BLOCK, 128)
    buffers = KeyValues(*(torch.randn(sizes, dtype=torch.bfloat16, device=CUDA) for _ in range(2)))
    query = torch.randn(640, 16, 128, dtype=torch.bfloat16, device=CUDA)
    tables = places_of((0, 0, 0), 1, longest, CUDA).tables

    def lines(*rows: tuple[int, int]) -> Tensor:
        starts, counts = zip(*rows, strict=True)
        return torch.from_numpy(Rows([0, 1, 2], starts, counts).packed_index(640, 4)).to(CUDA)

    given = lines((3000, 512), (17, 6), (700, 6))

    def attend() -> Tensor:
        tokens, rows = split_index(given, 640)
        places = SlotIndex(tokens, rows, tables, longest, 640, fits=True)
        return slot_attention(query, None, buffers, places, scale=0.1)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for rows in [((3000, 512), (17, 6), (700, 6)), ((5, 6), (0, 600), (2000, 1))]:
        given.copy_(lines(*rows))
        graph.replay()
        with monkeypatch.context() as patch:
            patch.setattr(module, "is_installed", lambda: False)
            expected = attend()
        count = sum(count for _, count in rows)
        assert not torch.equal(found[:count], expected[:count])
        torch.testing.assert_close(found[:count], expected[:count], atol=2e-3, rtol=1e-2)
