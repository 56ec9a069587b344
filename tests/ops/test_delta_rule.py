"""The gated delta rule over slots: its equations token by token; the kernels do what torch does."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu, softplus

from guided_spec.errors import ConfigError
from guided_spec.ops.attention.slot_attention import SlotIndex
from guided_spec.ops.delta_rule import (
    DeltaColumns,
    DeltaLayer,
    DeltaShape,
    DeltaStates,
    gated_delta,
)
from tests.ops.interpreted import run_interpreted
from tests.slot_lines import Span, Unused, places_of
from tests.tiers import examples

NUM_SLOTS = 3
LONGEST_DRAFT = 5
TABLES = torch.zeros(NUM_SLOTS, 1, dtype=torch.int32)
SHAPES = [DeltaShape(2, 4, 8, 6, 4), DeltaShape(1, 1, 5, 3, 2), DeltaShape(3, 3, 4, 40, 3)]

# Forwards behind one another. Slot 2 takes a prompt in pieces, then drafts of which some stay; slot
# 0 begins a second text; slot 1 reads more tokens at once than a draft has.
STEPS = [
    [Span(2, 0, 7), Span(0, 0, 2)],
    [Span(0, 2, 3), Span(-1, 4, 2), Span(2, 7, 2), Span(1, 0, 70)],
    [Span(2, 9, 5), Span(1, 70, 1), Span(0, 4, 1)],
    [Span(2, 11, 4), Span(0, 0, 3), Span(1, 71, 5)],
    [Span(2, 11, 2), Span(1, 71, 5), Span(0, 1, 6)],
    [Span(2, 13, 5), Span(1, 74, 6), Span(0, 7, 2)],
    [Span(1, 80, 1), Span(0, 7, 1), Span(2, 18, 1)],
]
# Drafts that kernels fold in as they do prompts, and which go back all the same.
LONG_DRAFT = 20
LONG_STEPS = [
    [Span(0, 0, 18), Span(1, 0, 33)],
    [Span(0, 7, 20), Span(1, 33, 2)],
    [Span(1, 35, 19), Span(0, 20, 3)],
    [Span(0, 21, 17), Span(1, 36, 1)],
    # Behind more rows than are looked at together, and with one that is none between them.
    [*[Span(-1, 0, 1)] * 70, Span(2, 0, 18), Span(-1, 0, 20), Span(0, 0, 3), Span(1, 37, 19)],
]

COMPARE = """
import torch
from guided_spec.ops.delta_rule import gated_delta
from guided_spec.ops.delta_rule_triton import gated_delta as kernel
from tests.ops.test_delta_rule import LONG_DRAFT, LONG_STEPS, LONGEST_DRAFT, SHAPES, STEPS
from tests.ops.test_delta_rule import empty_states, layer_of, packed_of, places_at

FULL = torch.float32
for shape, longest, steps, dtype in (  # the long forwards have short rows too
    (SHAPES[0], LONGEST_DRAFT, STEPS, torch.float16), (SHAPES[0], LONG_DRAFT, LONG_STEPS, FULL),
    (SHAPES[1], LONGEST_DRAFT, STEPS, FULL), (SHAPES[2], LONGEST_DRAFT, STEPS, FULL),
):
    atol, rtol = (1e-5, 1e-4) if dtype == FULL else (4e-3, 4e-3)
    layer = layer_of(shape, dtype)
    states, expected = (empty_states(shape, dtype, longest) for _ in range(2))
    for at, spans in enumerate(steps):
        packed, places = packed_of(layer, spans, at, dtype), places_at(spans)
        found = kernel(packed, layer, states, places)
        wanted = gated_delta(packed, layer, expected, places)
        torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol)
        torch.testing.assert_close(states.state, expected.state, atol=atol, rtol=rtol)
        assert torch.equal(states.extent, expected.extent)
        assert torch.equal(states.recent, expected.recent)
    assert kernel(packed[:0], layer, states, places_at([])).shape == (0, wanted.shape[1])
print("equal")
"""


CPU = torch.device("cpu")


def layer_of(
    shape: DeltaShape, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> DeltaLayer:
    """Random numbers, in columns of any order."""
    source = torch.Generator().manual_seed(shape.values)
    kept, gate = shape.channels + 2 * shape.values, shape.values * shape.value_size
    order = torch.randperm(kept + gate + 1, generator=source).int()
    taps = torch.randn(shape.channels, shape.taps, generator=source)
    rates, biases = torch.randn(2, shape.values, generator=source)
    norm = torch.rand(shape.value_size, generator=source)
    return DeltaLayer(
        shape,
        DeltaColumns(order[:kept].to(device), order[kept:-1].to(device)),
        taps.to(device, dtype),
        rates.to(device, dtype),
        biases.to(device, dtype),
        1.5,
        norm.to(device, dtype),
        1e-6,
    )


def packed_of(
    layer: DeltaLayer, spans: list[Span], seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Projections of the tokens, and of two unused ones."""
    width = len(layer.columns.kept) + len(layer.columns.gate) + 1
    count = sum(span.length for span in spans) + 2
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=source).to(dtype)


def places_at(spans: list[Span]) -> SlotIndex:
    return places_of(spans, TABLES, 1000, Unused(2, 1) if spans else Unused())


