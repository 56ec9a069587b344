"""Which adapter writes the text of each slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from guided_spec.ops.host import to_device

TRIED_SLOTS = 2  # in which forms of a model are tried, however few texts there will be


class SlotAdapters:
    """The adapters of a model, and by which of them each slot's text is written.

    The low-rank terms of all adapters stand next to each other: R columns, each of one adapter.
    A token takes those of its slot's adapter, so that the shapes of a forward are always the same.

    names: of the adapters. ranks: the columns of each. num_slots: at most. device: of the model.

    left_out: bool [N, R], which columns each token of the current forward does not take, or [1, R]
        for all of them; None outside of ``reading``, where the base computes alone.
    """

    def __init__(
        self, names: Sequence[str], ranks: Sequence[int], num_slots: int, device: torch.device
    ) -> None:
        self.names, self.device = tuple(names), device
        self.left_out: Tensor | None = None
        self._numbers = [0] * max(num_slots, TRIED_SLOTS)
        # At one address, so that graphs read it; 0 is the base. The last is of unused tokens: -1.
        size = len(self._numbers) + 1
        self._of_slot = torch.zeros(size, dtype=torch.int64, device=device)
        numbers = torch.arange(1, len(ranks) + 1)
        columns = numbers.repeat_interleave(torch.tensor(ranks, dtype=torch.int64))
        self._columns = columns.to(device)

    def put(self, slot: int, name: str | None) -> None:
        """A text begins in the slot. name: of its adapter; None is the base."""
        self._put(slot, 0 if name is None else 1 + self.names.index(name))

    def try_in(self, slots: Sequence[int]) -> None:
        """Put another adapter in each slot, and the base after the last: forms are tried so."""
        for at, slot in enumerate(slots):
            self._put(slot, at + 1 if at < len(self.names) else 0)

    def clear(self) -> None:
        """The base is in every slot."""
        for slot in range(len(self._numbers)):
            self._put(slot, 0)

    @contextmanager
    def reading(self, slots: Tensor) -> Iterator[None]:
        """Forwards inside are of tokens in these slots, int64 [N], -1 for an unused one.

        Or of one slot, [1], whose tokens may be any number.
        """
        self.left_out = self._of_slot[slots].unsqueeze(1) != self._columns
        try:
            yield
        finally:
            self.left_out = None

    def _put(self, slot: int, number: int) -> None:
        if self._numbers[slot] != number:
            self._numbers[slot] = number
            # On the stream of the forwards: those that were launched before read the old one.
            self._of_slot[slot].fill_(number)


def reading_adapters(
    adapters: SlotAdapters | None, slots: Tensor | Sequence[int], each: int = 1
) -> AbstractContextManager[None]:
    """``SlotAdapters.reading``, where the model has any. each: how often every slot is repeated."""
    if adapters is None:
        return nullcontext()
    index = slots if isinstance(slots, Tensor) else to_device(slots, adapters.device)
    return adapters.reading(index if each == 1 else index.repeat_interleave(each))
