"""What a packed head keeps of texts: keys and values of verified positions, over slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.models.heads.slot_head import SlotLimits
from guided_spec.models.packed.blocks import Blocks
from guided_spec.models.packed.packed_lm import LARGEST_GRAPH, Rows

__all__ = ["HeadLine", "HeadSlots"]


class HeadLine(NamedTuple):
    """Positions of texts, one behind another. rows: where they go. cuts: of which of the texts each
    row is, and of which of its new positions."""

    rows: Rows
    cuts: Sequence[tuple[int, slice]]

    def of(self, states: Sequence[Tensor]) -> Tensor:
        """[N, X]: these positions of the texts' new states [n, X]."""
        return torch.cat([states[row][cut] for row, cut in self.cuts])


class HeadSlots:
    """The memory of a head's layers, and how much of each slot's text it holds.

    config: of the head's layers. blocks: the target's, by whose tables the head keeps its own keys
    and values: who takes a prefix of another text takes both. None: tables of its own.

    memory: the layers' blocks.
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: Any,
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
    ) -> None:
        self.max_length, self._piece = limits.max_length, limits.piece
        self.blocks = blocks or Blocks.full(limits.num_slots, limits.max_length, device)
        like = torch.empty(0, device=device, dtype=dtype)
        self.memory = tuple(
            # A position is read with its successor.
            self.blocks.allocate(config.num_key_value_heads, config.head_dim, like, lag=1)
            for _ in range(config.num_hidden_layers)
        )
        self._lengths = [0] * limits.num_slots

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._lengths[slot]

    def lengths(self, slots: Sequence[int]) -> list[int]:
        """``length`` of each."""
        return [self._lengths[slot] for slot in slots]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self._lengths[slot] = 0

    def adopt(self, slot: int) -> None:
        """Where nothing was read into the slot: it holds what its blocks hold of another text."""
        if self._lengths[slot] == 0:
            self._lengths[slot] = self.blocks.num_taken(slot)

    def commit(self, slot: int, count: int) -> None:
        """So many positions more are in the slot's memory."""
        self._lengths[slot] += count
        self.blocks.mark_read(slot, self._lengths[slot])

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """See ``SlotHead.copy_slot``."""
        length, count = self._lengths[source], len(destinations)
        Rows(destinations, [0] * count, [length] * count).grow(self.blocks)
        for slot in destinations:
            self.blocks.copy_own(source, slot, length, self.memory)
            self._lengths[slot] = length

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens fit each slot, and one graph."""
        pairs = zip(self.lengths(slots), counts, strict=True)
        longest = max(length + count for length, count in pairs)
        return sum(counts) <= LARGEST_GRAPH and longest <= self.max_length

    def lines(self, slots: Sequence[int], counts: Sequence[int]) -> Iterator[HeadLine]:
        """``counts`` new positions in lines of ``piece`` at most; each is committed behind it."""
        done = [0] * len(slots)
        while any(have < count for have, count in zip(done, counts, strict=True)):
            left, cuts = self._piece, list[tuple[int, slice]]()
            for row, (have, count) in enumerate(zip(done, counts, strict=True)):
                done[row] = have + min(left, count - have)
                left -= done[row] - have
                if done[row] > have:
                    cuts.append((row, slice(have, done[row])))
            of = [slots[row] for row, _ in cuts]
            sizes = [cut.stop - cut.start for _, cut in cuts]
            yield HeadLine(Rows(of, self.lengths(of), sizes), cuts)
            for slot, size in zip(of, sizes, strict=True):
                self.commit(slot, size)
