"""Packed block heads over KV slots: ``AheadReader``s, whose forwards are CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from guided_spec.models.heads.block.transitions import Transition
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.slot_head import SlotLimits
from guided_spec.models.packed.block_head import PackedBlock, places_of_blocks
from guided_spec.models.packed.blocks import Blocks
from guided_spec.models.packed.graph_pool import (
    ROW_SIZES,
    SIZES,
    CaptureWindow,
    GraphPool,
    Inputs,
    bucket,
    pack_places,
    pad_rows,
    pad_to,
)
from guided_spec.models.packed.packed_lm import LARGEST_GRAPH, UNCAPTURED, Rows
from guided_spec.models.packed.slot_head import HeadSlots, PackedSlotHead, ReadAhead
from guided_spec.ops.slot_attention import SlotPlaces


class BlockForward(Protocol):
    """What a graph holds; nothing in it waits for the device.

    vocabulary: what the logits score; None: the target's own tokens. transition: how a place
    depends on the one before; None: it does not.
    """

    @property
    def vocabulary(self) -> DraftVocabulary | None: ...
    @property
    def transition(self) -> Transition | None: ...
    def outputs(self, slots: Tensor, starts: Tensor, last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the places behind ``last``, which stand at ``starts``.

        All int64 [R] on the device; slot -1: an unused row.
        """
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D]."""
        ...


class BlockRows(NamedTuple):
    """slots, starts: of R texts, and where their last tokens stand. last: int64 [R] on the
    device, these tokens."""

    slots: Sequence[int]
    starts: Sequence[int]
    last: Tensor


class BlockGraphs:
    """The blocks of a head, each by one graph. num_slots: rows of a batch at most."""

    def __init__(self, graphs: GraphPool, forward: BlockForward, num_slots: int) -> None:
        self._graphs, self._forward = graphs, forward
        most = bucket(num_slots, ROW_SIZES)
        self._row_sizes = [size for size in reversed(ROW_SIZES) if size <= most]

    def outputs(self, rows: BlockRows, width: int) -> Tensor:
        """[R, width, H]; on CUDA the next graph overwrites them."""
        size = bucket(len(rows.slots), ROW_SIZES)
        inputs = {
            "places": pack_places((rows.slots, rows.starts), size),
            "last": pad_rows(rows.last, size),
        }
        key = (width, size) if has_graph(size, width) else None
        found: Tensor = self._graphs.run(key, inputs, partial(self._compute, width))
        return found[: len(rows.slots)]

    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of ``outputs``."""
        for size in self._row_sizes:
            inputs = {
                "places": pack_places([[], []], size),
                "last": torch.zeros(size, dtype=torch.int64),
            }
            key = (width, size) if has_graph(size, width) else None
            if self._graphs.prepare(key, inputs, partial(self._compute, width)):
                yield

    def _compute(self, width: int, inputs: Inputs) -> Tensor:
        slots, starts = inputs["places"].unbind(0)
        return self._forward.outputs(slots, starts, inputs["last"], width)


