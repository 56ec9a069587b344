"""Hidden states of the target on their way to a draft head, by slot.

All take this road, whichever forward they come from: prompts, accepted drafts and bonus tokens are
pushed with their positions, and the head pulls what follows the positions that it has read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Unread(NamedTuple):
    """Positions of a text that a head has not read.

    token_ids: n, the tokens *after* the positions. states: [n, X] of the target at the positions, X
    = len(aux_hidden_layers) * H.
    """

    token_ids: Sequence[int]
    states: Tensor

    def split(self, at: int) -> tuple[Unread, Unread]:
        """The first ``at`` positions, and the others."""
        return (
            Unread(self.token_ids[:at], self.states[:at]),
            Unread(self.token_ids[at:], self.states[at:]),
        )


class _Piece(NamedTuple):
    """Positions ``start`` and on: the first ``length`` of one row of states, [B, T, X]."""

    start: int
    length: int
    states: Tensor
    row: int


class _Text(NamedTuple):
    """tokens: of the text, which may grow. pieces: in the order of their positions."""

    tokens: Sequence[int]
    pieces: list[_Piece]


class HiddenStates:
    """Hidden states by slot, from when a forward leaves them until they are taken.

    Each is cut out when it is pulled: a head that has read it already asks for none, and cutting
    takes the host as long as a launch.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, slot: int) -> bool:
        return slot in self._texts

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held, some of it more than once."""
        return [piece.states for text in self._texts.values() for piece in text.pieces]

    def push(self, slot: int, start: int, tokens: Sequence[int], states: Tensor) -> None:
        """Add the states [n, X] at positions ``start`` to ``start + n - 1`` of a text.

        tokens: of the text, not copied: the one after the last position may come later.
        """
        self.push_rows([slot], [start], [tokens], [len(states)], states.unsqueeze(0))

    def push_rows(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        counts: Sequence[int],
        states: Tensor,
    ) -> None:
        """``push`` for [B] texts: of ``states`` [B, T, X] the first ``counts[i]`` of row i."""
        rows = zip(slots, starts, tokens, counts, strict=True)
        for row, (slot, start, text, count) in enumerate(rows):
            found = self._texts.get(slot)
            if found is None:
                self._texts[slot] = found = _Text(text, [])
            found.pieces.append(_Piece(start, count, states, row))

    def pull(self, slot: int, start: int) -> Unread | None:
        """What is known of a text from position ``start`` on, as far as its tokens go.

        None where nothing is, or the states at ``start`` are not there. It stays here.
        """
        text = self._texts.get(slot)
        if text is None:
            return None
        parts, end = list[Tensor](), start
        for first, length, states, row in text.pieces:
            if first <= end < first + length:
                parts.append(states[row, end - first : length])
                end = first + length
        token_ids = text.tokens[start + 1 : end + 1]
        if not token_ids:
            return None
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Unread(token_ids, whole[: len(token_ids)])

    def take(self, slots: Iterable[int]) -> HiddenStates:
        """Those of some slots, which are not here any more."""
        taken = HiddenStates()
        for slot in slots:
            text = self._texts.pop(slot, None)
            if text is not None:
                taken._texts[slot] = text
        return taken

    def copy(self, source: int, slot: int, tokens: Sequence[int]) -> None:
        """Give ``slot`` what is here of ``source``, whose text begins alike. tokens: of the slot's
        text."""
        if source in self._texts:
            self._texts[slot] = _Text(tokens, list(self._texts[source].pieces))

    def drop(self, slots: Iterable[int]) -> None:
        """Forget the states of ended requests."""
        for slot in slots:
            self._texts.pop(slot, None)
