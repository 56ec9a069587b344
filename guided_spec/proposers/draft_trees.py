"""Trees around what another proposer drafts: the best branches beside it that are legal.

The proposer's draft stays as it is, and comes first. Beside it grow the likeliest tokens that it
knows of (``Lookahead.options``), best first, until there are ``tree_nodes`` in all: as EAGLE-2 does
(Li et al., arXiv:2406.16858), but over legal tokens alone. A token counts with the probability that
its proposer gives its branch, of what is legal there; so no node is spent on what the grammar
forbids.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.core import (
    CarryOn,
    DecodeBatch,
    DraftInFlight,
    FinishedDraft,
    FinishedText,
    Proposer,
    ProposerContext,
)
from guided_spec.errors import ConfigError
from guided_spec.masks.lookahead import Lookahead, Pause, Scored
from guided_spec.ops.trees.token_tree import TokenTree
from guided_spec.proposers.drafting import concatenate, host_draft

__all__ = ["DraftTrees"]

BREADTH = 8  # tokens behind a place at most
# Tokens of a forward that takes a GPU hardly longer than one token: its time goes to the weights
# (docs/performance.md, "Other families"). More of them cost what they bring.
TOKENS = 64


class _Node(NamedTuple):
    """A token that may be grown. cost: the negative logarithm of its branch's probability; of equal
    ones that come first which were found first."""

    cost: float
    order: int
    parent: int
    depth: int
    token_id: int


class DraftTrees(Proposer):
    """name, proposer: whose drafts they grow around.

    They wait for the draft, and for its masks on the host. Where its proposer knows nothing else
    than what it drafts, a request's draft stays a chain. All trees of a step share ``TOKENS``:
    where there are many requests, all drafts are chains, and nothing waits for them. Raises
    ConfigError for a proposer that never knows more.
    """

    def __init__(self, name: str, proposer: Proposer, context: ProposerContext) -> None:
        nodes = context.config.tree_nodes
        if not proposer.has_options:
            fix = f"proposer={name!r} drafts chains: pass 0, or take one with a model or a head"
            raise ConfigError("tree_nodes", nodes, fix)
        self.aux_hidden_layers = proposer.aux_hidden_layers
        self._proposer, self._nodes, self._num_slots = proposer, nodes, context.num_slots
        self._max_length = context.max_model_len

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """The proposer's draft, and the branches beside it."""
        rooms = [self._room(batch, request) for request in range(len(batch))]
        lookahead.wants_options = max(rooms) > batch.num_draft_tokens
        flight = self._proposer.begin(batch, lookahead, carry)
        if not lookahead.wants_options:
            return flight
        draft, own = flight.finish(), [*map(min, lookahead.lengths, flight.most)]
        for request, (length, room) in enumerate(zip(own, rooms, strict=True)):
            if lookahead.can_grow(request) and length < room:
                _Growth(lookahead, request, batch.limits[request]).run(room - length)
        carry_on: CarryOn = flight.carry
        if not any(lookahead.branches):
            return FinishedDraft(draft, flight.most, carry_on)
        grown = lookahead.branches
        beside = host_draft(batch, [[one.token_id for one in branches] for branches in grown])
        most = tuple(length + len(more) for length, more in zip(own, grown, strict=True))
        width = max(most)
        parents = [
            [*range(length), *(one.parent for one in branches)]
            for length, branches in zip(own, grown, strict=True)
        ]
        whole = concatenate(draft, beside).cut(width)
        return FinishedDraft(whole._replace(tree=TokenTree.of(parents, width)), most, carry_on)

    def _room(self, batch: DecodeBatch, request: int) -> int:
        """Tokens of the request's tree at most: there must be a row and a place for each."""
        # A text that is drawn by what is drafted must not depend on who else is drafted for.
        is_free = batch.verifier == "coupled" or batch.sampling.all_greedy
        share = TOKENS // (len(batch) if is_free else self._num_slots) - 1
        left = self._max_length - len(batch.contexts[request])
        return min(self._nodes, share, batch.mask_rows.depths - 1, left)

    def release(self, slots: Sequence[int]) -> None:
        """See ``Proposer``."""
        self._proposer.release(slots)

    def capture(self) -> Iterator[None]:
        """Those of the proposer."""
        yield from self._proposer.capture()

    @property
    def learns(self) -> bool:
        """Whether the proposer does."""
        return self._proposer.learns

    def learn(self, texts: Sequence[FinishedText]) -> None:
        """For the proposer."""
        self._proposer.learn(texts)

    @property
    def has_options(self) -> bool:
        """It has used them."""
        return False

    def interrupts(self, batch: DecodeBatch, lookahead: Lookahead) -> Pause | None:
        """As the proposer does."""
        return self._proposer.interrupts(batch, lookahead)


class _Growth:
    """One request's tree as it grows. limit: tokens of a branch at most."""

    def __init__(self, lookahead: Lookahead, request: int, limit: int) -> None:
        self._lookahead, self._request = lookahead, request
        self._options, self._limit = lookahead.options[request], limit
        self._open: list[_Node] = []
        self._count = 0

    def run(self, count: int) -> None:
        """Grow up to ``count`` tokens, the best first."""
        drafted = self._lookahead.drafted[self._request]
        cost = 0.0
        for depth, token_id in enumerate([*drafted, None]):
            cost = self._expand(depth, depth, cost, token_id)
        while self._open and count:
            node = heapq.heappop(self._open)
            place = self._lookahead.grow(self._request, node.parent, node.token_id)
            if place is None:
                continue
            count -= 1
            if count:
                self._expand(place, node.depth + 1, node.cost, None)

    def _expand(self, place: int, depth: int, cost: float, taken: int | None) -> float:
        """What may stand behind a place, ``depth`` tokens behind the text; cost: of the place.

        taken: the token that stands there already. Returns what a branch through it costs.
        """
        found = self._options.get(depth) if depth < self._limit else None
        if found is None:
            return cost
        costs = self._costs(found, place)
        best = np.argsort(costs, kind="stable")[: BREADTH + 1]
        for at in best[np.isfinite(costs[best])].tolist():
            token_id, total = int(found.token_ids[at]), cost + float(costs[at])
            if token_id != taken:
                node = _Node(total, self._count, place, depth, token_id)
                self._count += 1
                heapq.heappush(self._open, node)
        known = costs[found.token_ids == taken]
        # What is drafted and no candidate was certain: forced, or the only legal token.
        return cost + float(known[0]) if len(known) and np.isfinite(known[0]) else cost

    def _costs(self, found: Scored, place: int) -> NDArray[np.float32]:
        """[C]: negative logarithms of what the tokens' probabilities are among the legal ones.

        inf: not to be drafted. All of it where the text has ended.
        """
        token_ids, scores = found.token_ids, found.scores
        is_legal = token_ids >= 0
        row = self._lookahead.row_at(self._request, place)
        if row is not None:
            at = token_ids.clip(0)
            is_legal &= (row[at >> 5] >> (at & 31)) & 1 == 1
        if not is_legal.any():
            return np.full_like(scores, np.inf)
        kept = np.where(is_legal, scores, -np.inf)
        peak = kept.max()
        total: NDArray[np.float32] = peak + np.log(np.exp(kept - peak).sum()) - kept
        return total
