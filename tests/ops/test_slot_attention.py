"""Attention over slots against scaled_dot_product_attention, row by row, over drawn lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from guided_spec.errors import ConfigError
from guided_spec.ops.attention.slot_attention import (
    FP8,
    KeyValues,
    Window,
    as_kept,
    slot_attention,
    store_keys_values,
)
from tests.slot_lines import Case, Data, Span, cases, kept_positions, make
from tests.tiers import examples

KEPT = st.sampled_from([torch.float32, FP8])


def written_by_hand(case: Case, data: Data) -> KeyValues:
    """The blocks with every new token that fits its slot, one after another."""
    buffers = data.clone().buffers
    at = 0
    for slot, start, count in case.spans:
        for position in range(start, start + count):
            if slot >= 0 and position < case.max_length:
                block = data.places.tables[slot, position // case.block]
                for buffer, states in zip(buffers, data.new, strict=True):
                    buffer[block, :, position % case.block] = states[at]
            at += 1
    return buffers


def text_of(case: Case, data: Data, buffer: Tensor, slot: int, seen: Sequence[int]) -> Tensor:
    """[Hkv, L, D]: these positions of a slot, gathered one by one."""
    table = data.places.tables[slot]
    found = [buffer[table[at // case.block], :, at % case.block] for at in seen]
    return torch.stack([one.float() for one in found], 1)


def attend_once(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """[Hq, D]: a sink is one more key of each head, of any score, whose value is 0."""
    bias = torch.zeros(len(query), 1, keys.shape[1])
    if sinks is not None:
        keys, values = (functional.pad(part, (0, 0, 0, 1)) for part in (keys, values))
        bias = torch.cat([bias, sinks.view(-1, 1, 1)], -1)
    found = scaled_dot_product_attention(query[:, None], keys, values, bias, scale=0.3)
    return found[:, 0]


def first_seen(case: Case, position: int) -> int:
    """The first position that a token sees from its own."""
    if case.window is None:
        return 0
    size, is_chunk = case.window
    return position // size * size if is_chunk else max(position + 1 - size, 0)


def by_hand(case: Case, data: Data) -> Tensor:
    """[N, Hq, D]: torch's own attention over what each token sees; zeros where that is nothing."""
    buffers = written_by_hand(case, data)
    outputs = torch.zeros(data.query.shape)
    at = 0
    for slot, start, count in case.spans:
        for token in range(count):
            position = start + token
            text = range(first_seen(case, position), position + 1)
            seen = [place for place in text if place < case.max_length]
            if slot >= 0 and seen:
                keys, values = (text_of(case, data, buffer, slot, seen) for buffer in buffers)
                keys, values = (part.repeat_interleave(case.group, 0) for part in (keys, values))
                outputs[at] = attend_once(data.query[at], keys, values, case.sinks())
            at += 1
    return outputs


def is_used(data: Data) -> Tensor:
    return data.places.tokens[0] >= 0


def attend(case: Case, data: Data) -> Tensor:
    return slot_attention(*data, scale=0.3, window=case.window, sinks=case.sinks())


@settings(max_examples=examples(60))
@given(cases(), KEPT)
def test_every_row_is_attention_over_its_own_text(case: Case, kept: torch.dtype) -> None:
    data = make(case).kept_in(kept)
    expected, used = by_hand(case, data), is_used(data)
    found = attend(case, data)
    assert found.shape == data.query.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found[used], expected[used])


@settings(max_examples=examples(60))
@given(cases(), KEPT)
def test_only_the_new_tokens_are_written(case: Case, dtype: torch.dtype) -> None:
    data = make(case).kept_in(dtype)
    expected, kept = written_by_hand(case, data), kept_positions(data.places, case.block)
    attended, stored = data.clone(), data.clone()
    found = attend(case, attended)
    store_keys_values(stored.new, stored.buffers, stored.places)
    for buffers in (attended.buffers, stored.buffers):
        for got, wanted in zip(buffers, expected, strict=True):
            got, wanted = (one.float().transpose(1, 2)[kept] for one in (got, wanted))
            torch.testing.assert_close(got, wanted, equal_nan=True, atol=0, rtol=0)
    # What is there already is read all the same.
    options: dict[str, Any] = {"scale": 0.3, "window": case.window, "sinks": case.sinks()}
    again = slot_attention(data.query, None, stored.buffers, data.places, **options)
    assert torch.equal(again, found)


