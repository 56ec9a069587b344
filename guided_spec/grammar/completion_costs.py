"""How many tokens the shortest end of a document takes, behind every token of the vocabulary."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion_endings import NEVER, pack_row
from guided_spec.grammar.completion_places import NOWHERE, Place, Places
from guided_spec.grammar.completion_spelling import Spelling
from guided_spec.grammar.protocol import GrammarMatcher

__all__ = ["RuleEndings"]

_TABLES = 64  # of int32 [V], that a grammar keeps
_MOST_KNOWN = 1 << 16


class RuleEndings:
    """``Endings`` by a grammar's rules: a state is a ``Place``, and nothing is searched.

    A place costs the tokens that write the shortest way from it to the end of the document, and the
    stop token. It is attained: the first of these tokens leads to a place that costs one less,
    because the rest of a shortest way is the shortest way from there.

    Every byte of a shortest way has to be a token of the vocabulary.
    """

    def __init__(self, places: Places, spelling: Spelling) -> None:
        self._places = places
        self._spelling = spelling
        self._tables: OrderedDict[int, NDArray[np.int32]] = OrderedDict()
        self._most: dict[int, int] = {}

    @property
    def is_filling_up(self) -> bool:
        """Whether further texts should get endings of their own."""
        return self._places.is_filling_up

    @property
    def start(self) -> Place:
        """The place of the empty text."""
        return self._places.start

    def after(self, state: Place, token_id: int, matcher: GrammarMatcher) -> Place | None:
        """The place behind a token that is not a stop token; None where it is illegal."""
        del matcher
        data = self._spelling.token_bytes[token_id]
        return self._places.after(state, data) if data else None

    def cost(self, state: Place) -> int:
        """Tokens within which the text can be ended: at least 1."""
        return self._spelling.num_tokens(state.text) + 1

    def is_free(self, state: Place, remaining: int) -> bool:
        """Whether every token leads to a place that costs less than ``remaining``. Exact."""
        if remaining - 1 > state.most_missing:  # a token for every missing byte, and the stop token
            return True
        most = self._most.get(state.number)
        if most is None:
            table = self.table(state)
            most = int(table[table < NEVER].max(initial=0))
            if len(self._most) > _MOST_KNOWN:
                self._most.clear()
            self._most[state.number] = most
        return remaining > most

    def row(self, state: Place, remaining: int, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a place that costs less than ``remaining``."""
        del matcher
        return pack_row(self.table(state) < remaining)

    def table(self, state: Place) -> NDArray[np.int32]:
        """int32 [V]: the cost of the place behind each token, ``NEVER`` where it is illegal.

        0 for a stop token where the document may end. Read only.
        """
        table = self._tables.get(state.number)
        if table is None:
            table = self._make(state)
            self._tables[state.number] = table
            if len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        return table

    def _make(self, state: Place) -> NDArray[np.int32]:
        spelling = self._spelling
        table: NDArray[np.int32] = np.full(spelling.vocab_size, NEVER, dtype=np.int32)
        if state.can_end:
            table[spelling.stop_token_ids] = 0
        ends = self._follow(state)
        reached = _distinct(ends[ends != NOWHERE])
        if reached:
            costs: NDArray[np.int32] = np.full(reached[-1] + 2, NEVER, dtype=np.int32)
            for number in reached:
                costs[number] = min(NEVER, self.cost(self._places[number]))
            table[spelling.ids] = costs[ends]  # the last one, NEVER, is that of NOWHERE
        return table

    def _follow(self, state: Place) -> NDArray[np.int32]:
        """int32 [tokens]: the place behind each of ``Spelling.ids``, or ``NOWHERE``."""
        ids = self._spelling.ids
        ends: NDArray[np.int32] = np.full(len(ids), state.number, dtype=np.int32)
        alive = np.arange(len(ids))
        for column in self._spelling.columns:
            alive = alive[: int(np.searchsorted(alive, len(column)))]
            if not len(alive):
                break
            at = ends[alive]
            rows = self._places.rows(_distinct(at))
            ends[alive] = at = rows[at, column[alive]]
            alive = alive[at != NOWHERE]
        return ends


def _distinct(numbers: NDArray[np.int32]) -> list[int]:
    if not len(numbers):
        return []
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found
