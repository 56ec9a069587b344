"""A grammar's rules as one automaton over bytes, as far as its states are finitely many."""

from __future__ import annotations

import heapq
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import EndLostError, Rules, UnreadableGrammarError
from guided_spec.grammar.completion.places import Places
from guided_spec.grammar.limits import NoTableError, TableLimits

__all__ = ["ByteAutomaton", "Clock", "explore"]


class Clock:
    """Raises NoTableError at a look behind ``seconds`` of this thread's own time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.thread_time()

    def look(self) -> None:
        """Raise if it is late."""
        if time.thread_time() - self._began > self._seconds:
            raise NoTableError(f"it takes longer than seconds={self._seconds:g}")


class ByteAutomaton(NamedTuple):
    """States 0 to N - 1, of which 0 is the start.

    kinds: int64 [256], of each byte; bytes of a kind lead from every state to the same one.
    then: int32 [N, kinds], the next state, or ``NOWHERE``. can_end: bool [N].
    is_open: bool [N], states that were not followed: nothing is known about what comes after them.
    missing: int32 [N], bytes of the shortest way to the end.
    """

    kinds: NDArray[np.int64]
    then: NDArray[np.int32]
    can_end: NDArray[np.bool_]
    is_open: NDArray[np.bool_]
    missing: NDArray[np.int32]


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
    missing = np.array([len(places[number].text) for number in range(count)], dtype=np.int32)
    return ByteAutomaton(kinds.reshape(-1), rows[:, first], can_end, is_open, missing)
