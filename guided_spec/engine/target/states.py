"""Hidden states of the target that no proposer has taken yet."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor


class _Piece(NamedTuple):
    """The first ``length`` positions of one row of a forward's hidden states, [B, n, H]."""

    hidden: Tensor
    row: int
    length: int


class TakenStates(Sequence[Tensor | None]):
    """The states of some slots, [B] tensors [n, H] or None; each is cut out when it is asked for.

    A proposer that read them ahead asks for none, and cutting takes the host as long as a launch.
    """

    def __init__(self, pieces: list[list[_Piece]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, at: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, at: slice) -> TakenStates: ...
    def __getitem__(self, at: int | slice) -> Tensor | None | TakenStates:
        if isinstance(at, slice):
            return TakenStates(self._pieces[at])
        parts = [hidden[row, :length] for hidden, row, length in self._pieces[at]]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class KeptStates:
    """Keeps the hidden states of forwards, by slot, until they are taken."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, slots: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        """Add the first ``counts[i]`` positions of ``hidden[i]``, [n, H], to ``slots[i]``."""
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            self._pieces.setdefault(slot, []).append(_Piece(hidden, row, count))

    def copy(self, source: int, slot: int) -> None:
        """Give ``slot`` what is kept of ``source``."""
        if source in self._pieces:
            self._pieces[slot] = list(self._pieces[source])

    def take(self, slots: Sequence[int], later: Container[int] = ()) -> TakenStates:
        """What became known of each slot since the last call, and forget it.

        later: slots whose prompts are not read yet: theirs are kept until they are.
        """
        return TakenStates([[] if at in later else self._pieces.pop(at, []) for at in slots])

    def drop(self, slots: Sequence[int]) -> None:
        """Forget the states of ended requests."""
        for slot in slots:
            self._pieces.pop(slot, None)
