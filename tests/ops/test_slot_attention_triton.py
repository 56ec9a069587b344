"""The attention kernels give what the torch reference gives; here in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

COMPARE = """
from dataclasses import replace

import torch
from hypothesis import example, given, settings, strategies as st
from guided_spec.ops.attention.slot_attention import FP8, KeyValues, Window
from guided_spec.ops.attention.slot_attention import slot_attention as reference
from guided_spec.ops.attention.slot_attention_triton import Tiling, choose_tiling, slot_attention
from tests.ops.interpreted import round_to_fp8_as_devices_do
from tests.slot_lines import SharedPrefix, Case, Span, cases, kept_positions, make

TILINGS = [
    None,
    Tiling(16, 16, 1, 4, 1),
    Tiling(16, 16, 2, 4, 1),
    Tiling(16, 32, 4, 4, 1),
    Tiling(32, 16, 8, 4, 1),
    Tiling(64, 16, 1, 4, 1),
    Tiling(64, 16, 2, 4, 1),
    Tiling(128, 16, 1, 4, 1),
]
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3)}
empty = torch.Tensor.new_empty


def poisoned(*args, **kwargs):
    memory = empty(*args, **kwargs)
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory


torch.Tensor.new_empty = poisoned
WHOLE_TILES = Case(2, 3, 24, 70, 16, [Span(1, 33, 7), Span(0, 5, 1), Span(2, 60, 7)])
CHUNK = Window(5, is_chunk=True)
SHARED = WHOLE_TILES._replace(
    spans=[Span(1, 33, 7), Span(0, 5, 1), Span(3, 50, 3), Span(2, 60, 7), Span(1, 40, 2)],
    alike=(SharedPrefix((2, 1), 2), SharedPrefix((3,), 3)),
)


round_to_fp8_as_devices_do()


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@example(WHOLE_TILES, torch.float16, None, False, TILINGS)
@example(WHOLE_TILES, torch.float16, FP8, False, TILINGS)
@example(SHARED, torch.float16, None, False, TILINGS)
@example(SHARED._replace(has_sinks=True), torch.float32, None, True, TILINGS[:3])
@example(SHARED._replace(alike=(), window=Window(3)), torch.float32, None, False, TILINGS[:3])
@example(SHARED._replace(alike=(), window=CHUNK), torch.float32, FP8, False, TILINGS[:3])
@given(
    cases(70, [8, 16, 24, 48, 64]),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([None, FP8]),
    st.booleans(),
    st.lists(st.sampled_from(TILINGS), min_size=2, max_size=2),
)
def compare(case, dtype, kept_in, is_stored, tilings):
    drawn = make(case).to(dtype)
    drawn = drawn if kept_in is None else drawn.kept_in(kept_in)
    places = replace(drawn.places, width=3)
    options = dict(scale=0.3, window=case.window, sinks=case.sinks())
    kept, used = kept_positions(places, case.block), places.tokens[0] >= 0
    theirs = drawn.clone()
    expected = reference(theirs.query, theirs.new, theirs.buffers, places, **options)
    given_ = None if is_stored else drawn.new
    before = theirs if is_stored else drawn
    for tiling in tilings:
        ours = before.clone()
        found = slot_attention(ours.query, given_, ours.buffers, places, **options, tiling=tiling)
        atol, rtol = TOLERANCE[dtype]
        torch.testing.assert_close(found[used], expected[used], atol=atol, rtol=rtol)
        for got, wanted in zip(ours.buffers, theirs.buffers):
            got, wanted = (one.float().transpose(1, 2)[kept] for one in (got, wanted))
            torch.testing.assert_close(got, wanted, equal_nan=True, atol=0, rtol=0)


compare()
data = make(WHOLE_TILES).kept_in(FP8)
new = KeyValues(*(1e4 * states for states in data.new))
slot_attention(data.query, new, data.buffers, data.places, scale=0.3)
kept = data.buffers.keys[data.places.tables[1, 33 // 16], :, 33 % 16].float()
assert torch.equal(kept, 448 * new.keys[0].sign())
query = torch.zeros(6, 32, 128, dtype=torch.bfloat16)
assert choose_tiling(query, 8, 6, 1152)[:3] == (32, 64, 32)
assert choose_tiling(query, 8, 100, 1152)[:3] == (32, 64, 32)  # no row is wider than the line
assert choose_tiling(query, 8, 6, 100)[:3] == (32, 64, 2)
assert choose_tiling(query.repeat(64, 1, 1), 8, 6, 1152)[:3] == (32, 64, 1)
assert choose_tiling(query.repeat(100, 1, 1), 8, 600, 1152)[:2] == (64, 64)
assert choose_tiling(query.repeat(400, 1, 1), 8, 2400, 4096)[:4] == (128, 64, 1, 4)
# Where tiles are masked, or heads are wider, large ones were not measured.
assert choose_tiling(query.repeat(400, 1, 1), 8, 2400, 4096, 512)[:2] == (64, 64)
assert choose_tiling(query.repeat(400, 1, 2), 8, 2400, 4096)[:2] == (64, 32)
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_agree_with_the_reference() -> None:
    # The interpreter of older versions turns arrays into integers as numpy no longer allows.
    pytest.importorskip("triton", minversion="3.9")
    assert run_interpreted("-c", COMPARE) == "equal"
