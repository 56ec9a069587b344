"""Hidden states that a draft head was given and has not read yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["UnreadStates"]


class UnreadStates:
    """The states of some slots, in the order of their texts; made when they are taken."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[Sequence[Tensor | None], int]]] = {}
        self._counts: dict[int, int] = {}

    def count(self, slot: int) -> int:
        """Tokens of the slot whose states are expected to wait here."""
        return self._counts.get(slot, 0)

    def add(self, slot: int, features: Sequence[Tensor | None], row: int, count: int) -> None:
        """``features[row]`` goes on with the slot's text, by ``count`` tokens."""
        self._parts.setdefault(slot, []).append((features, row))
        self._counts[slot] = self.count(slot) + count

    def take(self, slot: int) -> Tensor:
        """All that waits of one slot, [n, H], and forget it; n may not be what was expected."""
        found = [features[row] for features, row in self._parts.get(slot, ())]
        self.forget(slot)
        known = [states for states in found if states is not None]
        if not known:
            return torch.empty(0, 0)
        return known[0] if len(known) == 1 else torch.cat(known)

    def forget(self, slot: int) -> None:
        """The slot's text is another from here on."""
        self._parts.pop(slot, None)
        self._counts.pop(slot, None)
