"""Tokens in one line over slots of blocks: places written out by hand, and drawn cases of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.ops.attention.slot_attention import KeyValues, SharedPositions, SlotIndex, Window

NUM_SLOTS = 4


class Span(NamedTuple):
    """A row: ``length`` tokens of a slot from position ``start`` on; of slot -1 they are unused."""

    slot: int
    start: int
    length: int


class SharedPrefix(NamedTuple):
    """Slots that have their first ``blocks`` blocks in common; all of their rows begin behind."""

    slots: tuple[int, ...]
    blocks: int


class Unused(NamedTuple):
    """What a graph has room for behind its rows."""

    tokens: int = 0
    rows: int = 0


NONE_UNUSED = Unused()


class Case(NamedTuple):
    """One call: shapes, and where each row goes. width: of a head. block: positions."""

    num_kv_heads: int
    group: int
    width: int
    max_length: int
    block: int
    spans: list[Span]
    unused: Unused = NONE_UNUSED
    window: Window | None = None
    has_sinks: bool = False
    alike: tuple[SharedPrefix, ...] = ()

    def sinks(self) -> Tensor | None:
        """Of each head, float32 [Hq]; far below the scores and far above them too."""
        count = self.num_kv_heads * self.group
        return torch.linspace(-4, 4, count) ** 3 if self.has_sinks else None


class Data(NamedTuple):
    """The tensors of a call."""

    query: Tensor
    new: KeyValues
    buffers: KeyValues
    places: SlotIndex

    def clone(self) -> Data:
        """One with buffers of its own."""
        return self._replace(buffers=KeyValues(*(buffer.clone() for buffer in self.buffers)))

    def kept_in(self, dtype: torch.dtype) -> Data:
        """One with buffers of this dtype, what they hold rounded."""
        return self._replace(buffers=KeyValues(*(buffer.to(dtype) for buffer in self.buffers)))

    def to(self, target: torch.device | torch.dtype) -> Data:
        """A copy on a device, or of a dtype; the places have no dtype to change."""
        new = KeyValues(*(states.to(target) for states in self.new))
        buffers = KeyValues(*(buffer.clone().to(target) for buffer in self.buffers))
        places = self.places
        if isinstance(target, torch.device):
            tokens, rows, tables = (places.tokens, places.rows, places.tables)
            shared = places.shared
            if shared is not None:
                shared = SharedPositions(*(part.to(target) for part in shared))
            places = replace(
                places,
                tokens=tokens.to(target),
                rows=rows.to(target),
                tables=tables.to(target),
                shared=shared,
            )
        return Data(self.query.to(target), new, buffers, places)


def make_tables(num_slots: int, max_length: int, block: int) -> Tensor:
    """int32 [num_slots, P] of blocks in any order; block 0 is in no text.

    It takes what is behind the positions of all slots, where these fill whole blocks.
    """
    columns = max_length // block + 1
    order = torch.randperm(num_slots * columns, generator=torch.Generator().manual_seed(1)) + 1
    tables = order.view(num_slots, columns).int()
    if max_length % block == 0:
        tables[:, -1] = 0
    return tables


def places_of(
    spans: Sequence[Span], tables: Tensor, max_length: int, unused: Unused = NONE_UNUSED
) -> SlotIndex:
    """The rows behind one another, on the tables' device."""
    tokens = [(span.slot, span.start + at) for span in spans for at in range(span.length)]
    tokens += [(-1, 0)] * unused.tokens
    rows, end = [], 0
    for slot, start, length in spans:
        end += length
        rows.append((slot, start, end))
    rows += [(-1, 0, end)] * unused.rows
    line = torch.tensor(tokens, dtype=torch.int64).view(-1, 2).T.contiguous()
    columns = torch.tensor(rows, dtype=torch.int64).view(-1, 3).T.contiguous()
    return SlotIndex(line.to(tables.device), columns.to(tables.device), tables, max_length)