def empty_states(
    shape: DeltaShape, dtype: torch.dtype = torch.float32, longest_draft: int = LONGEST_DRAFT
) -> DeltaStates:
    """What other texts left: anything."""
    like = torch.empty(0, dtype=dtype)
    states = DeltaStates.empty(shape, NUM_SLOTS, longest_draft, like)
    states.state.fill_(3.0)
    states.recent.fill_(2.0)
    states.extent.copy_(torch.tensor([[4, 2], [0, 0], [9, 5]]))
    return states


@st.composite
def drawn_steps(draw: st.DrawFn) -> list[list[Span]]:
    """Forwards of some slots each; a row begins in the one before it, or behind a long one."""
    steps, earliest, ends = [], [0] * NUM_SLOTS, [0] * NUM_SLOTS
    for _ in range(draw(st.integers(2, 8))):
        spans = []
        for slot in draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True)):
            is_new = draw(st.integers(0, 9)) == 0
            start = 0 if is_new else draw(st.integers(earliest[slot], ends[slot]))
            length = draw(st.integers(1, 2 * LONGEST_DRAFT))
            spans.append(Span(slot, start, length))
            ends[slot] = start + length
            earliest[slot] = ends[slot] if length > LONGEST_DRAFT else start
        steps.append(spans)
    return steps


class Text(NamedTuple):
    """The projections [1, X] of one text's tokens."""

    tokens: list[Tensor]

    def read(self, layer: DeltaLayer) -> Tensor:
        """[T, Hv * V] by the equations, from the first token on."""
        shape, packed = layer.shape, torch.cat(self.tokens)
        kept = packed[:, layer.columns.kept.long()]
        raw, step, decay = kept.split([shape.channels, shape.values, shape.values], 1)
        before = torch.cat([raw.new_zeros(shape.taps - 1, shape.channels), raw])
        parts = [before[tap : tap + len(raw)] * layer.taps[:, tap] for tap in range(shape.taps)]
        mixed = silu(torch.stack(parts).sum(0))
        width, each = shape.keys * shape.key_size, shape.values // shape.keys
        query, key, value = mixed.split([width, width, shape.values * shape.value_size], 1)
        query, key = (
            (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, 1)
            for part in (one.unflatten(1, (shape.keys, -1)) for one in (query, key))
        )
        query, value = query / shape.key_size**0.5, value.unflatten(1, (shape.values, -1))
        shrink = torch.exp(-layer.rates.exp() * softplus(decay + layer.biases))
        opened = step.sigmoid() * layer.step_scale
        state, found = raw.new_zeros(shape.values, shape.key_size, shape.value_size), []
        for at in range(len(packed)):
            state = shrink[at, :, None, None] * state
            known = (state * key[at, :, :, None]).sum(1)
            moved = opened[at, :, None] * (value[at] - known)
            state = state + key[at, :, :, None] * moved[:, None]
            found.append((state * query[at, :, :, None]).sum(1))
        read = torch.stack(found)
        normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + layer.eps)
        return (normed * layer.norm).flatten(1) * silu(packed[:, layer.columns.gate.long()])


@pytest.mark.parametrize("shape", SHAPES)
def test_each_token_reads_what_the_equations_say(shape: DeltaShape) -> None:
    follow(shape, STEPS)


@given(drawn_steps())
@settings(max_examples=examples(25))
def test_texts_may_go_back_anywhere_in_short_rows(steps: list[list[Span]]) -> None:
    follow(SHAPES[1], steps)


def test_long_drafts_go_back_too() -> None:
    follow(SHAPES[0], LONG_STEPS, LONG_DRAFT)


def follow(shape: DeltaShape, steps: list[list[Span]], longest_draft: int = LONGEST_DRAFT) -> None:
    """Each token of each forward, by the equations over its text alone."""
    layer, states = layer_of(shape), empty_states(shape, longest_draft=longest_draft)
    texts = [Text([]) for _ in range(NUM_SLOTS)]
    for at, spans in enumerate(steps):
        packed = packed_of(layer, spans, at)
        found, first = gated_delta(packed, layer, states, places_at(spans)), 0
        for slot, start, length in spans:
            end = first + length
            if slot >= 0:
                texts[slot].tokens[start:] = packed[first:end].split(1)
                assert len(texts[slot].tokens) == start + length
                expected = texts[slot].read(layer)[start:]
                torch.testing.assert_close(found[first:end], expected, rtol=1e-4, atol=1e-4)
            else:
                assert not found[first:end].any()
            first = end
        assert not found[first:].any()


def test_shapes_that_do_not_fit_are_named() -> None:
    shape = SHAPES[0]
    layer, states, places = layer_of(shape), empty_states(shape), places_at(STEPS[0])
    packed = packed_of(layer, STEPS[0], 0)
    with pytest.raises(ConfigError, match="packed"):
        gated_delta(packed.T.contiguous().T, layer, states, places)
    with pytest.raises(ConfigError, match=r"states\.recent"):
        gated_delta(packed, layer, states._replace(recent=states.recent[..., :-1]), places)
    with pytest.raises(ConfigError, match=r"states\.state"):
        gated_delta(packed, layer, states._replace(state=states.state.half()), places)


@pytest.mark.slow
def test_the_kernels_compute_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
