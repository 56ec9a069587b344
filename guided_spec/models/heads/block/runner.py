"""A block head over slots: it keeps the outputs of each slot's block, and drafts from them token
by token.

A ``BlockReader`` reads the text and computes the block after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from guided_spec.models.heads.block.reader import BlockReader, has_graph
from guided_spec.models.heads.block.transitions import BlockPosition
from guided_spec.models.packed.draft_forward import DraftForward, Pick
from guided_spec.models.packed.graph_pool import GraphPool, Inputs
from guided_spec.models.packed.slot_head import ReadAhead
from guided_spec.ops.host import to_device


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
        # Zeros, then the state of each position, of the first ``_num_states`` of them.
        size = 0 if self.transition is None else self.transition.state_size
        self._states = torch.zeros(num_slots, columns + 1, size, device=device, dtype=dtype)
        self._num_states = [0] * num_slots
        # What a planner keeps of each slot's last verified position, and its plan of the block.
        planner = self._planner = reader.planner
        kept = (0, 0) if planner is None else (reader.size, planner.plan_size(columns))
        self._anchors = torch.zeros(num_slots, kept[0], device=device, dtype=dtype)
        self._plans = torch.zeros(num_slots, kept[1], device=device)

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
            self._num_states[slot] = min(self._num_states[slot], self._depths[slot])
        if self.transition is not None:
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
        if self._planner is not None:
            ends = torch.stack([row[-1] for row in states]).to(self._device)
            self._anchors[index] = self._planner.anchors(ends).to(self._anchors.dtype)
        self._begin_drafts(slots, index, last)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """Copy the text of ``source`` to the other slots; see ``SlotHead.copy_slot``."""
        self._reader.copy_slot(source, destinations)
        index = self._index(destinations)
        self._anchors[index] = self._anchors[source].clone()
        self._begin_drafts(destinations, index, self._trail[source, 0])

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens of each slot can be read before the host knows them."""
        return self._ahead is not None and self._ahead.can_read_ahead(slots, counts)

    @torch.inference_mode()
    def read_ahead(self, new: ReadAhead) -> None:
        """Read verified tokens that the host does not know yet; needs ``can_read_ahead``."""
        assert self._ahead is not None
        self._ahead.read_ahead(new)
        ends = new.token_ids.gather(1, new.last.unsqueeze(1)).squeeze(1)
        index = self._index(new.slots)
        if self._planner is not None:
            states = new.states[torch.arange(len(ends), device=ends.device), new.last]
            self._anchors[index] = self._planner.anchors(states).to(self._anchors.dtype)
        self._begin_drafts(new.slots, index, ends.clamp_min(0))

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
        return has_graph(self._ahead.graphs, size, count)

    def begin_draft(self, slots: Sequence[int], count: int) -> Sequence[int]:
        """The starts [R] of a draft of ``count`` tokens, at most ``width`` of them."""
        assert self._ahead is not None
        return self._ahead.starts(slots, count)

    def draft(self, inputs: Inputs, count: int, pick: Pick) -> None:
        """True: one forward scores all positions; see ``DraftForward``."""
        assert self._ahead is not None
        slots, starts, _ = inputs["index"].unbind(0)
        before, state = self._trail[slots, 0], self._states[slots, 0]
        outputs = self._ahead.outputs(slots, starts, before, count)
        scores, plan = self._ahead.logits(outputs), None
        if self._planner is not None:
            plan = self._planner.plan(scores, outputs, self._anchors[slots])
        for depth, logits in enumerate(scores.unbind(1)):
            if self.transition is not None:
                hidden, depths = outputs[:, depth], torch.full_like(before, depth)
                state = self.transition.advance(state, hidden, before)
                position = BlockPosition(hidden, before, state, depths, plan)
                logits = self.transition.step(logits, position)
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
        if self.transition is not None:
            self._advance_states(slots)
            before, state = self._trail[slot, step], self._states[slot, step + 1]
            plan = None if self._planner is None else self._plans[slot]
            position = BlockPosition(outputs, before, state, step, plan)
            scores = self.transition.step(scores, position)
        if max(depths) >= self.width:
            is_beyond = torch.tensor([depth >= self.width for depth in depths])
            is_beyond = is_beyond.to(self._device, non_blocking=True)
            scores = scores.masked_fill(is_beyond.unsqueeze(1), -torch.inf)
        return scores

    def _advance_states(self, slots: Sequence[int]) -> None:
        """Compute the states of the slots' positions up to the end of their drafts."""
        if self.transition is None or not self.transition.state_size:
            return
        ends = {slot: min(self._depths[slot], self.width - 1) + 1 for slot in slots}
        while behind := [slot for slot in slots if self._num_states[slot] < ends[slot]]:
            steps = [self._num_states[slot] for slot in behind]
            index, step = to_device([behind, steps], self._device)
            hidden, before = self._outputs[index, step], self._trail[index, step]
            state = self.transition.advance(self._states[index, step], hidden, before)
            self._states[index, step + 1] = state.to(self._states.dtype)
            for slot in behind:
                self._num_states[slot] += 1

    def _begin_drafts(self, slots: Sequence[int], index: Tensor, last: Tensor) -> None:
        """last: int64 [R] or one for all, the tokens before the drafts."""
        self._trail[index, 0] = last
        for slot in slots:
            self._begin_draft(slot)

    def _begin_draft(self, slot: int) -> None:
        self._depths[slot] = self._marks[slot] = self._num_states[slot] = 0
        self._is_drafted[slot] = False

    def _draft_missing(self, slots: Sequence[int]) -> None:
        missing = [slot for slot in slots if not self._is_drafted[slot]]
        if not missing or not self.width:
            return
        index = self._index(missing)
        outputs = self._reader.draft(missing, self._trail[index, 0], self.width)
        self._outputs[index] = outputs
        if self._planner is not None:
            scores = self._reader.logits(outputs)
            self._plans[index] = self._planner.plan(scores, outputs, self._anchors[index])
        for slot in missing:
            self._is_drafted[slot] = True

    def _index(self, slots: Sequence[int]) -> Tensor:
        return to_device([*slots], self._device)
