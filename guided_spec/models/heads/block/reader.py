"""Reads verified tokens for a block head, and computes the block after them.

``ContextReader`` is for heads that see the target's hidden states as keys and values, over the
target's tables, and ``MaskedReader`` for P-EAGLE, whose equations are in
``guided_spec.models.heads.eagle``. Their packed forms are ``AheadReader``s, whose forwards are CUDA
graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from guided_spec.models.heads.block.model import BlockContext, BlockHead
from guided_spec.models.heads.block.transitions import BlockPlanner, Transition
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.packed.blocks import BLOCK, Blocks, KeptShape, index_over
from guided_spec.models.packed.graph_pool import (
    ROW_SIZES,
    CaptureWindow,
    GraphPool,
    Inputs,
    bucket,
    pack_index,
    pad_rows,
    pad_to,
    row_sizes,
)
from guided_spec.models.packed.heads import PackedBlock, index_of_blocks
from guided_spec.models.packed.packed_lm import Rows, split_index
from guided_spec.models.packed.slot_head import HeadLine, HeadSlots, PackedSlotHead, ReadAhead
from guided_spec.ops.attention.slot_attention import KeyValues, store_keys_values
from guided_spec.ops.host import to_device


class BlockReader(Protocol):
    """Reads verified tokens, and computes the positions after them; see ``HeadRunner``.

    max_length: tokens of a text. width: tokens of a whole block. size: H, of its outputs.
    transition: how a position depends on the one before; None: it does not. planner: what looks at
    a block as a whole, if anything does. ahead: the reader itself, where its forwards are graphs;
    None where they are not.
    """

    @property
    def max_length(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transition(self) -> Transition | None: ...
    @property
    def planner(self) -> BlockPlanner | None: ...
    @property
    def ahead(self) -> AheadReader | None: ...
    def length(self, slot: int) -> int: ...
    def release(self, slots: Sequence[int]) -> None: ...
    def adopt(self, slot: int) -> None: ...
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None: ...
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None: ...
    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the positions after ``last``, int64 [R]; nothing is kept."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each position by itself."""
        ...


class AheadReader(BlockReader, Protocol):
    """A reader whose forwards are graphs; see ``PackedSlotHead``."""

    @property
    def graphs(self) -> GraphPool: ...
    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool: ...
    def read_ahead(self, new: ReadAhead) -> None: ...
    def commit(self, slot: int, count: int) -> None: ...
    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of reading, and of blocks of ``width`` positions."""
        ...

    def starts(self, slots: Sequence[int], width: int) -> list[int]:
        """[R]: the positions of the texts' last tokens; their slots then have blocks for ``width``
        more."""
        ...

    def outputs(self, slots: Tensor, starts: Tensor, last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the positions after ``last``, tokens at ``starts``.

        All int64 [R] on the device; slot -1: an unused row. For a graph: nothing waits.
        """
        ...


