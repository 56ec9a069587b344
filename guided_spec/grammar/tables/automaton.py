"""A grammar's rules as one automaton over bytes, as far as its states are finitely many."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import ConfigError
from guided_spec.grammar.completion.endings import EndLostError, Rules, UnreadableGrammarError
from guided_spec.grammar.completion.places import Places

__all__ = ["ByteAutomaton", "Clock", "NoTableError", "TableLimits", "explore"]

MOST_STATES = 2**15 - 1  # a state is an int16


class NoTableError(Exception):
    """Why a grammar has no table. Never leaves the package."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """What one table may cost. A grammar that goes beyond it stays with its matchers.

    states: of the automaton over bytes, 32,767 at most. Of a grammar that has more, such as one of
        JSON values inside each other, the table holds so many, those with the fewest open rules
        first; a text that leaves them goes on with a matcher.
    seconds: of making and proving it. bytes: of the finished table.

    Raises ConfigError for a limit that is not positive, or too many states.
    """

    states: int = 8192
    seconds: float = 30.0
    bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(field.name, value, "must be a positive number")
        if self.states > MOST_STATES:
            raise ConfigError("states", self.states, f"must be at most {MOST_STATES}")


class Clock:
    """Raises NoTableError at a look that comes ``seconds`` after it was made."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.perf_counter()

    def look(self) -> None:
        """Raise if it is late."""
        if time.perf_counter() - self._began > self._seconds:
            raise NoTableError(f"it takes longer than {self._seconds:g} seconds")


class ByteAutomaton(NamedTuple):
    """States 0 to N - 1, of which 0 is the start.

    kinds: int64 [256], of each byte; bytes of a kind lead from every state to the same one.
    then: int32 [N, kinds], the next state, or ``NOWHERE``. can_end: bool [N].
    is_open: bool [N], states that were not followed: nothing is known about what comes after them.
    """

    kinds: NDArray[np.int64]
    then: NDArray[np.int32]
    can_end: NDArray[np.bool_]
    is_open: NDArray[np.bool_]


def explore(rules: Rules, limits: TableLimits, clock: Clock) -> ByteAutomaton:
    """Follow every byte from the start, until nothing new comes or the limit of states is reached.

    A state is a ``Place``: the set of all readings of a text, each a position in the rules and the
    calls that are open around it. Two texts share a state only if these sets are equal, so that
    whatever may follow the one may follow the other.

    Raises NoTableError for rules that no automaton can be made of.
    """
    try:
        places = Places(rules, 0)
    except (EndLostError, UnreadableGrammarError) as error:
        raise NoTableError(f"its rules have no states: {error}") from error
    waiting = [(places.start.depth, places.start.number)]
    count, made = 1, list[int]()
    while waiting and count <= limits.states:
        clock.look()
        _, number = heapq.heappop(waiting)
        try:
            last = int(places.rows((number,))[number].max())
        except EndLostError:
            continue  # too many readings of one text: it stays open
        made.append(number)
        for then in range(count, last + 1):
            heapq.heappush(waiting, (places[then].depth, then))
        count = max(count, last + 1)
    rows = places.rows(())[:count]
    _, first, kinds = np.unique(rows[made], axis=1, return_index=True, return_inverse=True)
    can_end = np.array([places[number].can_end for number in range(count)])
    is_open = np.ones(count, dtype=np.bool_)
    is_open[made] = False
    return ByteAutomaton(kinds.reshape(-1), rows[:, first], can_end, is_open)