def has_graph(size: int, width: int) -> bool:
    """Whether ``size`` blocks are few enough tokens: more take longer than their launches."""
    return size * (width + 1) <= LARGEST_GRAPH


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
        self.transition, self.vocabulary = head.transition, head.vocabulary
        self.max_length, self.width = limits.max_length, head.layout.width
        self.size = head.hidden_size
        self.slots = HeadSlots(head.config, limits, device=device, dtype=dtype, blocks=blocks)
        self.length, self.release = self.slots.length, self.slots.release
        self.adopt, self.copy_slot = self.slots.adopt, self.slots.copy_slot
        self.commit, self.can_read_ahead = self.slots.commit, self.slots.can_read_ahead
        self.graphs = GraphPool(device, window)
        self.drafts = BlockGraphs(self.graphs, self, limits.num_slots)

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """See ``HeadRunner``."""
        del tokens
        for line in self.slots.lines(slots, [len(row) for row in states]):
            self._read_rows(line.rows, line.of(states))

    @torch.inference_mode()
    def read_ahead(self, new: ReadAhead) -> None:
        """See ``PackedSlotHead``."""
        rows = new.rows(self.slots)
        index = torch.from_numpy(rows.places_in(new.token_ids.shape[1]))
        index = index.to(self._device, non_blocking=True)
        self._read_rows(rows, new.states.flatten(0, 1)[index])

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """See ``BlockReader``; on CUDA the next forward overwrites it."""
        return self.drafts.outputs(self.rows(slots, last, width), width)

    def outputs(self, slots: Tensor, starts: Tensor, last: Tensor, width: int) -> Tensor:
        """See ``BlockForward``."""
        count = self._packed.places_for(width)
        places = places_of_blocks(slots, starts, count, self.slots.blocks)
        return self._packed.draft(last, width, places, self.slots.memory)

    def logits(self, outputs: Tensor) -> Tensor:
        """See ``BlockReader``."""
        return self._packed.head.logits(outputs)

    @torch.inference_mode()
    def capture(self, width: int) -> Iterator[None]:
        """See ``AheadReader``."""
        columns = self._packed.head.fc.in_features
        for size in (*UNCAPTURED, *reversed(SIZES)):
            inputs = {
                "states": torch.zeros(size, columns, dtype=self._dtype),
                "places": torch.from_numpy(Rows((), (), ()).places(size, 0)),
            }
            key = ("read", size) if size <= LARGEST_GRAPH else None
            if self.graphs.prepare(key, inputs, self._read):
                yield
        yield from self.drafts.capture(width)

    def rows(self, slots: Sequence[int], last: Tensor, width: int) -> BlockRows:
        """See ``AheadReader``."""
        starts, count = self.slots.lengths(slots), self._packed.places_for(width)
        Rows(slots, starts, [count] * len(slots)).grow(self.slots.blocks)
        return BlockRows(slots, starts, last)

    def _read_rows(self, rows: Rows, states: Tensor) -> None:
        """Positions in one line, and the states [N, X] there."""
        rows.grow(self.slots.blocks)
        size = bucket(len(states))
        places = rows.places(size, len(rows.slots))[: 2 * size]
        inputs = {
            "states": pad_to(states, (size, states.shape[1])),
            "places": torch.from_numpy(places),
        }
        self.graphs.run(("read", size) if size <= LARGEST_GRAPH else None, inputs, self._read)

    def _read(self, inputs: Inputs) -> None:
        tokens, blocks = inputs["places"].view(2, -1), self.slots.blocks
        nobody = tokens.new_empty(3, 0)  # attends
        places = SlotPlaces(tokens, nobody, blocks.tables, blocks.max_length)
        self._packed.read(inputs["states"].to(self._dtype), places, self.slots.memory)


class PackedMaskedReader:
    """What ``MaskedReader`` is, over a packed ``head``. width: tokens of a draft at most.

    Raises ModelError for a head that has nothing to put at the places behind a text.
    """

    transition = None

    def __init__(self, head: Eagle3Head, slots: PackedSlotHead, width: int) -> None:
        self._head, self._masks, self.vocabulary = head, head.masks(), head.vocabulary
        self.width, self.size, self.max_length = width, head.hidden_size, slots.max_length
        self.slots, self.graphs = slots, slots.graphs
        self.length, self.release = slots.length, slots.release
        self.adopt, self.read = slots.adopt, slots.read
        self.copy_slot, self.commit = slots.copy_slot, slots.commit
        self.can_read_ahead, self.read_ahead = slots.can_read_ahead, slots.read_ahead
        self.drafts = BlockGraphs(self.graphs, self, slots.num_slots)

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """See ``BlockReader``; on CUDA the next forward overwrites it."""
        return self.drafts.outputs(self.rows(slots, last, width), width)

    def outputs(self, slots: Tensor, starts: Tensor, last: Tensor, width: int) -> Tensor:
        """See ``BlockForward``; the last token has been read already."""
        del last
        count = width - 1
        token_ids = slots.new_full((len(slots), count), self._masks.token_id)
        hidden = self._masks.hidden.expand(*token_ids.shape, -1)
        places = places_of_blocks(slots, starts, count, self.slots.slots.blocks)
        return self.slots.masked(slots, token_ids, hidden, places)

    def logits(self, outputs: Tensor) -> Tensor:
        """See ``BlockReader``."""
        return self._head.logits(outputs)

    def capture(self, width: int) -> Iterator[None]:
        """See ``AheadReader``."""
        yield from self.slots.capture_reads()
        yield from self.drafts.capture(width)

    def rows(self, slots: Sequence[int], last: Tensor, width: int) -> BlockRows:
        """See ``AheadReader``."""
        starts = self.slots.slots.lengths(slots)
        Rows(slots, starts, [width - 1] * len(slots)).grow(self.slots.slots.blocks)
        return BlockRows(slots, starts, last)