class ContextReader:
    """A ``BlockReader``, launch by launch. blocks: see ``HeadSlots``."""

    ahead = None

    def __init__(
        self,
        head: BlockHead,
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
    ) -> None:
        self.head, self.max_length = head, limits.max_length
        self.width, self.size = head.layout.width, head.hidden_size
        self.transition, self.planner = head.transition, head.planner
        self._device, self._dtype = device, dtype
        where: Any = {"device": device, "dtype": dtype, "blocks": blocks}
        self.slots = HeadSlots(KeptShape.of_layers(head.config), limits, **where)
        self.length, self.release = self.slots.length, self.slots.release
        self.adopt, self.copy_slot = self.slots.adopt, self.slots.copy_slot

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens by their hidden states; see ``HeadRunner``."""
        del tokens
        for line in self.slots.lines(slots, [len(row) for row in states]):
            self._read_line(line, line.of(states))

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each position by itself."""
        return self.head.logits(outputs)

    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the positions after ``last``; see ``BlockReader``."""
        blocks, lengths = self.slots.blocks, self.slots.lengths(slots)
        blocks.upload()
        index, length = to_device([[*slots], lengths], self._device)
        longest = max(lengths)
        tables = blocks.tables[index, : -(-longest // BLOCK)].long()
        held = torch.arange(longest, device=self._device) < length.unsqueeze(1)
        layers = [
            KeyValues(*(_gather(buffer, tables, held) for buffer in kept))
            for kept in self.slots.memory
        ]
        outputs: Tensor = self.head(last, width, BlockContext(layers, length))
        return outputs

    def _read_line(self, line: HeadLine, states: Tensor) -> None:
        rows, count, blocks = line.rows, len(states), self.slots.blocks
        rows.grow(blocks)
        found = to_device(rows.packed_index(count, len(rows.slots)), self._device)
        of_tokens, of_rows = split_index(found, count)
        index = index_over(blocks, of_tokens, of_rows)
        features = self.head.features(states.to(self._device, self._dtype))
        made = self.head.context(features, of_tokens[1])
        for new, kept in zip(made, self.slots.memory, strict=True):
            store_keys_values(new, kept, index)


def _gather(buffer: Tensor, tables: Tensor, held: Tensor) -> Tensor:
    """[R, Hkv, L, D]: the positions ``held``, bool [R, L], of rows of blocks, int64 [R, P].

    Zeros elsewhere: there may be anything, even what is no number.
    """
    found = buffer[tables].transpose(1, 2).flatten(2, 3)[:, :, : held.shape[1]]
    return found.masked_fill(~held[:, None, :, None], 0)


class MaskedReader:
    """A ``BlockReader``: masks after the last verified position, all by one forward.

    width: tokens of a draft at most.

    Raises ModelError for a head that has nothing to feed at the positions after a text.
    """

    transition = planner = ahead = None

    def __init__(
        self,
        head: Eagle3Head,
        limits: SlotLimits,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.head, self._masks = head, head.masks()
        self.width, self.size = width, head.hidden_size
        self._slots = SlotHead(head, limits, device=device, dtype=dtype)
        self.max_length = self._slots.max_length
        self.length, self.release = self._slots.length, self._slots.release
        self.adopt, self.read = self._slots.adopt, self._slots.read
        self.copy_slot = self._slots.copy_slot

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each position by itself."""
        return self.head.logits(outputs)

    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] after ``last``, which has been read already."""
        masks = last.new_full((len(slots), width - 1), self._masks.token_id)
        hidden = self._masks.hidden.expand(*masks.shape, -1)
        return self._slots.masked(slots, masks, hidden)


class BlockGraphs:
    """The blocks of a packed head, each by one graph. num_slots: rows of a batch at most."""

    def __init__(self, reader: AheadReader, num_slots: int) -> None:
        self._graphs, self._reader, self._num_slots = reader.graphs, reader, num_slots

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] after ``last``; on CUDA the next graph overwrites them."""
        size = bucket(len(slots), ROW_SIZES)
        inputs = {
            "index": pack_index((slots, self._reader.starts(slots, width)), size),
            "last": pad_rows(last, size),
        }
        key = (width, size) if has_graph(self._graphs, size, width) else None
        found: Tensor = self._graphs.run(key, inputs, partial(self._compute, width))
        return found[: len(slots)]

    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of ``draft``."""
        for size in row_sizes(self._num_slots):
            inputs = {
                "index": pack_index([[], []], size),
                "last": torch.zeros(size, dtype=torch.int64),
            }
            key = (width, size) if has_graph(self._graphs, size, width) else None
            if self._graphs.prepare(key, inputs, partial(self._compute, width)):
                yield

    def _compute(self, width: int, inputs: Inputs) -> Tensor:
        slots, starts = inputs["index"].unbind(0)
        return self._reader.outputs(slots, starts, inputs["last"], width)


def has_graph(graphs: GraphPool, size: int, width: int) -> bool:
    """Whether ``size`` blocks have one: all their tokens go into one forward."""
    return graphs.has(size * (width + 1))


class PackedContextReader:
    """What ``ContextReader`` is, for the heads that ``PackedBlock`` serves.

    blocks: see ``HeadSlots``. window: in which CUDA graphs are captured; None never closes.
    """

    def __init__(
        self,
        packed: PackedBlock,
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
        window: CaptureWindow | None = None,
    ) -> None:
        head = packed.head
        self._packed, self._device, self._dtype = packed, device, dtype
        self.transition, self.planner = head.transition, head.planner
        self.max_length, self.width = limits.max_length, head.layout.width
        self.size = head.hidden_size
        self.slots = HeadSlots(
            KeptShape.of_layers(head.config), limits, device=device, dtype=dtype, blocks=blocks
        )
        self.length, self.release = self.slots.length, self.slots.release
        self.adopt, self.copy_slot = self.slots.adopt, self.slots.copy_slot
        self.commit, self.graphs = (
            self.slots.commit,
            GraphPool(device, window, is_on_side_stream=True),
        )
        self._drafts = BlockGraphs(self, limits.num_slots)
        self.draft = self._drafts.draft

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens of each slot can be read before the host knows them."""
        return self.graphs.has(sum(counts)) and self.slots.fit(slots, counts)

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens by their hidden states; see ``HeadRunner``."""
        del tokens
        for line in self.slots.lines(slots, [len(row) for row in states]):
            self._read_rows(line.rows, line.of(states))

    @torch.inference_mode()
    def read_ahead(self, new: ReadAhead) -> None:
        """Read tokens that the host does not know yet; see ``AheadRunner``."""
        rows = new.rows(self.slots)
        index = to_device(rows.token_index(new.token_ids.shape[1]), self._device)
        self._read_rows(rows, new.states.flatten(0, 1)[index])

    @property
    def ahead(self) -> AheadReader:
        """The reader itself: its forwards are graphs."""
        return self

    def outputs(self, slots: Tensor, starts: Tensor, last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the positions after ``last``; see ``AheadReader``."""
        count = self._packed.positions_for(width)
        index = index_of_blocks(slots, starts, count, self.slots.blocks)
        return self._packed.draft(last, width, index, self.slots.memory)

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each position by itself."""
        return self._packed.head.logits(outputs)

    @torch.inference_mode()
    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of reading, and of blocks of ``width`` positions."""
        columns = self._packed.head.fc.in_features
        for size in (*self.graphs.beyond, *reversed(self.graphs.sizes)):
            inputs = {
                "states": torch.zeros(size, columns, dtype=self._dtype),
                "index": torch.from_numpy(Rows((), (), ()).packed_index(size, 0)),
            }
            key = ("read", size) if self.graphs.has(size) else None
            if self.graphs.prepare(key, inputs, self._read):
                yield
        yield from self._drafts.capture(width)

    def starts(self, slots: Sequence[int], width: int) -> list[int]:
        """[R]: the positions of the texts' last tokens; see ``AheadReader``."""
        return self.slots.starts(slots, self._packed.positions_for(width))

    def _read_rows(self, rows: Rows, states: Tensor) -> None:
        """Positions in one line, and the states [N, X] there."""
        rows.grow(self.slots.blocks)
        size = bucket(len(states), self.graphs.sizes)
        index = rows.packed_index(size, len(rows.slots))[: 2 * size]
        inputs = {
            "states": pad_to(states, (size, states.shape[1])),
            "index": torch.from_numpy(index),
        }
        key = ("read", size) if self.graphs.has(size) else None
        self.graphs.run(key, inputs, self._read)

    def _read(self, inputs: Inputs) -> None:
        tokens, blocks = inputs["index"].view(2, -1), self.slots.blocks
        nobody = tokens.new_empty(3, 0)  # attends
        index = index_over(blocks, tokens, nobody)
        self._packed.read(inputs["states"].to(self._dtype), index, self.slots.memory)


