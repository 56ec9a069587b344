"""Trees of draft tokens: which token each one follows, as the host knows it.

A row of a forward over a tree has B trees of N tokens behind their texts' last tokens. Place 0 of a
row is the text's last token, place i + 1 the i-th draft token. A chain is the tree in which every
token follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Of all trees of a step, which take a GPU hardly longer than one token: its time goes to the
# weights (docs/performance/models.md). More of them cost what they bring.
TREE_TOKENS = 64
# Drafts that a tree has room for at least: a step that waits for its drafts costs more than fewer
# tokens bring.
WORTH = 2


def tree_share(requests: int, num_draft_tokens: int) -> int:
    """Tokens of each tree at most in a step of so many requests; 0 where drafts should be chains.

    num_draft_tokens: of the draft that a tree grows around.
    """
    share = TREE_TOKENS // requests - 1
    return share if share >= WORTH * num_draft_tokens else 0


class TokenTree(NamedTuple):
    """B trees of up to N tokens: each row's own, and behind them others that do not count.

    parents: int64 [B, N], the place that each token follows, never one behind the token's own; 0
        for the others.
    depths: int64 [B, N + 1], tokens between the text and each place, itself included.
    ancestors: int64 [B, N + 1], bit p where a place follows place p, or is it.
    ranks: int64 [B, N], how many of the row's tokens before it follow the same place; -1 for those
        that are not its own.
    num_drawn: of the tokens that follow a place, how many may have been drawn: the first ones. The
        others are certain.
    """

    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    ancestors: NDArray[np.int64]
    ranks: NDArray[np.int64]
    num_drawn: int = 1

    @classmethod
    def of(cls, parents: Sequence[Sequence[int]], width: int, *, num_drawn: int = 1) -> TokenTree:
        """parents: of each row's own tokens; N is ``width``, at most 63."""
        found = np.zeros((len(parents), width), dtype=np.int64)
        ranks = np.full_like(found, -1)
        # Behind a row's own tokens each follows the text.
        depths = np.ones((len(parents), width + 1), dtype=np.int64)
        seen = np.ones_like(depths, dtype=np.uint64)
        seen[:, 1:] += np.uint64(1) << np.arange(1, width + 1, dtype=np.uint64)
        for row, own in enumerate(parents):
            steps, bits, followers = [0], [1], [0] * (width + 1)
            for at, parent in enumerate(own):
                ranks[row, at] = followers[parent]
                followers[parent] += 1
                steps.append(steps[parent] + 1)
                bits.append(bits[parent] | 2 << at)
            found[row, : len(own)] = own
            depths[row, : len(steps)], seen[row, : len(bits)] = steps, bits
        ancestors = seen.view(np.int64)
        return cls(found, depths, ancestors, ranks, num_drawn)

    def line(self, counts: Sequence[int]) -> NDArray[np.int64]:
        """int64 [2, sum of counts]: depths and ancestors of the rows' first places, in one line."""
        is_in = np.arange(self.depths.shape[1]) < np.array(counts, dtype=np.int64)[:, None]
        return np.stack([self.depths[is_in], self.ancestors[is_in]])

    @property
    def num_ranks(self) -> int:
        """The most tokens that follow one place, 1 or above."""
        return int(self.ranks.max(initial=0)) + 1

    @property
    def depth(self) -> int:
        """The most tokens of a branch."""
        return int((self.depths[:, 1:] * (self.ranks >= 0)).max(initial=0))

    def children(self) -> NDArray[np.int64]:
        """int64 [R, B, N + 1]: the first, second, ... token behind each place, -1 for none."""
        batch, width = self.parents.shape
        found = np.full((self.num_ranks, batch, width + 1), -1, dtype=np.int64)
        rows, tokens = np.nonzero(self.ranks >= 0)
        found[self.ranks[rows, tokens], rows, self.parents[rows, tokens]] = tokens
        return found

    def ways(self) -> NDArray[np.int64]:
        """int64 [B, N + 1, D]: the places from the text to each one, itself included, and then
        always the first that follows; -1 where nothing follows."""
        found = np.full((*self.depths.shape, self.depth), -1, dtype=np.int64)
        for row, (parents, ranks) in enumerate(zip(self.parents, self.ranks, strict=True)):
            own = parents[ranks >= 0].tolist()
            before: list[list[int]] = [[]]
            behind: list[list[int]] = [[] for _ in range(len(own) + 1)]
            for place, parent in enumerate(own, 1):
                before.append([*before[parent], place])
            for place in range(len(own), 0, -1):  # the first of those that follow comes last
                behind[own[place - 1]] = [place, *behind[place]]
            for place, (one, other) in enumerate(zip(before, behind, strict=True)):
                found[row, place, : len(one) + len(other)] = [*one, *other]
        return found

    def branches(self) -> NDArray[np.int64]:
        """int64 [L, B, D + 1]: the places of each way from the text to a leaf, in their order.

        The last one is repeated to the end of a shorter way, and the last way where there are
        fewer. Every place of a row's own tokens is on some way.
        """
        rows, most = list[list[list[int]]](), self.depth + 1
        for ancestors, parents, ranks in zip(self.ancestors, self.parents, self.ranks, strict=True):
            own = parents[ranks >= 0].tolist()
            leaves = sorted({*range(len(own) + 1)} - {*own})
            bits = [(leaf, int(ancestors[leaf])) for leaf in leaves]
            ways = [[at for at in range(leaf + 1) if seen >> at & 1] for leaf, seen in bits]
            rows.append([way + way[-1:] * (most - len(way)) for way in ways])
        count = max(map(len, rows))
        filled = [[*ways, *[ways[-1]] * (count - len(ways))] for ways in rows]
        return np.array(filled, dtype=np.int64).transpose(1, 0, 2)
