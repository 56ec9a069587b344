"""The attention kernels give what the torch reference gives; here in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from hypothesis import given, settings, strategies as st
from guided_spec.ops.slot_attention import _reference
from guided_spec.ops.slot_attention_triton import Tiling, choose_tiling, slot_attention

TILINGS = [None, Tiling(16, 16, 1, 4, 1), Tiling(16, 16, 2, 4, 1), Tiling(16, 16, 8, 4, 1)]
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3)}
empty = torch.Tensor.new_empty


def poisoned(*args, **kwargs):
    memory = empty(*args, **kwargs)
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory


torch.Tensor.new_empty = poisoned


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.data())
def compare(data):
    draw = lambda *bounds: data.draw(st.integers(*bounds))
    batch, heads, group, tokens = draw(1, 3), draw(1, 2), draw(1, 4), draw(1, 7)
    width = data.draw(st.sampled_from([8, 16, 24, 48, 64]))
    length, window = draw(1, 70), data.draw(st.sampled_from([0, 1, 5, 40]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    slots = data.draw(st.permutations(range(4)))[:batch]
    slots = torch.tensor([slot if draw(0, 3) else -1 for slot in slots])
    starts = torch.tensor([draw(0, length) for _ in range(batch)])
    if draw(0, 3) == 0:  # pieces of one text
        slots, starts = slots[:1].repeat(batch), starts[0] // 2 + tokens * torch.arange(batch)
    torch.manual_seed(0)
    query = torch.randn(batch, tokens, heads * group, width).to(dtype).transpose(1, 2)
    key = torch.randn(batch, tokens, heads, width).to(dtype).transpose(1, 2)
    value = torch.randn(batch, heads, tokens, width).to(dtype)
    buffers = torch.full((2, 4, heads, length + 1, width), torch.nan).to(dtype)
    for slot, start in zip(slots.tolist(), starts.clamp_max(length).tolist()):
        if slot >= 0:
            buffers[:, slot, :, :start] = torch.randn(2, heads, start, width).to(dtype)
    ours, theirs = buffers.clone(), buffers
    places = (slots, starts, 0.3, window, length)
    expected = _reference(query, key, value, *theirs, *places)
    tiling = data.draw(st.sampled_from(TILINGS))
    found = slot_attention(query, key, value, *ours, *places, tiling)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(
        ours[:, :, :, :length], theirs[:, :, :, :length], equal_nan=True, atol=0, rtol=0
    )


compare()
query = torch.zeros(1, 32, 6, 128, dtype=torch.bfloat16)
assert choose_tiling(query, 8, 1152)[:3] == (32, 64, 32)
assert choose_tiling(query, 8, 100)[:3] == (32, 64, 2)
assert choose_tiling(query.expand(64, -1, -1, -1), 8, 1152)[:3] == (32, 64, 1)
assert choose_tiling(query.repeat(1, 1, 100, 1), 8, 1152)[:2] == (128, 64)
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_agree_with_the_reference() -> None:
    # The interpreter of older versions turns arrays into integers as numpy no longer allows.
    pytest.importorskip("triton", minversion="3.9")
    assert run_interpreted("-c", COMPARE) == "equal"
