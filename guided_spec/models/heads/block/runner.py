"""A block head over slots: it reads verified tokens, and drafts by one forward.

``BlockRunner`` keeps the outputs of each slot's block, and goes along it. Who reads the text, and
computes a block behind it, is a ``BlockReader``: ``ContextReader`` for heads that see the target's
hidden states as keys and values, over the target's tables, and ``MaskedReader`` for P-EAGLE, whose
equations are in ``guided_spec.models.heads.eagle``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from guided_spec.models.heads.block.model import BlockContext, BlockHead
from guided_spec.models.heads.block.transitions import Transition
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.packed.block_readers import (
    BlockForward,
    BlockGraphs,
    BlockRows,
    has_graph,
)
from guided_spec.models.packed.blocks import BLOCK, Blocks
from guided_spec.models.packed.graph_pool import GraphPool, Inputs
from guided_spec.models.packed.packed_lm import split_places
from guided_spec.models.packed.slot_head import HeadLine, HeadSlots, ReadAhead
from guided_spec.models.packed.whole_drafts import DraftStart, Pick, WholeDrafts
from guided_spec.ops.host import host_integers, to_device
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces, store_keys_values


class BlockReader(Protocol):
    """Reads verified tokens, and computes the places behind them; see ``HeadRunner``.

    max_length: tokens of a text. width: tokens of a whole block. size: H, of its outputs.
    transition: how a place depends on the one before; None: it does not.
    """

    @property
    def max_length(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transition(self) -> Transition | None: ...
    def length(self, slot: int) -> int: ...
    def release(self, slots: Sequence[int]) -> None: ...
    def adopt(self, slot: int) -> None: ...
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None: ...
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None: ...
    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the places behind ``last``, int64 [R]; nothing is kept."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each place by itself."""
        ...


