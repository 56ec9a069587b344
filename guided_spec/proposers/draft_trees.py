"""Trees around what another proposer drafts: the best branches beside it that are legal.

The proposer's draft stays as it is, and comes first. Beside it grow the likeliest tokens that it
knows of (``Lookahead.options``), best first, until there are ``tree_nodes`` in all: as EAGLE-2 does
(Li et al., arXiv:2406.16858), but over legal tokens alone. A token counts with the probability that
its proposer gives its branch, of what is legal there; so no node is spent on what the grammar
forbids.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.core import (
    CarryOn,
    DecodeBatch,
    DraftInFlight,
    FinishedDraft,
    Proposer,
    ProposerContext,
)
from guided_spec.errors import ConfigError
from guided_spec.masks.lookahead import Lookahead, Pause, Scored
from guided_spec.ops.trees.token_tree import TokenTree, tree_share
from guided_spec.proposers.drafting import Composed, concatenate, host_draft

BREADTH = 8  # tokens behind a place at most


class _Place(NamedTuple):
    """Where tokens may follow, ``depth`` tokens behind the text.

    place: in the tree. row, ranks: of ``_Known``, which tokens; the likeliest first. cost: the
    negative logarithm of the probability of its branch, less the logarithms of theirs.
    """

    place: int
    depth: int
    cost: float
    row: int
    ranks: list[int]


class _Next(NamedTuple):
    """The likeliest token behind a place that is not grown yet.

    cost: the negative logarithm of its branch's probability. number: of the place; of equal tokens
    those come first that were found first. at: of its ``ranks``.
    """

    cost: float
    number: int
    at: int


class DraftTrees(Composed):
    """name, proposer: whose drafts they grow around.

    They wait for the draft, and for its masks on the host. Where its proposer knows nothing else
    than what it drafts, a request's draft stays a chain. Where there are many requests all drafts
    are chains, see ``tree_share``, and nothing waits for them. Raises
    ConfigError for a proposer that never knows more.
    """

    def __init__(self, name: str, proposer: Proposer, context: ProposerContext) -> None:
        nodes = context.config.tree_nodes
        if not proposer.has_options:
            fix = f"proposer={name!r} drafts chains: pass 0, or take one with a model or a head"
            raise ConfigError("tree_nodes", nodes, fix)
        super().__init__([proposer], proposer.aux_hidden_layers)
        self._proposer, self._nodes, self._num_slots = proposer, nodes, context.num_slots
        self._max_length = context.max_model_len

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """The proposer's draft, and the branches beside it."""
        share = self._share(batch)
        lookahead.wants_options = share > 0
        flight = self._proposer.begin(batch, lookahead, carry)
        if not lookahead.wants_options:
            return flight
        draft, own = flight.finish(), [*map(min, lookahead.lengths, flight.most)]
        for request, length in enumerate(own):
            room = min(share, self._room(batch, request))
            if lookahead.can_grow(request) and length < room:
                _Growth(lookahead, request, batch.limits[request]).run(room - length)
        carry_on: CarryOn = flight.carry
        grown = lookahead.branches
        if not any(grown):
            return FinishedDraft(draft, flight.most, carry_on)
        beside = [[one.token_id for one in branches] for branches in grown]
        most = tuple(length + len(more) for length, more in zip(own, beside, strict=True))
        width = max(most)
        parents = [
            [*range(length), *(one.parent for one in branches)]
            for length, branches in zip(own, grown, strict=True)
        ]
        if draft.probs is None:  # the host knows all of it
            pairs = zip(lookahead.tokens, own, beside, strict=True)
            whole = host_draft(batch, [[*row[:length], *more] for row, length, more in pairs])
        else:
            whole = concatenate(draft, host_draft(batch, beside)).cut(width)
        return FinishedDraft(whole._replace(tree=TokenTree.of(parents, width)), most, carry_on)

    def _share(self, batch: DecodeBatch) -> int:
        """Tokens of a tree at most, as far as the step decides; 0: all drafts are chains."""
        # A text that is drawn by what is drafted must not depend on who else is drafted for.
        is_free = batch.verifier == "coupled" or batch.sampling.all_greedy
        requests = len(batch) if is_free else self._num_slots
        return tree_share(requests, batch.num_draft_tokens)

    def _room(self, batch: DecodeBatch, request: int) -> int:
        """Likewise, as far as the request does: there must be a row and a place for each."""
        left = self._max_length - len(batch.contexts[request])
        return min(self._nodes, batch.mask_rows.depths - 1, left)

    @property
    def has_options(self) -> bool:
        """It has used them."""
        return False

    def interrupts(self, batch: DecodeBatch, lookahead: Lookahead) -> Pause | None:
        """As the proposer does."""
        return self._proposer.interrupts(batch, lookahead)


