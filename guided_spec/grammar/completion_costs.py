"""How many tokens the shortest end of a document takes, behind every token of the vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion_endings import pack_row
from guided_spec.grammar.completion_places import NOWHERE, Place, Places
from guided_spec.grammar.completion_spelling import Spelling
from guided_spec.grammar.protocol import GrammarMatcher

__all__ = ["RuleEndings"]

_TABLES = 32  # of int16 [V], that a grammar keeps
_NEVER = int(np.iinfo(np.int16).max)
_MOST_KNOWN = 1 << 16
_MANY = 2048  # tokens that are worth a look at what they are made of
_RUN = 16  # characters of them
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


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
        self._tables: OrderedDict[int, NDArray[np.int16]] = OrderedDict()
        self._most: dict[int, int] = {}

    @property
    def is_exact(self) -> bool:
        """Always."""
        return True

    @property
    def is_filling_up(self) -> bool:
        """Whether further texts should get endings of their own."""
        return self._places.is_filling_up

    @property
    def memory_size_bytes(self) -> int:
        """Of the places and the tables."""
        return self._places.memory_size_bytes + len(self._tables) * 2 * self._spelling.vocab_size

    @property
    def start(self) -> Place:
        """The place of the empty text."""
        return self._places.start

    def cost(self, state: Place) -> int:
        """Tokens within which the text can be ended: at least 1."""
        return self._spelling.num_tokens(state.text) + 1

    def stride(self, state: Place, remaining: int) -> int:
        """One: each token is followed."""
        del state, remaining
        return 1

    def after(
        self, state: Place, token_ids: Sequence[int], matcher: GrammarMatcher
    ) -> Place | None:
        """The place behind some tokens; None where these rules do not allow them."""
        del matcher
        place: Place | None = state
        for token_id in token_ids:
            data = self._spelling.token_bytes[token_id]
            place = self._places.after(place, data) if place is not None and data else None
        return place

    def is_free(self, state: Place, remaining: int) -> bool:
        """Whether every token leads to a place that costs less than ``remaining``. Exact."""
        if remaining - 1 > state.most_missing:  # a token for every missing byte, and the stop token
            return True
        most = self._most.get(state.number)
        if most is None:
            table = self.table(state)
            most = int(table[table < _NEVER].max(initial=0))
            if len(self._most) > _MOST_KNOWN:
                self._most.clear()
            self._most[state.number] = most
        return remaining > most

    def row(self, state: Place, remaining: int, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a place that costs less than ``remaining``."""
        del matcher
        return pack_row(self.table(state) < min(remaining, _NEVER))

    def admits(self, state: Place, token_id: int, remaining: int, matcher: GrammarMatcher) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        if not 0 <= token_id < self._spelling.vocab_size or token_id in self._spelling.stops:
            return True  # whether such a token is legal, the grammar alone knows
        then = self.after(state, (token_id,), matcher)
        return then is not None and self.cost(then) < min(remaining, _NEVER)

    def table(self, state: Place) -> NDArray[np.int16]:
        """int16 [V]: the cost of the place behind each token, 32,767 where it is illegal.

        0 for a stop token where the document may end. Read only.
        """
        table = self._tables.get(state.number)
        if table is None:
            table = self._make(state)
            self._tables[state.number] = table
            if len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        return table

    def _make(self, state: Place) -> NDArray[np.int16]:
        spelling = self._spelling
        table: NDArray[np.int16] = np.full(spelling.vocab_size, _NEVER, dtype=np.int16)
        if state.can_end:
            table[spelling.stop_token_ids] = 0
        first = self._places.rows((state.number,))[state.number]
        heads = [spelling.heads[byte] for byte in np.flatnonzero(first != NOWHERE).tolist()]
        if sum(map(len, heads)) > _MANY:
            is_legal = first[spelling.columns[0]] != NOWHERE
            self._run(state, table, is_legal)
            tokens = np.flatnonzero(is_legal)
        else:
            tokens = np.sort(np.concatenate([_NONE, *heads]))
        self._follow(state, table, tokens)
        return table

    def _run(self, state: Place, table: NDArray[np.int16], is_legal: NDArray[np.bool_]) -> None:
        """Inside a string most tokens are characters of one kind, and need not be followed.

        Writes their costs, and takes them out of ``is_legal``, bool [tokens].
        """
        spelling, run = self._spelling, self._places.run(state.number, _RUN)
        if len(run.places) < 2:
            return
        is_easy = spelling.made_of(run.characters)
        is_easy &= spelling.num_characters < len(run.places)
        easy = np.flatnonzero(is_easy)
        costs = self._costs(run.places)
        table[spelling.ids[easy]] = costs[run.places[spelling.num_characters[easy]]]
        is_legal &= ~is_easy

    def _follow(self, state: Place, table: NDArray[np.int16], tokens: NDArray[np.int64]) -> None:
        """Write the costs behind tokens, indices into ``Spelling.ids``, byte by byte."""
        spelling, places = self._spelling, self._places
        ends: NDArray[np.int32] = np.full(len(tokens), state.number, dtype=np.int32)
        alive = np.arange(len(tokens))
        for column in spelling.columns:
            alive = alive[: int(np.searchsorted(tokens[alive], len(column)))]
            if not len(alive):
                break
            at = ends[alive]
            rows = places.rows(_distinct(at))
            ends[alive] = at = rows[at, column[tokens[alive]]]
            alive = alive[at != NOWHERE]
        is_legal = ends != NOWHERE
        ends = ends[is_legal]
        table[spelling.ids[tokens[is_legal]]] = self._costs(ends)[ends]

    def _costs(self, numbers: NDArray[np.int32]) -> NDArray[np.int16]:
        """int16 [places]: the cost of each place among ``numbers``."""
        reached = _distinct(numbers)
        costs: NDArray[np.int16] = np.full(max(reached, default=-1) + 1, _NEVER, dtype=np.int16)
        for number in reached:
            costs[number] = min(_NEVER, self.cost(self._places[number]))
        return costs


def _distinct(numbers: NDArray[np.int32]) -> list[int]:
    if not len(numbers):
        return []
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found