class PackedMaskedReader:
    """What ``MaskedReader`` is, over a packed ``head``. width: tokens of a draft at most.

    Raises ModelError for a head that has nothing to feed at the positions after a text.
    """

    transition = planner = None

    def __init__(self, head: Eagle3Head, slots: PackedSlotHead, width: int) -> None:
        self._head, self._masks = head, head.masks()
        self.width, self.size, self.max_length = width, head.hidden_size, slots.max_length
        self.slots, self.graphs = slots, slots.graphs
        self.length, self.release = slots.length, slots.release
        self.adopt, self.read = slots.adopt, slots.read
        self.copy_slot, self.commit = slots.copy_slot, slots.commit
        self.can_read_ahead, self.read_ahead = slots.can_read_ahead, slots.read_ahead
        self._drafts = BlockGraphs(self, slots.num_slots)
        self.draft = self._drafts.draft

    @property
    def ahead(self) -> AheadReader:
        """The reader itself: its forwards are graphs."""
        return self

    def outputs(self, slots: Tensor, starts: Tensor, last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] after the last token, which has been read already."""
        del last
        count = width - 1
        token_ids = slots.new_full((len(slots), count), self._masks.token_id)
        hidden = self._masks.hidden.expand(*token_ids.shape, -1)
        index = index_of_blocks(slots, starts, count, self.slots.slots.blocks)
        return self.slots.masked(slots, token_ids, hidden, index)

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each position by itself."""
        return self._head.logits(outputs)

    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of reading, and of blocks of ``width`` positions."""
        yield from self.slots.capture_reads()
        yield from self._drafts.capture(width)

    def starts(self, slots: Sequence[int], width: int) -> list[int]:
        """[R]: the positions of the texts' last tokens; see ``AheadReader``."""
        return self.slots.slots.starts(slots, width - 1)
