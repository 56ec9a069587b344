"""What a block head keeps of texts: keys and values of the target's hidden states, over slots.

What it keeps of a position depends on the target's hidden states there and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.models.heads.slot_head import SlotLimits
from guided_spec.models.packed.blocks import Blocks
from guided_spec.models.packed.packed_lm import Rows

__all__ = ["ContextLine", "ContextSlots"]


class ContextLine(NamedTuple):
    """Positions of texts, one behind another: which, and the states [N, X] there."""

    rows: Rows
    states: Tensor


class ContextSlots:
    """The memory of a head's layers, and how much of each slot's text it holds.

    config: of the head's layers. blocks: the target's tables, by which the head keeps its own keys
    and values; None: tables of its own.

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
            # A position is read with its successor, as by heads that depend on it.
            self.blocks.allocate(config.num_key_value_heads, config.head_dim, like, lag=1)
            for _ in range(config.num_hidden_layers)
        )
        self._lengths = [0] * limits.num_slots

    def length(self, slot: int) -> int:
        """See ``HeadRunner``."""
        return self._lengths[slot]

    def lengths(self, slots: Sequence[int]) -> list[int]:
        """``length`` of each."""
        return [self._lengths[slot] for slot in slots]

    def release(self, slots: Sequence[int]) -> None:
        """See ``HeadRunner``."""
        for slot in slots:
            self._lengths[slot] = 0

    def adopt(self, slot: int) -> None:
        """See ``HeadRunner``."""
        if self._lengths[slot] == 0:
            self._lengths[slot] = self.blocks.num_taken(slot)

    def commit(self, slot: int, count: int) -> None:
        """So many positions more are in the slot's memory."""
        self._lengths[slot] += count
        self.blocks.mark_read(slot, self._lengths[slot])

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """See ``HeadRunner``."""
        length, count = self._lengths[source], len(destinations)
        Rows(destinations, [0] * count, [length] * count).grow(self.blocks)
        for slot in destinations:
            self.blocks.copy_own(source, slot, length, self.memory)
            self._lengths[slot] = length

    def lines(self, slots: Sequence[int], states: Sequence[Tensor]) -> Iterator[ContextLine]:
        """The rows' new positions in lines of ``piece`` at most; each is committed behind it."""
        starts = self.lengths(slots)
        counts = [len(row) for row in states]
        done = [0] * len(slots)
        while any(have < count for have, count in zip(done, counts, strict=True)):
            left, cuts = self._piece, list[int]()
            for have, count in zip(done, counts, strict=True):
                cuts.append(min(left, count - have))
                left -= cuts[-1]
            begins = [start + have for start, have in zip(starts, done, strict=True)]
            parts = [
                row[have : have + cut] for row, have, cut in zip(states, done, cuts, strict=True)
            ]
            yield ContextLine(Rows(slots, begins, cuts), torch.cat(parts))
            done = [have + cut for have, cut in zip(done, cuts, strict=True)]
            for slot, cut in zip(slots, cuts, strict=True):
                self.commit(slot, cut)
