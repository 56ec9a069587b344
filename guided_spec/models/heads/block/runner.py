"""A block head over slots: it reads verified tokens, and drafts by one forward.

``BlockRunner`` keeps the outputs of each slot's block, and drafts from them token by token. A
``BlockReader`` reads the text and computes the block after it: ``ContextReader`` for heads that see
the target's hidden states as keys and values, over the target's tables, and ``MaskedReader`` for
P-EAGLE, whose equations are in ``guided_spec.models.heads.eagle``. Their packed forms are
``AheadReader``s, whose forwards are CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from guided_spec.models.heads.block.model import BlockContext, BlockHead
from guided_spec.models.heads.block.transitions import Transition
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.packed.blocks import BLOCK, Blocks, KeptShape, index_over
from guided_spec.models.packed.draft_forward import DraftForward, Pick
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
    transition: how a position depends on the one before; None: it does not. ahead: the reader
    itself, where its forwards are graphs; None where they are not.
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


class BlockRunner:
    """A ``HeadRunner`` whose drafts are blocks.

    width: tokens of a draft at most; there are no more than the reader's. After the block's last
    position every logit is -inf: a draft is no longer than that. It is an ``AheadRunner`` where
    the reader is an ``AheadReader``.

    transition: as of the reader.
    """

    scores_at_once = True
    sources = None

    @torch.inference_mode()
    def __init__(
        self,
        reader: BlockReader,
        num_slots: int,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._reader, self._ahead, self._device = reader, reader.ahead, device
        self.max_length, self.transition = reader.max_length, reader.transition
        self.width = min(width, reader.width)
        self._depths, self._marks = ([0] * num_slots for _ in range(2))
        # Of each slot's block, where it has been computed since the last read.
        columns = max(self.width, 1)
        self._outputs = torch.zeros(num_slots, columns, reader.size, device=device, dtype=dtype)
        self._is_drafted = [False] * num_slots
        # The last verified token, then, where a position depends on it, the draft.
        self._trail = torch.zeros(num_slots, columns + 1, device=device, dtype=torch.int64)

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._reader.length(slot)

    def depth(self, slot: int) -> int:
        """Draft tokens after the verified ones."""
        return self._depths[slot]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        self._reader.release(slots)
        for slot in slots:
            self._begin_draft(slot)

    def adopt(self, slot: int) -> None:
        """Where nothing was read into the slot: it holds what its blocks hold of another text."""
        self._reader.adopt(slot)

    def mark(self, slots: Sequence[int]) -> None:
        """Save the positions of the slots' drafts for ``rewind``; ``read`` does so too."""
        for slot in slots:
            self._marks[slot] = self._depths[slot]

    def rewind(self, slots: Sequence[int]) -> None:
        """Take the slots' drafts back to their marks."""
        for slot in slots:
            self._depths[slot] = self._marks[slot]

    @torch.inference_mode()
    def append(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Append one draft token, int64 [R], to each slot's draft; the block stays the same."""
        for slot in slots:
            self._depths[slot] += 1
        if self._reader.transition is not None:
            steps = [min(self._depths[slot], self.width) for slot in slots]
            index, step = to_device([[*slots], steps], self._device)
            self._trail[index, step] = token_ids

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens; see ``SlotHead.read``."""
        self._reader.read(slots, tokens, states)
        index, last = to_device([[*slots], [row[-1] for row in tokens]], self._device)
        self._begin_drafts(slots, index, last)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """Copy the text of ``source`` to the other slots; see ``SlotHead.copy_slot``."""
        self._reader.copy_slot(source, destinations)
        self._begin_drafts(destinations, self._index(destinations), self._trail[source, 0])

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens of each slot can be read before the host knows them."""
        return self._ahead is not None and self._ahead.can_read_ahead(slots, counts)

    @torch.inference_mode()
    def read_ahead(self, new: ReadAhead) -> None:
        """Read verified tokens that the host does not know yet; needs ``can_read_ahead``."""
        assert self._ahead is not None
        self._ahead.read_ahead(new)
        ends = new.token_ids.gather(1, new.last.unsqueeze(1)).squeeze(1)
        self._begin_drafts(new.slots, self._index(new.slots), ends.clamp_min(0))

    def commit(self, slot: int, count: int) -> None:
        """The slot holds ``count`` of the tokens that were read ahead; see ``AheadRunner``."""
        assert self._ahead is not None
        self._ahead.commit(slot, count)

    def draft_forward(self, longest: int) -> DraftForward | None:
        """What computes drafts of ``longest`` tokens in one graph; None for more than a block."""
        return self if self._ahead is not None and 0 < longest <= self.width else None

    def capture(self) -> Iterator[None]:
        """Capture the graphs of reading and of blocks, one at each ``next``."""
        if self._ahead is not None:
            yield from self._ahead.capture(self.width)

    @property
    def graphs(self) -> GraphPool:
        """Where drafts are captured; see ``DraftForward``."""
        assert self._ahead is not None
        return self._ahead.graphs

    def has_graph(self, size: int, count: int) -> bool:
        """Whether a draft of ``count`` tokens for ``size`` rows is captured beforehand."""
        assert self._ahead is not None
        return _has_graph(self._ahead.graphs, size, count)

    def begin_draft(self, slots: Sequence[int], count: int) -> Sequence[int]:
        """The starts [R] of a draft of ``count`` tokens, at most ``width`` of them."""
        assert self._ahead is not None
        return self._ahead.starts(slots, count)

    def draft(self, inputs: Inputs, count: int, pick: Pick) -> None:
        """True: one forward scores all positions; see ``DraftForward``."""
        assert self._ahead is not None
        slots, starts, _ = inputs["index"].unbind(0)
        before = self._trail[slots, 0]
        outputs = self._ahead.outputs(slots, starts, before, count)
        for depth, logits in enumerate(self._ahead.logits(outputs).unbind(1)):
            if self._ahead.transition is not None:
                logits = self._ahead.transition.step(logits, outputs[:, depth], before)
            before = pick(depth, logits)

    def end_draft(self, slots: Sequence[int], count: int) -> None:
        """Does nothing: no keys and values of a block are kept."""

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> Tensor:
        """[R, D]: the scores of the token that follows each slot's draft."""
        self._draft_missing(slots)
        depths = [self._depths[slot] for slot in slots]
        most = max(self.width - 1, 0)
        slot, step = to_device([[*slots], [min(depth, most) for depth in depths]], self._device)
        outputs = self._outputs[slot, step]
        scores = self._reader.logits(outputs)
        if (transition := self._reader.transition) is not None:
            scores = transition.step(scores, outputs, self._trail[slot, step])
        if max(depths) >= self.width:
            is_beyond = torch.tensor([depth >= self.width for depth in depths])
            is_beyond = is_beyond.to(self._device, non_blocking=True)
            scores = scores.masked_fill(is_beyond.unsqueeze(1), -torch.inf)
        return scores

    def _begin_drafts(self, slots: Sequence[int], index: Tensor, last: Tensor) -> None:
        """last: int64 [R] or one for all, the tokens before the drafts."""
        self._trail[index, 0] = last
        for slot in slots:
            self._begin_draft(slot)

    def _begin_draft(self, slot: int) -> None:
        self._depths[slot] = self._marks[slot] = 0
        self._is_drafted[slot] = False

    def _draft_missing(self, slots: Sequence[int]) -> None:
        missing = [slot for slot in slots if not self._is_drafted[slot]]
        if not missing or not self.width:
            return
        index = self._index(missing)
        self._outputs[index] = self._reader.draft(missing, self._trail[index, 0], self.width)
        for slot in missing:
            self._is_drafted[slot] = True

    def _index(self, slots: Sequence[int]) -> Tensor:
        return to_device([*slots], self._device)


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
        self.transition = head.transition
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

    transition = ahead = None

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
        key = (width, size) if _has_graph(self._graphs, size, width) else None
        found: Tensor = self._graphs.run(key, inputs, partial(self._compute, width))
        return found[: len(slots)]

    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of ``draft``."""
        for size in row_sizes(self._num_slots):
            inputs = {
                "index": pack_index([[], []], size),
                "last": torch.zeros(size, dtype=torch.int64),
            }
            key = (width, size) if _has_graph(self._graphs, size, width) else None
            if self._graphs.prepare(key, inputs, partial(self._compute, width)):
                yield

    def _compute(self, width: int, inputs: Inputs) -> Tensor:
        slots, starts = inputs["index"].unbind(0)
        return self._reader.outputs(slots, starts, inputs["last"], width)


def _has_graph(graphs: GraphPool, size: int, width: int) -> bool:
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
        self.transition = head.transition
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

    transition = None

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
