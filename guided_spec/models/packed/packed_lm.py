"""A decoder over blocks of keys and values: the tokens of a step in one line, by few CUDA graphs.

A forward has a graph for its number of tokens, whatever rows these are in, so that all graphs there
are can be captured before the first step. Forwards of more tokens than any graph has run as they
are: their launches take less time than their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.packed.blocks import BLOCK, SharedPrefix, Tables, index_over
from guided_spec.models.packed.decoder import LayerStates, PackedDecoder
from guided_spec.models.packed.graph_pool import GraphPool, Inputs, bucket, pad_to, upload
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.stock.decoder import StockDecoder
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput
from guided_spec.ops.attention.flash_attention import LEAST_WIDTH
from guided_spec.ops.attention.slot_attention import (
    NONE_AHEAD,
    Ahead,
    KeyValues,
    SharedPositions,
    SlotIndex,
)
from guided_spec.ops.delta_rule import DeltaStates
from guided_spec.ops.host import to_device

# Groups of texts that share a prefix, in a forward of so many tokens that reads prefixes once.
# Where fewer positions of a layer are saved, launches for it take longer than reading them again.
MOST_GROUPS = 8
SHARED_FROM = 8
WORTH_SHARING = 16_384
FEW = 128  # tokens of a forward that takes hardly longer than one of a token


class Rows(NamedTuple):
    """Where the rows of one forward go, [B] on the host each: see ``SlotInputs``.

    One line has the rows' own tokens, ``counts`` of each; each row is in a slot of its own.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]

    def spread(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N]: of [B], each row's value for each of its tokens."""
        spread: NDArray[np.int64] = np.repeat(values, self.counts)
        return spread

    def token_index(self, width: int) -> NDArray[np.int64]:
        """[N] the indices of the tokens in rows of ``width``."""
        found: NDArray[np.int64] = self.spread(np.arange(len(self.counts)) * width) + self.steps()
        return found

    def steps(self) -> NDArray[np.int64]:
        """Which of its row each token is, [N]."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        return np.arange(sum(self.counts)) - self.spread(ends - self.counts)

    def padded(self, width: int) -> NDArray[np.int64]:
        """[B, width]: where each token of such rows is in the line, any value after a row's end."""
        counts = np.array(self.counts, dtype=np.int64)
        first = np.cumsum(counts) - counts
        steps = np.minimum(np.arange(width), np.maximum(counts - 1, 0)[:, None])
        last = max(int(counts.sum()) - 1, 0)
        found: NDArray[np.int64] = np.minimum(first[:, None] + steps, last)
        return found

    def packed_index(self, size: int, num_rows: int) -> NDArray[np.int64]:
        """``SlotIndex.tokens`` and ``rows``, concatenated, [2 * size + 3 * num_rows].

        size, num_rows: of the graph; entries after the tokens and rows of these are unused.
        """
        counts = np.array(self.counts, dtype=np.int64)
        total, batch = int(counts.sum()), len(counts)
        index = np.zeros(2 * size + 3 * num_rows, dtype=np.int64)
        index[:size] = -1
        index[:total] = self.spread(np.array(self.slots))
        index[size : size + total] = self.spread(np.array(self.starts)) + self.steps()
        rows = index[2 * size :].reshape(3, num_rows)
        rows[0], rows[2] = -1, total
        rows[0, :batch], rows[1, :batch] = self.slots, self.starts
        rows[2, :batch] = np.cumsum(counts)
        return index

    def shared_prefixes(self, tables: Tables) -> tuple[SharedPrefix, ...]:
        """Groups of slots whose rows all start after the slots' shared prefix; if it pays."""
        starts: dict[int, int] = {}
        for slot, start, count in zip(*self, strict=True):
            if slot >= 0 and count > 0:
                starts[slot] = min(start, starts.get(slot, start))
        found = (
            SharedPrefix(slots, min([length, *(starts[slot] // BLOCK * BLOCK for slot in slots)]))
            for slots, length in tables.shared_prefixes(starts)
        )
        groups = sorted(found, key=lambda group: -group.num_saved)[:MOST_GROUPS]
        is_worth_it = sum(group.num_saved for group in groups) >= WORTH_SHARING
        return tuple(groups) if is_worth_it else ()

    def shared(self, size: int, groups: Sequence[SharedPrefix]) -> NDArray[np.int64]:
        """``SharedPositions`` for ``size`` tokens and ``MOST_GROUPS`` groups at most, flat."""
        of_slot = {slot: at for at, group in enumerate(groups) for slot in group.slots}
        of_token = np.full(size, len(groups))
        of_row = np.array([of_slot.get(slot, len(groups)) for slot in self.slots], dtype=np.int64)
        of_token[: sum(self.counts)] = self.spread(of_row)
        order = np.argsort(of_token, kind="stable")
        described = np.zeros((3, MOST_GROUPS), dtype=np.int64)
        described[2] = np.searchsorted(of_token[order], np.arange(MOST_GROUPS), side="right")
        described[2, len(groups) :] = (of_token < len(groups)).sum()
        for at, group in enumerate(groups):
            described[:2, at] = group.slots[0], group.length
        return np.concatenate([order, np.argsort(order), described.flatten()])

    def fit(self, max_length: int) -> bool:
        """Whether no token is beyond the positions of a slot."""
        pairs = zip(self.starts, self.counts, strict=True)
        return all(start + count <= max_length for start, count in pairs)

    def grow(self, tables: Tables) -> None:
        """Give every slot blocks for its row, and bring the tables up to date.

        Raises ModelError where none are free.
        """
        starts, counts = (np.array(one, dtype=np.int64) for one in (self.starts, self.counts))
        ends = np.where(counts > 0, starts + counts, 0)
        if not tables.holds(self.slots, ends):
            for slot, end in zip(self.slots, ends.tolist(), strict=True):
                if not tables.grow(slot, end):
                    raise ModelError(f"slot {slot}: no blocks are free for {end} positions")
        tables.upload()


def split_index(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``SlotIndex.tokens`` and ``rows`` of a ``Rows.packed_index`` of ``size`` tokens."""
    tokens, rows = index.split([2 * size, len(index) - 2 * size])
    return tokens.view(2, size), rows.view(3, -1)


class LineShape(NamedTuple):
    """The capacity of a forward; one of few, since kernels are compiled for each.

    size, num_rows: tokens and rows, some of which may be unused. width: as of ``SlotIndex``.
    num_groups: of texts that share a prefix.
    """

    size: int
    num_rows: int
    width: int
    num_groups: int = 0

    @classmethod
    def of(
        cls,
        total: int,
        batch: int,
        capacity: tuple[int, int],
        sizes: Sequence[int],
        *,
        num_groups: int = 0,
    ) -> LineShape:
        """For ``total`` tokens in ``batch`` rows, and so many groups.

        capacity: the number of slots, and about how many tokens a row of a draft has. Where there
        are more tokens than all drafts have, most of them are of prompts, whose rows are long.
        sizes: of the graphs.
        """
        num_slots, width = capacity
        size = bucket(max(total, 1), sizes)
        # With groups as many as there may be: each number is a kernel to compile beforehand.
        num_rows = max(num_slots if num_groups else min(size, num_slots), batch)
        width = min(width, size) if size <= num_slots * width else size
        return cls(size, num_rows, width, MOST_GROUPS if num_groups else 0)

    @property
    def is_long(self) -> bool:
        """Whether it is computed as long rows are, which must fit their slots."""
        return self.width >= LEAST_WIDTH


class ForwardKind(NamedTuple):
    """What a forward computes, besides its inputs.

    width: of ``LineShape``. layers: whose hidden states are kept. fits: see ``index_over``.
    records: the experts of its tokens, where there are any. Graphs always do: a request that asks
        for them comes when all are captured, and they are one small copy.
    deepens, ahead: of pictures, see ``SlotAxes`` and ``SlotSpans``.
    """

    width: int
    layers: tuple[int, ...]
    fits: bool
    records: bool = False
    deepens: bool = False
    ahead: Ahead = NONE_AHEAD


class LineOutput(NamedTuple):
    """What a forward gave for tokens in one line; the next one overwrites it on CUDA.

    states: [N, H], what the output head takes. hidden_states: [N, len(layers) * H], None for none.
    """

    states: Tensor
    hidden_states: Tensor | None


class PackedLM:
    """A decoder over blocks of keys and values, by CUDA graphs where these fit.

    decoder: packed where the model is llama-like, else the stock one.
    memory: the layers' blocks, or states, which must stay where they are. tables: which slot has
        which blocks.
    width: about how many tokens a row has, where graphs are captured.
    graphs: None runs without. spans: see ``CausalLM``.
    """

    def __init__(
        self,
        decoder: PackedDecoder | StockDecoder,
        memory: Sequence[LayerStates],
        tables: Tables,
        *,
        width: int = 1,
        graphs: GraphPool | None = None,
        spans: SlotSpans | None = None,
    ) -> None:
        self._decoder, self._spans = decoder, spans
        self.memory = tuple(memory)
        self.key_values = tuple(one for one in memory if isinstance(one, KeyValues))
        self.states = tuple(one for one in memory if isinstance(one, DeltaStates))
        self._tables, self._graphs = tables, graphs
        self._capacity = (len(tables.tables), width)
        self._device = tables.tables.device

    @property
    def runs_as(self) -> str:
        """What computes, in words."""
        return self._decoder.runs_as

    @property
    def expert_layers(self) -> ExpertLayers:
        """See ``CausalLM``."""
        return self._decoder.expert_layers

    def forward_line(
        self,
        token_ids: Tensor,
        rows: Rows,
        layers: tuple[int, ...] = (),
        overlapped: Callable[[], None] | None = None,
        recorder: ExpertRecorder | None = None,
    ) -> LineOutput:
        """Feed tokens int64 [N], those of ``rows`` in turn; nothing waits for the device.

        token_ids: on the device or the host. layers, recorder: as of ``CausalLM.forward``; what is
        recorded is overwritten as the output is. overlapped: as of ``GraphPool.run``; without a
        graph it is left to be called later.

        Raises ModelError where no blocks are free for the rows.
        """
        rows.grow(self._tables)
        total, batch, groups = len(token_ids), len(rows.slots), tuple[SharedPrefix, ...]()
        if self._graphs is None:
            shape = LineShape(max(total, 1), batch, max(rows.counts))
        else:
            may_share = total >= SHARED_FROM and self._decoder.reads_groups
            groups = rows.shared_prefixes(self._tables) if may_share else ()
            limits = (total, batch, self._capacity, self._graphs.sizes)
            shape = LineShape.of(*limits, num_groups=len(groups))
        inputs = {
            "token_ids": pad_to(token_ids, (shape.size,)),
            "index": torch.from_numpy(rows.packed_index(shape.size, shape.num_rows)),
        }
        if groups:
            inputs["shared"] = torch.from_numpy(rows.shared(shape.size, groups))
        kind = self._kind(shape, layers, rows)
        key = (shape, layers) if kind.records else None
        if recorder is not None:
            kind = kind._replace(records=True)
        body = partial(self._compute, kind)
        if self._graphs is None:
            states, hidden, experts = body(upload(inputs, self._device))
        else:
            states, hidden, experts = self._graphs.run(key, inputs, body, overlapped=overlapped)
        kept = max(total, 1)  # rows of no tokens ask for some all the same
        if recorder is not None and experts is not None:
            recorder.rows = experts[:kept]
        return LineOutput(states[:kept], None if hidden is None else hidden[:kept])

    def _kind(self, shape: LineShape, layers: tuple[int, ...], rows: Rows) -> ForwardKind:
        """What is computed for the rows; it records where it has a graph."""
        fits = shape.is_long and rows.fit(self._tables.max_length)
        axes = self._tables.axes
        # Few forwards read pictures: they run launch by launch, and no graph adds zeros.
        deepens = axes is not None and axes.deepens(rows.slots, rows.starts)
        ahead = NONE_AHEAD if self._spans is None else self._spans.fed(*rows)
        is_alike = fits == shape.is_long and not (deepens or ahead.spans)
        has_graph = self._graphs is not None and self._graphs.has(shape.size) and is_alike
        return ForwardKind(shape.width, layers, fits, has_graph, deepens, ahead)

    def forward(
        self,
        inputs: SlotInputs,
        logits: LogitsKind,
        layers: tuple[int, ...] = (),
        recorder: ExpertRecorder | None = None,
    ) -> SlotOutput:
        """``forward_line`` of the rows' own tokens; see ``CausalLM.forward``."""
        token_ids, slots, starts, counts = inputs
        width = token_ids.shape[1]
        rows = Rows(slots, starts, [min(count, width) for count in counts])
        index = to_device(rows.token_index(width), token_ids.device)
        line, scores = (token_ids.flatten()[index], rows, layers, None, recorder), None
        states, hidden = self.forward_line(*line)
        if recorder is not None and recorder.rows is not None:
            padded = to_device(rows.padded(width).flatten(), self._device)
            recorder.rows = recorder.rows[padded]
        if logits == "last":
            last = to_device(np.maximum(np.cumsum(rows.counts) - 1, 0), self._device)
            scores = self.logits(states[last]).unsqueeze(1)
        if logits == "all" or hidden is not None:
            spread = to_device(rows.padded(width), self._device)
            scores = self.logits(states)[spread] if logits == "all" else scores
            hidden = None if hidden is None else hidden[spread]
        return SlotOutput(scores, hidden)

    def logits(self, states: Tensor) -> Tensor:
        """``LineOutput.states`` [..., H] to logits [..., V]."""
        return self._decoder.logits(states)

    def capture(self, layers: tuple[int, ...]) -> Iterator[None]:
        """Capture the graphs of forwards of any size that has one, one at each ``next``.

        The largest come first: the others then find their memory. Those that have none run once.
        """
        if self._graphs is None:
            return
        none, graphs = Rows((), (), ()), self._graphs
        sizes = (*graphs.beyond, *reversed(graphs.sizes))
        for size, num_groups in product(sizes, (0, MOST_GROUPS)):
            if num_groups and not (size >= SHARED_FROM and self._decoder.reads_groups):
                continue
            shape = LineShape.of(size, 0, self._capacity, graphs.sizes, num_groups=num_groups)
            inputs = {
                "token_ids": torch.zeros(size, dtype=torch.int64),
                "index": torch.from_numpy(none.packed_index(size, shape.num_rows)),
            }
            if num_groups:
                inputs["shared"] = torch.from_numpy(none.shared(size, ()))
            key = (shape, layers) if graphs.has(size) else None
            kind = ForwardKind(shape.width, layers, shape.is_long, records=key is not None)
            body, kinds = partial(self._compute, kind), partial(self._launch_kinds, kind)
            if graphs.prepare(key, inputs, body, kinds=kinds):
                yield

    def forward_seconds(self, layers: tuple[int, ...]) -> dict[int, float]:
        """Seconds by tokens, see ``CausalLM.forward_seconds``; small sizes are nearly equal."""
        if self._graphs is None:
            return {}
        timed = [size for size in self._graphs.sizes if size > FEW or size.bit_count() == 1]
        shapes = [LineShape.of(size, 0, self._capacity, self._graphs.sizes) for size in timed]
        found = {shape.size: self._graphs.seconds((shape, layers)) for shape in shapes}
        return {size: seconds for size, seconds in found.items() if seconds is not None}

    def _compute(
        self, kind: ForwardKind, inputs: Inputs
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """States, hidden states, and the ``ExpertRecorder.rows`` where any are recorded."""
        recorder = self._recorder() if kind.records else None
        fed = inputs["token_ids"], self._where(kind, inputs), self.memory, kind.layers
        output = self._decoder.forward(*fed, deepens=kind.deepens, recorder=recorder)
        return output.states, output.hidden_states, None if recorder is None else recorder.rows

    def _launch_kinds(self, kind: ForwardKind, inputs: Inputs) -> None:
        """Launch each kernel of such a ``_compute`` once, so that it is compiled."""
        recorder = self._recorder() if kind.records else None
        fed = inputs["token_ids"], self._where(kind, inputs), self.memory, kind.layers
        self._decoder.launch_kinds(*fed, recorder=recorder)

    def _recorder(self) -> ExpertRecorder | None:
        return ExpertRecorder(self.expert_layers) if self.expert_layers else None

    def _where(self, kind: ForwardKind, inputs: Inputs) -> SlotIndex:
        size = len(inputs["token_ids"])
        index, shared = split_index(inputs["index"], size), None
        if "shared" in inputs:
            shared = SharedPositions(*split_index(inputs["shared"], size))
        fed, fits, ahead = (*index, kind.width), kind.fits, kind.ahead
        return index_over(self._tables, *fed, shared=shared, fits=fits, ahead=ahead)