def _shared_of(case: Case) -> SharedPositions | None:
    """The groups of a case's tokens, and one that is unused."""
    if not case.alike:
        return None
    slots = [span.slot for span in case.spans for _ in range(span.length)]
    slots += [-1] * case.unused.tokens
    order: list[int] = []
    groups = []
    for group in case.alike:
        order += [at for at, slot in enumerate(slots) if slot in group.slots]
        groups.append((group.slots[0], group.blocks * case.block, len(order)))
    groups.append((-1, 0, len(order)))
    order += [at for at in range(len(slots)) if at not in order]
    places = [order.index(at) for at in range(len(slots))]
    return SharedPositions(torch.tensor([order, places]), torch.tensor(groups).T.contiguous())


def kept_positions(places: SlotIndex, block: int) -> Tensor:
    """Of the blocks, which positions may hold a text: bool [num_blocks, block].

    Not those that take what is behind all positions, where anything may be.
    """
    tables, behind = places.tables, places.max_length
    kept = torch.ones(int(tables.max()) + 1, block, dtype=torch.bool)
    kept[tables[:, behind // block].long(), behind % block] = False
    return kept


def make(case: Case, num_slots: int = NUM_SLOTS) -> Data:
    """Random tensors; NaN where the blocks hold nothing, strides as a model's projections have."""
    torch.manual_seed(0)
    heads, width = case.num_kv_heads, case.width
    count = sum(span.length for span in case.spans) + case.unused.tokens
    packed = torch.randn(count, heads * (case.group + 1), width)
    query, key = packed.split([heads * case.group, heads], 1)
    value = torch.randn(heads, count, width).transpose(0, 1)
    tables = make_tables(num_slots, case.max_length, case.block)
    for slots, blocks in case.alike:
        tables[list(slots), :blocks] = tables[slots[0], :blocks].clone()
    shape = (int(tables.max()) + 1, heads, case.block, width)
    buffers = KeyValues(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    for slot, length in _held(case.spans):
        for at in range(length):
            for buffer in buffers:
                buffer[tables[slot, at // case.block], :, at % case.block] = torch.randn(
                    heads, width
                )
    places = places_of(case.spans, tables, case.max_length, case.unused)
    places = replace(places, shared=_shared_of(case))
    return Data(query, KeyValues(key, value), buffers, places)


def _held(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Each slot that is used, and how much of it was there before its first piece."""
    for slot in {span.slot for span in spans if span.slot >= 0}:
        yield slot, min(span.start for span in spans if span.slot == slot)


@st.composite
def cases(draw: st.DrawFn, longest: int = 20, widths: Sequence[int] = (1, 8, 16)) -> Case:
    """Rows of different slots, of none, and pieces of one text, in any order."""
    max_length = draw(st.integers(1, longest))
    block = draw(st.sampled_from([1, 2, 7, 16, 32, max_length, max_length + 1]))
    spans: list[Span] = []
    for slot in draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, 3))]:
        start = draw(st.integers(0, max_length))
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            length = draw(st.integers(0, 7))
            spans.append(Span(slot, start, length))
            start += length
    alike = draw(_alike(spans, block))
    empty = st.builds(Span, st.just(-1), st.integers(0, max_length), st.integers(0, 2))
    spans = draw(st.permutations([*spans, *draw(st.lists(empty, max_size=2))]))
    return Case(
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        width=draw(st.sampled_from(widths)),
        max_length=max_length,
        block=block,
        spans=spans,
        unused=Unused(draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        window=draw(st.none() | st.builds(Window, st.integers(1, 9), st.booleans())),
        has_sinks=draw(st.booleans()),
        alike=alike,
    )


@st.composite
def _alike(draw: st.DrawFn, spans: Sequence[Span], block: int) -> tuple[SharedPrefix, ...]:
    """Up to two groups of the slots, none of them in both."""
    groups: list[SharedPrefix] = []
    free = {span.slot for span in spans}
    for _ in range(draw(st.integers(0, 2))):
        blocks = draw(st.integers(1, 3))
        held = {slot: min(s.start for s in spans if s.slot == slot) for slot in free}
        behind = sorted(slot for slot, length in held.items() if length >= blocks * block)
        if behind:
            chosen = draw(st.lists(st.sampled_from(behind), min_size=1, unique=True))
            groups.append(SharedPrefix(tuple(chosen), blocks))
            free -= set(chosen)
    return tuple(groups)
