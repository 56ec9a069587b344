"""A block head over a target's tables: it reads verified tokens, and drafts by one forward.

What it keeps of a position depends on the target's hidden states there and on nothing else. A draft
leaves nothing behind: its own keys and values are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.models.heads.dflash import BlockContext, DFlashHead
from guided_spec.models.heads.slot_head import SlotRoom
from guided_spec.models.packed.blocks import BLOCK, Blocks
from guided_spec.models.packed.packed_lm import Rows, split_places
from guided_spec.ops.host import host_integers
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces, store_keys_values

__all__ = ["BlockSlotHead"]


class _Line(NamedTuple):
    """Positions of texts, one behind another: which, and the states [N, X] there."""

    rows: Rows
    states: Tensor


class BlockSlotHead:
    """A ``HeadRunner`` of a block head.

    width: tokens of a draft at most. blocks: the target's tables, by which the head keeps its own
    keys and values; None: tables of its own.

    Behind the block's last place every logit is -inf: a draft is no longer than that.
    """

    @torch.inference_mode()
    def __init__(
        self,
        head: DFlashHead,
        room: SlotRoom,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
    ) -> None:
        self.head, self.max_length = head, room.max_length
        self._piece, self._device, self._dtype = room.piece, device, dtype
        self._width = min(width, head.layout.block_size - 1)
        self.blocks = blocks or Blocks.full(room.num_slots, room.max_length, device)
        config = head.config
        like = torch.empty(0, device=device, dtype=dtype)
        self._memory = tuple(
            # A position is read with its successor, as by heads that depend on it.
            self.blocks.allocate(config.num_key_value_heads, config.head_dim, like, lag=1)
            for _ in range(config.num_hidden_layers)
        )
        self._lengths, self._depths, self._marks, self._last = (
            [0] * room.num_slots for _ in range(4)
        )
        # Of each slot's block, where it has been computed since the last read.
        shape = (room.num_slots, max(self._width, 1), head.hidden_size)
        self._outputs = torch.zeros(shape, device=device, dtype=dtype)
        self._is_drafted = [False] * room.num_slots

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._lengths[slot]

    def depth(self, slot: int) -> int:
        """Draft tokens walked behind the verified ones."""
        return self._depths[slot]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self._lengths[slot] = self._depths[slot] = self._marks[slot] = 0
            self._is_drafted[slot] = False

    def adopt(self, slot: int) -> None:
        """Where nothing was read into the slot: it holds what its blocks hold of another text."""
        if self._lengths[slot] == 0:
            self._lengths[slot] = self.blocks.num_taken(slot)

    def mark(self, slots: Sequence[int]) -> None:
        """Remember where the slots' drafts stand, for ``rewind``; ``read`` does so too."""
        for slot in slots:
            self._marks[slot] = self._depths[slot]

    def rewind(self, slots: Sequence[int]) -> None:
        """Take the slots' drafts back to their marks."""
        for slot in slots:
            self._depths[slot] = self._marks[slot]

    def walk(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Append one draft token to each slot's draft; the block is the same whatever they are."""
        del token_ids
        for slot in slots:
            self._depths[slot] += 1

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens; see ``SlotHead.read``."""
        for line in self._lines(slots, states):
            self._read_line(line)
        for slot, row in zip(slots, tokens, strict=True):
            self._last[slot] = row[-1]
            self._begin_draft(slot)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """See ``SlotHead.copy_slot``."""
        length, count = self._lengths[source], len(destinations)
        Rows(destinations, [0] * count, [length] * count).grow(self.blocks)
        for slot in destinations:
            self.blocks.copy_own(source, slot, length, self._memory)
            self._lengths[slot], self._last[slot] = length, self._last[source]
            self._begin_draft(slot)

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> Tensor:
        """[R, V]: the scores of the token that follows each slot's draft."""
        missing = [slot for slot in slots if not self._is_drafted[slot]]
        if missing and self._width:
            self._draft(missing)
        depths = [self._depths[slot] for slot in slots]
        most = max(self._width - 1, 0)
        places = host_integers([[*slots], [min(depth, most) for depth in depths]])
        slot, place = places.to(self._device, non_blocking=True)
        scores = self.head.logits(self._outputs[slot, place])
        if max(depths) >= self._width:
            is_behind = torch.tensor([depth >= self._width for depth in depths])
            is_behind = is_behind.to(self._device, non_blocking=True)
            scores = scores.masked_fill(is_behind.unsqueeze(1), -torch.inf)
        return scores

    def _begin_draft(self, slot: int) -> None:
        self._depths[slot] = self._marks[slot] = 0
        self._is_drafted[slot] = False

    def _lines(self, slots: Sequence[int], states: Sequence[Tensor]) -> Iterator[_Line]:
        """The rows' new positions in lines of ``piece`` at most."""
        starts = [self._lengths[slot] for slot in slots]
        counts = [len(row) for row in states]
        done = [0] * len(slots)
        while any(have < count for have, count in zip(done, counts, strict=True)):
            room, cuts = self._piece, list[int]()
            for have, count in zip(done, counts, strict=True):
                cuts.append(min(room, count - have))
                room -= cuts[-1]
            begins = [start + have for start, have in zip(starts, done, strict=True)]
            parts = [
                row[have : have + cut] for row, have, cut in zip(states, done, cuts, strict=True)
            ]
            yield _Line(Rows(slots, begins, cuts), torch.cat(parts))
            done = [have + cut for have, cut in zip(done, cuts, strict=True)]

    def _read_line(self, line: _Line) -> None:
        rows, count = line.rows, len(line.states)
        rows.grow(self.blocks)
        found = torch.from_numpy(rows.places(count, len(rows.slots)))
        of_tokens, of_rows = split_places(found.to(self._device, non_blocking=True), count)
        places = SlotPlaces(of_tokens, of_rows, self.blocks.tables, self.blocks.max_length)
        features = self.head.features(line.states.to(self._device, self._dtype))
        for new, kept in zip(self.head.context(features, of_tokens[1]), self._memory, strict=True):
            store_keys_values(new, kept, places)
        for slot, cut in zip(rows.slots, rows.counts, strict=True):
            self._lengths[slot] += cut
            self.blocks.mark_read(slot, self._lengths[slot])

    def _draft(self, slots: Sequence[int]) -> None:
        """Compute the slots' blocks."""
        self.blocks.upload()
        lengths = [self._lengths[slot] for slot in slots]
        found = host_integers([[*slots], lengths, [self._last[slot] for slot in slots]])
        index, length, last = found.to(self._device, non_blocking=True)
        longest = max(lengths)
        tables = self.blocks.tables[index, : -(-longest // BLOCK)].long()
        held = torch.arange(longest, device=self._device) < length.unsqueeze(1)
        layers = [
            KeyValues(*(_gather(buffer, tables, held) for buffer in kept)) for kept in self._memory
        ]
        outputs = self.head(last, self._width, BlockContext(layers, length))
        self._outputs[index] = outputs
        for slot in slots:
            self._is_drafted[slot] = True


def _gather(buffer: Tensor, tables: Tensor, held: Tensor) -> Tensor:
    """[R, Hkv, L, D]: the positions ``held``, bool [R, L], of rows of blocks, int64 [R, P].

    Zeros elsewhere: there may be anything, even what is no number.
    """
    found = buffer[tables].transpose(1, 2).flatten(2, 3)[:, :, : held.shape[1]]
    return found.masked_fill(~held[:, None, :, None], 0)