class AheadReader(BlockReader, BlockForward, Protocol):
    """A reader whose forwards are graphs; see ``PackedSlotHead``."""

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool: ...
    def read_ahead(self, new: ReadAhead) -> None: ...
    def commit(self, slot: int, count: int) -> None: ...
    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of reading, and of blocks of ``width`` places."""
        ...

    @property
    def graphs(self) -> GraphPool: ...
    @property
    def vocabulary(self) -> DraftVocabulary | None: ...
    @property
    def drafts(self) -> BlockGraphs:
        """The graphs of its blocks."""
        ...

    def rows(self, slots: Sequence[int], last: Tensor, width: int) -> BlockRows:
        """The slots have blocks for drafts of ``width`` tokens behind ``last``, int64 [R]."""
        ...


class BlockRunner:
    """A ``HeadRunner`` whose drafts are blocks.

    width: tokens of a draft at most; there are no more than the reader's. Behind the block's last
    place every logit is -inf: a draft is no longer than that. ahead: the reader, where its forwards
    are graphs.

    whole: its drafts by one graph each, where that is so. transition: as of the reader.
    """

    scores_at_once = True

    @torch.inference_mode()
    def __init__(
        self,
        reader: BlockReader,
        num_slots: int,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ahead: AheadReader | None = None,
    ) -> None:
        self._reader, self._ahead, self._device = reader, ahead, device
        self.max_length, self.transition = reader.max_length, reader.transition
        self.width = min(width, reader.width)
        self.whole = None if ahead is None else WholeDrafts(ahead.graphs, self, num_slots)
        self._depths, self._marks = ([0] * num_slots for _ in range(2))
        # Of each slot's block, where it has been computed since the last read.
        columns = max(self.width, 1)
        self._outputs = torch.zeros(num_slots, columns, reader.size, device=device, dtype=dtype)
        self._is_drafted = [False] * num_slots
        # The last verified token, and where a place depends on it, the draft behind that.
        self._trail = torch.zeros(num_slots, columns + 1, device=device, dtype=torch.int64)

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._reader.length(slot)

    def depth(self, slot: int) -> int:
        """Draft tokens behind the verified ones."""
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
        """Remember where the slots' drafts stand, for ``rewind``; ``read`` does so too."""
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
            places = [min(self._depths[slot], self.width) for slot in slots]
            index, place = to_device([[*slots], places], self._device)
            self._trail[index, place] = token_ids

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens; see ``SlotHead.read``."""
        self._reader.read(slots, tokens, states)
        rows = host_integers([[*slots], [row[-1] for row in tokens]])
        index, last = rows.to(self._device, non_blocking=True)
        self._begin_drafts(slots, index, last)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """See ``SlotHead.copy_slot``."""
        self._reader.copy_slot(source, destinations)
        self._begin_drafts(destinations, self._index(destinations), self._trail[source, 0])

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens of each slot can be read before the host knows them."""
        return self._ahead is not None and self._ahead.can_read_ahead(slots, counts)

    @torch.inference_mode()
    def read_ahead(self, new: ReadAhead) -> None:
        """See ``PackedSlotHead.read_ahead``; where ``can_read_ahead``."""
        assert self._ahead is not None
        self._ahead.read_ahead(new)
        ends = new.token_ids.gather(1, new.last.unsqueeze(1)).squeeze(1)
        self._begin_drafts(new.slots, self._index(new.slots), ends.clamp_min(0))

    def commit(self, slot: int, count: int) -> None:
        """The slot holds ``count`` of the tokens that were read ahead."""
        assert self._ahead is not None
        self._ahead.commit(slot, count)

    def capture(self, whole: int = 0) -> Iterator[None]:
        """Capture the graphs there are.

        whole: tokens of the drafts that ``whole`` is asked for; 0: none.
        """
        if self._ahead is not None:
            yield from self._ahead.capture(self.width)
            if whole and self.whole is not None:
                yield from self.whole.capture_best(whole)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """See ``DraftForward``."""
        assert self._ahead is not None
        return self._ahead.vocabulary

    def has_graph(self, size: int, count: int) -> bool:
        """See ``DraftForward``."""
        return has_graph(size, count)

    def blank(self, size: int) -> Inputs:
        """See ``DraftForward``."""
        return {"last": torch.zeros(size, dtype=torch.int64)}

    def begin_draft(self, slots: Sequence[int], count: int) -> DraftStart:
        """See ``DraftForward``; count: ``width`` at most."""
        rows = self._rows(slots, self._index(slots), count)
        return DraftStart(rows.starts, {"last": rows.last})

    def draft(self, inputs: Inputs, count: int, pick: Pick) -> None:
        """See ``DraftForward``: the places are scored by one forward."""
        assert self._ahead is not None
        slots, starts, _ = inputs["places"].unbind(0)
        before = inputs["last"]
        outputs = self._ahead.outputs(slots, starts, before, count)
        for depth, logits in enumerate(self._ahead.logits(outputs).unbind(1)):
            if self._ahead.transition is not None:
                logits = self._ahead.transition.step(logits, outputs[:, depth], before)
            before = pick(depth, logits)

    def end_draft(self, slots: Sequence[int], count: int, left: None) -> None:
        """See ``DraftForward``: nothing of the block is kept."""

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> Tensor:
        """[R, D]: the scores of the token that follows each slot's draft."""
        self._draft_missing(slots)
        depths = [self._depths[slot] for slot in slots]
        most = max(self.width - 1, 0)
        places = host_integers([[*slots], [min(depth, most) for depth in depths]])
        slot, place = places.to(self._device, non_blocking=True)
        outputs = self._outputs[slot, place]
        scores = self._reader.logits(outputs)
        if (transition := self._reader.transition) is not None:
            scores = transition.step(scores, outputs, self._trail[slot, place])
        if max(depths) >= self.width:
            is_behind = torch.tensor([depth >= self.width for depth in depths])
            is_behind = is_behind.to(self._device, non_blocking=True)
            scores = scores.masked_fill(is_behind.unsqueeze(1), -torch.inf)
        return scores

    def _rows(self, slots: Sequence[int], index: Tensor, width: int) -> BlockRows:
        assert self._ahead is not None
        return self._ahead.rows(slots, self._trail[index, 0], width)

    def _begin_drafts(self, slots: Sequence[int], index: Tensor, last: Tensor) -> None:
        """last: int64 [R] or one for all, the tokens that the drafts stand behind."""
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
        self.width, self.size, self.transition = (
            head.layout.width,
            head.hidden_size,
            head.transition,
        )
        self._device, self._dtype = device, dtype
        where: Any = {"device": device, "dtype": dtype, "blocks": blocks}
        self.slots = HeadSlots(head.config, limits, **where)
        self.length, self.release = self.slots.length, self.slots.release
        self.adopt, self.copy_slot = self.slots.adopt, self.slots.copy_slot

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """See ``HeadRunner``."""
        del tokens
        for line in self.slots.lines(slots, [len(row) for row in states]):
            self._read_line(line, line.of(states))

    def logits(self, outputs: Tensor) -> Tensor:
        """See ``BlockReader``."""
        return self.head.logits(outputs)

    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """See ``BlockReader``."""
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
        found = torch.from_numpy(rows.places(count, len(rows.slots)))
        of_tokens, of_rows = split_places(found.to(self._device, non_blocking=True), count)
        places = SlotPlaces(of_tokens, of_rows, blocks.tables, blocks.max_length)
        features = self.head.features(states.to(self._device, self._dtype))
        made = self.head.context(features, of_tokens[1])
        for new, kept in zip(made, self.slots.memory, strict=True):
            store_keys_values(new, kept, places)


def _gather(buffer: Tensor, tables: Tensor, held: Tensor) -> Tensor:
    """[R, Hkv, L, D]: the positions ``held``, bool [R, L], of rows of blocks, int64 [R, P].

    Zeros elsewhere: there may be anything, even what is no number.
    """
    found = buffer[tables].transpose(1, 2).flatten(2, 3)[:, :, : held.shape[1]]
    return found.masked_fill(~held[:, None, :, None], 0)


class MaskedReader:
    """A ``BlockReader``: masks behind the last verified position, all by one forward.

    width: tokens of a draft at most.

    Raises ModelError for a head that has nothing to put at the places behind a text.
    """

    transition = None

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
        """See ``BlockReader``."""
        return self.head.logits(outputs)

    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """See ``BlockReader``; the last token has been read already."""
        masks = last.new_full((len(slots), width - 1), self._masks.token_id)
        hidden = self._masks.hidden.expand(*masks.shape, -1)
        return self._slots.masked(slots, masks, hidden)
