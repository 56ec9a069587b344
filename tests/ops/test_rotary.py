"""Rotating packed heads: what transformers' modules compute, and the kernel what torch does."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from guided_spec.ops.pointwise import rotate_and_store
from guided_spec.ops.slot_attention import HeadNorms, HeadShape, KeyValues, Rotation, SlotPlaces
from tests.ops.interpreted import run_interpreted

SHAPES = [HeadShape(4, 2, 16), HeadShape(1, 1, 8), HeadShape(6, 3, 24), HeadShape(5, 1, 6)]
SLOTS, LENGTH = 4, 9

COMPARE = """
import torch
from guided_spec.ops.slot_attention import HeadNorms
from guided_spec.ops.pointwise import rotate_and_store
from guided_spec.ops.pointwise_triton import rotate_and_store as kernel
from tests.ops.test_rotary import SHAPES, empty, make

for shape in SHAPES:
    for batch, tokens in ((0, 2), (1, 1), (3, 4)):
        for norms in (None, HeadNorms(torch.rand(shape.size), torch.rand(shape.size), 1e-6)):
            packed, rotation, places = make(shape, batch, tokens)
            buffers, expected = empty(shape), empty(shape)
            turned = packed.clone()
            rotate_and_store(turned, rotation, shape, norms, expected, places)
            kernel(packed, rotation, shape, norms, buffers, places)
            torch.testing.assert_close(packed, turned, rtol=1e-5, atol=1e-6)
            for found, wanted in zip(buffers, expected):
                # The sink may hold anything: several tokens are written to it.
                found, wanted = found[:, :, :-1], wanted[:, :, :-1]
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
print("equal")
"""


def make(shape: HeadShape, batch: int, tokens: int) -> tuple[torch.Tensor, Rotation, SlotPlaces]:
    """A packed projection, a rotation, and places; the last of three rows is unused.

    The first row goes on behind the last position.
    """
    torch.manual_seed(batch + tokens)
    packed = torch.randn(batch, tokens, shape.width)
    cos, sin = (torch.randn(LENGTH, shape.size // 2).repeat(1, 2) for _ in range(2))
    slots, starts = torch.tensor([2, 0, -1])[:batch], torch.tensor([7, 1, 3])[:batch]
    return packed, Rotation(cos, sin), SlotPlaces(slots, starts)


def empty(shape: HeadShape) -> KeyValues:
    size = (SLOTS, shape.keys, LENGTH + 1, shape.size)
    return KeyValues(torch.zeros(size), torch.zeros(size))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_it_is_what_transformers_computes(shape: HeadShape, *, has_norms: bool) -> None:
    packed, rotation, places = make(shape, 3, 4)
    heads = packed.clone().view(3, 4, -1, shape.size)
    query, key, value = heads.split([shape.queries, shape.keys, shape.keys], 2)
    norms = None
    if has_norms:
        stock = [Qwen3RMSNorm(shape.size, 1e-6) for _ in range(2)]
        for norm in stock:
            torch.nn.init.uniform_(norm.weight)
        query, key = stock[0](query), stock[1](key)
        norms = HeadNorms(stock[0].weight.detach(), stock[1].weight.detach(), 1e-6)
    positions = (places.starts.unsqueeze(1) + torch.arange(4)).clamp_max(LENGTH - 1)
    cos, sin = (part[positions] for part in rotation)
    query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    buffers = empty(shape)
    found = rotate_and_store(packed, rotation, shape, norms, buffers, places)
    torch.testing.assert_close(found, query.transpose(1, 2), rtol=1e-5, atol=1e-6)
    for row, slot in enumerate((2, 0)):
        start = int(places.starts[row])
        kept = min(4, LENGTH - start)  # the rest goes to the sink
        for states, buffer in ((key, buffers.keys), (value, buffers.values)):
            stored = buffer[slot, :, start : start + kept].transpose(0, 1)
            torch.testing.assert_close(stored, states[row, :kept], rtol=1e-5, atol=1e-6)
    assert all(not buffer[1].any() and not buffer[3].any() for buffer in buffers)


def test_bfloat16_is_rounded_once() -> None:
    shape = SHAPES[0]
    packed, rotation, places = make(shape, 2, 3)
    packed = packed.to(torch.bfloat16)
    wide = packed.float()
    expected = rotate_and_store(wide, rotation, shape, None, empty(shape), places)
    found = rotate_and_store(packed, rotation, shape, None, empty(shape), places)
    assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.slow
def test_the_kernel_computes_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
