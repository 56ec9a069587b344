"""The lattice of a block: the candidates of every place, in the order in which to try them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lattice"]


class Lattice(NamedTuple):
    """One text's block on the host; see ``Candidates``.

    token_ids: int64 [W, C]. scores: float32 [W, C]. gains: float32 [W, C, C] or None.
    """

    token_ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    gains: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.token_ids)

    def options(self, place: int, previous: int | None) -> list[int]:
        """The candidate tokens of a place behind ``previous``, the best first.

        previous: the draft's token before; None: the text's own last one, at place 0. One that is
        no candidate of the place before changes nothing.
        """
        scores = self.scores[place]
        if self.gains is not None:
            scores = self._behind(place, previous)
        pairs = zip(self.token_ids[place].tolist(), scores.tolist(), strict=True)
        found = [pair for pair in pairs if pair[1] > -math.inf]
        if self.gains is not None:
            found.sort(key=lambda pair: -pair[1])
        return [token for token, _ in found]

    def first_paths(self, place: int, drafted: Sequence[int]) -> Iterator[list[int]]:
        """The tokens to try at each place from ``place`` on, the best first, as they are asked for.

        drafted: where whoever asks appends the one that it took.
        """
        for at in range(place, len(self)):
            previous = drafted[-1] if at else None
            yield self.options(at, previous)

    def _behind(self, place: int, previous: int | None) -> NDArray[np.float32]:
        row, scores = 0, self.scores[place]
        assert self.gains is not None
        if place:
            found = np.flatnonzero(self.token_ids[place - 1] == previous)
            if not len(found):
                return np.asarray(scores)
            row = int(found[0])
        return np.asarray(scores + self.gains[place, row])
