"""The lattice of a block: the candidates of every place, and the legal paths through it.

A path takes a token at each place. Its worth is the number of tokens that are expected to be
accepted: with the chances c_1, c_2, ... of its tokens, each behind those before it,

    c_1 + c_1 c_2 + c_1 c_2 c_3 + ...

A token's chance is its share of what is legal there: of the legal candidates' probabilities, and
of what the place leaves for tokens that are no candidates.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.masks.constraint import Fork
from guided_spec.masks.rows import row_allows

__all__ = ["Lattice", "Option", "best_path"]


class Option(NamedTuple):
    """A token of a place, and the log of its probability there, behind the token before."""

    token_id: int
    score: float


class Lattice(NamedTuple):
    """One text's block on the host; see ``Candidates``.

    token_ids: int64 [W, C]. scores: float32 [W, C]. gains: float32 [W, C, C] or None.
    """

    token_ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    gains: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.token_ids)

    def options(self, place: int, previous: int | None) -> list[Option]:
        """The candidates of a place behind ``previous``, the best first.

        previous: the draft's token before; None: the text's own last one, at place 0. One that is
        no candidate of the place before changes nothing.
        """
        scores = self.scores[place]
        if self.gains is not None:
            scores = self._behind(place, previous)
        pairs = zip(self.token_ids[place].tolist(), scores.tolist(), strict=True)
        found = [Option(*pair) for pair in pairs if pair[1] > -math.inf]
        if self.gains is not None:
            found.sort(key=lambda option: -option.score)
        return found

    def first_paths(self, place: int, drafted: Sequence[int]) -> Iterator[list[int]]:
        """The tokens to try at each place from ``place`` on, the best first, as they are asked for.

        drafted: where whoever asks appends the one that it took.
        """
        for at in range(place, len(self)):
            previous = drafted[-1] if at else None
            yield [option.token_id for option in self.options(at, previous)]

    def _behind(self, place: int, previous: int | None) -> NDArray[np.float32]:
        row, scores = 0, self.scores[place]
        assert self.gains is not None
        if place:
            found = np.flatnonzero(self.token_ids[place - 1] == previous)
            if not len(found):
                return np.asarray(scores)
            row = int(found[0])
        return np.asarray(scores + self.gains[place, row])


class _Node(NamedTuple):
    """A path so far: its worth, and the chance that all of it is accepted."""

    path: tuple[int, ...]
    worth: float
    chance: float


class _Search:
    """Where the search stands in the grammar; the fork is left where it was."""

    def __init__(self, lattice: Lattice, fork: Fork, row: NDArray[np.int32], place: int) -> None:
        self._lattice, self._fork, self._row, self._place = lattice, fork, row, place
        self._drafted = tuple(fork.token_ids)

    def children(self, node: _Node) -> list[_Node]:
        """The legal ways on behind a path, the likeliest first; none behind a text's end."""
        fork, text = self._fork, (*self._drafted, *node.path)
        if fork.advance(text) < len(text) or fork.matcher.is_terminated():
            return []
        fork.matcher.fill_next_token_bitmask(self._row.reshape(1, -1), 0)
        return [
            _Node((*node.path, token), node.worth + node.chance * share, node.chance * share)
            for token, share in self._shares(node.path)
        ]

    def leave(self) -> None:
        """Put the fork back."""
        self._fork.advance(self._drafted)

    def _shares(self, path: Sequence[int]) -> list[tuple[int, float]]:
        """Legal tokens and their chances, the largest first."""
        place = self._place + len(path)
        previous = (*self._drafted, *path)[-1] if place and (path or self._drafted) else None
        options = self._lattice.options(place, previous)
        legal = [
            (option.token_id, math.exp(option.score))
            for option in options
            if row_allows(self._row, option.token_id)
        ]
        words = self._row.view(np.uint32)
        if np.bitwise_count(words).sum() == 1:
            word = int(np.flatnonzero(words)[0])
            return [(32 * word + int(words[word]).bit_length() - 1, 1.0)]
        rest = max(0.0, 1.0 - sum(math.exp(option.score) for option in options))
        total = rest + sum(share for _, share in legal)
        return [(token, share / total) for token, share in legal]


def best_path(
    lattice: Lattice, fork: Fork, row: NDArray[np.int32], room: int, budget: int, place: int = 0
) -> list[int]:
    """The legal path of the largest worth, of ``room`` tokens at most.

    Best first, by branch and bound: what is left of a path adds at most its chance for each place.
    The first path takes the likeliest legal token at each place; ``budget`` says how many more may
    be followed to their ends. With enough of it there is no better path.

    fork: at the end of the draft so far, which is put back. row: int32 [W] to work in. place: of
    the lattice, where the path begins.
    """
    search = _Search(lattice, fork, row, place)
    room = min(room, len(lattice) - place)
    best, order = _Node((), 0.0, 1.0), 0
    waiting = [(-math.inf, 0, best)]
    for _ in range(budget + 1):
        if not waiting or -waiting[0][0] <= best.worth:
            break
        _, _, node = heapq.heappop(waiting)
        while len(node.path) < room and (children := search.children(node)):
            node, *others = children
            for child in others:
                most = child.worth + child.chance * (room - len(child.path))
                order += 1
                heapq.heappush(waiting, (-most, order, child))
        if node.worth > best.worth:
            best = node
    search.leave()
    return list(best.path)