@settings(max_examples=examples(60))
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_fp8_keeps_the_nearest_number_that_it_has(numbers: list[float]) -> None:
    """Of all 253, each sign of 0 for itself; NaN stays."""
    known = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    known = known[known.isfinite()].double()
    given = torch.tensor(numbers)
    found = as_kept(given, FP8).double()
    assert torch.equal(found.isnan(), given.isnan())
    real = ~given.isnan()
    aimed = given[real].double().clamp(-448, 448)
    nearest = (aimed[:, None] - known).abs().amin(1)
    assert torch.equal((aimed - found[real]).abs(), nearest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_keeps_large_keys_as_its_largest_number(dtype: torch.dtype) -> None:
    data = make(Case(1, 2, 8, 9, 4, [Span(1, 2, 3)])).kept_in(FP8)
    new = KeyValues(*((1e4 * states).to(dtype) for states in data.new))
    store_keys_values(new, data.buffers, data.places)
    kept = data.buffers.keys[data.places.tables[1, 0], 0, 2].float()
    assert torch.equal(kept, 448 * new.keys[0, 0].float().sign())


def test_the_sink_takes_what_does_not_fit() -> None:
    case = Case(1, 1, 4, max_length=5, block=2, spans=[Span(2, 4, 3)])
    data = make(case)
    attend(case, data)
    first, last = (data.places.tables[2, at] for at in (4 // 2, 5 // 2))
    assert torch.equal(data.buffers.keys[first, :, 0], data.new.keys[0])
    sink = data.buffers.keys[last, 0, 1]
    assert any(torch.equal(sink, data.new.keys[token, 0]) for token in (1, 2))


def test_pieces_of_a_text_are_the_text() -> None:
    """However it is cut, and whatever order the pieces stand in."""
    whole = Case(2, 2, 8, max_length=30, block=4, spans=[Span(1, 3, 17)])
    data = make(whole)
    expected = attend(whole, data.clone())
    order = [12, 13, 14, 15, 16, *range(12)]
    moved = make(whole._replace(spans=[Span(1, 15, 5), Span(1, 3, 10), Span(1, 13, 2)]))
    new = KeyValues(*(states[order] for states in data.new))
    found = attend(whole, Data(data.query[order], new, data.buffers, moved.places))
    torch.testing.assert_close(found, expected[order])


def test_blocks_that_follow_one_another_give_the_same() -> None:
    """Few queries are then multiplied with the keys where they lie."""
    spans = [Span(1, 17, 4), Span(0, 3, 1), Span(2, 8, 8)]
    case = Case(2, 2, 8, max_length=30, block=8, spans=spans)
    data = make(case)
    anywhere = data.places.tables
    in_order = torch.arange(anywhere.numel(), dtype=torch.int32).view(anywhere.shape)
    moved = [torch.empty_like(buffer) for buffer in data.buffers]
    for buffer, before in zip(moved, data.buffers, strict=True):
        buffer[in_order] = before[anywhere]
    placed = replace(data.places, tables=in_order)
    found = attend(case, data._replace(buffers=KeyValues(*moved), places=placed))
    torch.testing.assert_close(found, attend(case, data))


def test_width_and_view_change_nothing() -> None:
    case = Case(2, 2, 8, max_length=30, block=4, spans=[Span(1, 3, 4), Span(0, 20, 4)])
    data = make(case)
    expected = attend(case, data.clone())
    told = data._replace(places=replace(data.places, width=4, view=24))
    assert torch.equal(attend(case, told), expected)


def test_a_line_without_tokens() -> None:
    case = Case(2, 2, 8, max_length=9, block=4, spans=[])
    assert attend(case, make(case)).shape == (0, 4, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_full(dtype: torch.dtype) -> None:
    case = Case(2, 2, 16, max_length=40, block=8, spans=[Span(1, 37, 3), Span(0, 5, 3)])
    data = make(case).to(dtype)
    found = attend(case, data.clone())
    assert found.dtype == dtype
    expected = attend(case, data.to(torch.float32))
    assert torch.equal(found, expected.to(dtype))


def test_shapes_that_do_not_fit_are_named() -> None:
    query, new, buffers, places = make(Case(2, 2, 4, max_length=9, block=4, spans=[Span(1, 5, 3)]))
    with pytest.raises(ConfigError, match="query"):
        slot_attention(query[:, :3], new, buffers, places, scale=1.0)
    with pytest.raises(ConfigError, match="query"):
        slot_attention(query.unsqueeze(0), new, buffers, places, scale=1.0)
    short = KeyValues(new.keys, new.values[:2])
    with pytest.raises(ConfigError, match="new"):
        slot_attention(query, short, buffers, places, scale=1.0)
    cut = KeyValues(buffers.keys[:, :, 1:], buffers.values[:, :, 1:])
    with pytest.raises(ConfigError, match="contiguous"):
        slot_attention(query, new, cut, places, scale=1.0)
    with pytest.raises(ConfigError, match=r"window=Window\(size=0, .*\): must be at least 1"):
        slot_attention(query, new, buffers, places, scale=1.0, window=Window(0))
    with pytest.raises(ConfigError, match=r"sinks=\(2,\): must be \[4\]"):
        slot_attention(query, new, buffers, places, scale=1.0, sinks=torch.zeros(2))