class _Known:
    """What may stand behind each number of draft tokens, the likeliest first.

    rows: where each number stands. tokens: target ids, -1 behind them. logs: logarithms of their
    probabilities, up to a constant.
    """

    def __init__(self, options: Mapping[int, Scored]) -> None:
        self.rows = {depth: row for row, depth in enumerate(options)}
        size = max((len(known.token_ids) for known in options.values()), default=0)
        ids = np.full((len(options), size), -1, dtype=np.int32)
        scores = np.full(ids.shape, -np.inf)
        for row, known in enumerate(options.values()):
            ids[row, : len(known.token_ids)] = known.token_ids
            scores[row, : len(known.scores)] = known.scores
        scores[ids < 0] = -np.inf
        # The first is the highest.
        logs = scores - np.maximum(scores[:, :1], np.finfo(np.float64).min)
        self.tokens: list[list[int]] = ids.tolist()
        self.logs: list[list[float]] = logs.tolist()
        bits = np.where(ids < 0, 0, np.left_shift(1, ids & 31, dtype=np.int32))
        self._asked = [*zip(np.exp(logs), ids >> 5, bits, strict=True)]

    def legal(self, row: int, mask: NDArray[np.int32] | None) -> tuple[NDArray[np.bool_], float]:
        """[C]: which tokens of a row a mask admits, and the sum of their probabilities.

        mask: int32 [W]; None admits all.
        """
        weights, words, bits = self._asked[row]
        is_legal = (bits if mask is None else mask[words] & bits) != 0
        return is_legal, float(weights @ is_legal)


class _Growth:
    """One request's tree as it grows. limit: tokens of a branch at most."""

    def __init__(self, lookahead: Lookahead, request: int, limit: int) -> None:
        self._lookahead, self._request = lookahead, request
        options = lookahead.options[request].items()
        self._known = _Known({depth: known for depth, known in options if depth < limit})
        self._places: list[_Place] = []
        self._next: list[_Next] = []

    def run(self, count: int) -> None:
        """Grow up to ``count`` tokens, the best first."""
        drafted = self._lookahead.drafted[self._request]
        cost = 0.0
        for depth, token_id in enumerate([*drafted, None]):
            cost = self._expand(depth, depth, cost, token_id)
        while self._next and count:
            best = heapq.heappop(self._next)
            self._push(best.number, best.at + 1)
            behind = self._places[best.number]
            token_id = self._known.tokens[behind.row][behind.ranks[best.at]]
            place = self._lookahead.grow(self._request, behind.place, token_id)
            if place is None:
                continue
            count -= 1
            if count:
                self._expand(place, behind.depth + 1, best.cost, None)

    def _expand(self, place: int, depth: int, cost: float, taken: int | None) -> float:
        """What may stand behind a place, ``depth`` tokens behind the text; cost: of the place.

        taken: the token that stands there already. Returns what a branch through it costs.
        """
        known, row = self._known, self._known.rows.get(depth)
        if row is None:
            return cost
        is_legal, total = known.legal(row, self._lookahead.row_at(self._request, place))
        if total == 0:
            return cost
        behind, tokens = cost + math.log(total), known.tokens[row]
        ranks = is_legal.nonzero()[0][: BREADTH + 1].tolist()
        # What is drafted and not known was certain: forced, or the only legal token.
        own = -1 if taken is None or taken not in tokens else tokens.index(taken)
        if own in ranks:
            ranks.remove(own)
        self._places.append(_Place(place, depth, behind, row, ranks))
        self._push(len(self._places) - 1, 0)
        return behind - known.logs[row][own] if own >= 0 and is_legal[own] else cost

    def _push(self, number: int, at: int) -> None:
        """The next token to grow behind a place, if there is one."""
        behind = self._places[number]
        if at < len(behind.ranks):
            cost = behind.cost - self._known.logs[behind.row][behind.ranks[at]]
            heapq.heappush(self._next, _Next(cost, number, at))
