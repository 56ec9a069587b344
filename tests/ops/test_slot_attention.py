"""Attention over slots against scaled_dot_product_attention, row by row, over drawn batches."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from guided_spec.errors import ConfigError
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces, slot_attention

NUM_SLOTS = 6


class Case(NamedTuple):
    """One call: shapes, and where each row goes."""

    num_kv_heads: int
    group: int
    num_tokens: int
    width: int
    max_length: int
    window: int | None
    slots: list[int]
    starts: list[int]


class Data(NamedTuple):
    """The tensors of a call."""

    query: Tensor
    new: KeyValues
    buffers: KeyValues
    places: SlotPlaces


@st.composite
def cases(draw: st.DrawFn) -> Case:
    max_length = draw(st.integers(1, 20))
    order = draw(st.permutations(range(NUM_SLOTS)))
    size = draw(st.integers(1, 3))
    unused = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    slots = [-1 if skip else slot for skip, slot in zip(unused, order, strict=False)]
    return Case(
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        num_tokens=draw(st.integers(1, 5)),
        width=draw(st.sampled_from([1, 8, 16])),
        max_length=max_length,
        window=draw(st.none() | st.integers(1, 8)),
        slots=slots,
        starts=draw(st.lists(st.integers(0, max_length), min_size=size, max_size=size)),
    )


def make(case: Case) -> Data:
    """Random tensors; NaN where the buffers hold nothing, strides as a model's projections have."""
    torch.manual_seed(0)
    batch, tokens, heads, width = len(case.slots), case.num_tokens, case.num_kv_heads, case.width
    query = torch.randn(batch, tokens, heads * case.group, width).transpose(1, 2)
    key = torch.randn(batch, tokens, heads, width).transpose(1, 2)
    value = torch.randn(batch, heads, tokens, width)
    shape = (NUM_SLOTS, heads, case.max_length + 1, width)
    buffers = KeyValues(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    for slot, start in zip(case.slots, case.starts, strict=True):
        if slot >= 0:
            for buffer in buffers:
                buffer[slot, :, :start] = torch.randn(heads, start, width)
    places = SlotPlaces(torch.tensor(case.slots), torch.tensor(case.starts))
    return Data(query, KeyValues(key, value), buffers, places)


def by_hand(case: Case, data: Data, row: int) -> Tensor:
    """[Hq, T, D] of one used row: its text put together, and torch's own attention over it."""
    slot, start = case.slots[row], case.starts[row]
    keys, values = (
        torch.cat([old[slot, :, :start], new[row]], 1)[:, : case.max_length]
        for old, new in zip(data.buffers, data.new, strict=True)
    )
    outputs = []
    for token in range(case.num_tokens):
        position = start + token
        low = 0 if case.window is None else max(position - case.window + 1, 0)
        seen = slice(low, position + 1)
        query = data.query[row, :, token : token + 1]
        if keys[:, seen].shape[1] == 0:
            outputs.append(torch.zeros_like(query))
            continue
        outputs.append(
            scaled_dot_product_attention(
                query[None], keys[None, :, seen], values[None, :, seen], scale=0.3, enable_gqa=True
            )[0]
        )
    return torch.cat(outputs, 1)


def clone(buffers: KeyValues) -> KeyValues:
    return KeyValues(buffers.keys.clone(), buffers.values.clone())


@settings(max_examples=40)
@given(cases())
def test_every_row_is_attention_over_its_own_text(case: Case) -> None:
    data = make(case)
    written = clone(data.buffers)
    found = slot_attention(
        data.query, data.new, written, data.places, scale=0.3, window=case.window
    )
    assert found.shape == (len(case.slots), case.num_tokens, data.query.shape[1], case.width)
    assert found.is_contiguous()
    for row, slot in enumerate(case.slots):
        heads_first = found[row].transpose(0, 1)
        expected = torch.zeros_like(heads_first) if slot < 0 else by_hand(case, data, row)
        torch.testing.assert_close(heads_first, expected)


@given(cases())
def test_only_the_new_tokens_are_written(case: Case) -> None:
    data = make(case)
    written = clone(data.buffers)
    slot_attention(data.query, data.new, written, data.places, scale=0.3, window=case.window)
    expected = clone(data.buffers)
    for row, (slot, start) in enumerate(zip(case.slots, case.starts, strict=True)):
        if slot >= 0:
            end = min(start + case.num_tokens, case.max_length)
            for buffer, states in zip(expected, data.new, strict=True):
                buffer[slot, :, start:end] = states[row, :, : end - start]
    for got, wanted in zip(written, expected, strict=True):
        real = slice(0, case.max_length)  # the sink may hold anything
        torch.testing.assert_close(got[:, :, real], wanted[:, :, real], equal_nan=True)


def test_the_sink_takes_what_does_not_fit() -> None:
    case = Case(1, 1, 3, 4, max_length=5, window=None, slots=[2], starts=[4])
    data = make(case)
    slot_attention(data.query, data.new, data.buffers, data.places, scale=0.3)
    assert torch.equal(data.buffers.keys[2, :, 4], data.new.keys[0, :, 0])
    sink = data.buffers.keys[2, 0, 5]
    assert any(torch.equal(sink, data.new.keys[0, 0, token]) for token in (1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_full(dtype: torch.dtype) -> None:
    data = make(Case(2, 2, 3, 16, max_length=40, window=None, slots=[1, 0], starts=[37, 5]))
    query, key, value, keys, values = (
        states.to(dtype) for states in (data.query, *data.new, *data.buffers)
    )
    new, buffers = KeyValues(key, value), KeyValues(keys, values)
    found = slot_attention(query, new, clone(buffers), data.places, scale=0.3)
    assert found.dtype == dtype
    exact = KeyValues(keys.float(), values.float())
    new = KeyValues(key.float(), value.float())
    expected = slot_attention(query.float(), new, exact, data.places, scale=0.3)
    assert torch.equal(found, expected.to(dtype))


def test_the_operator_keeps_its_contract() -> None:
    case = Case(2, 2, 3, 16, max_length=9, window=4, slots=[1, -1], starts=[5, 0])
    data = make(case)
    buffers = [torch.nan_to_num(buffer) for buffer in data.buffers]
    arguments = (data.query, *data.new, *buffers, data.places.slots, data.places.starts)
    torch.library.opcheck(torch.ops.guided_spec.slot_attention.default, (*arguments, 0.3, 4, 9))


def test_shapes_that_do_not_fit_are_named() -> None:
    case = Case(2, 2, 3, 4, max_length=9, window=None, slots=[1], starts=[5])
    query, new, buffers, places = make(case)
    with pytest.raises(ConfigError, match="query"):
        slot_attention(query[:, :3], new, buffers, places, scale=1.0)
    short = KeyValues(new.keys, new.values[:, :, :2])
    with pytest.raises(ConfigError, match="new"):
        slot_attention(query, short, buffers, places, scale=1.0)
    cut = KeyValues(buffers.keys[:, :, 1:], buffers.values[:, :, 1:])
    with pytest.raises(ConfigError, match="contiguous"):
        slot_attention(query, new, cut, places, scale=1.0)
    with pytest.raises(ConfigError, match="window=0"):
        slot_attention(query, new, buffers, places, scale=1.0, window=0)
