"""How the table of a grammar is made: its rules, followed by all tokens from all states at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import Rules
from guided_spec.grammar.completion.places import NOWHERE
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.rows import pack_row
from guided_spec.grammar.tables.automaton import ByteAutomaton, Clock, explore
from guided_spec.grammar.tables.token_table import (
    ANY_NUMBER,
    ENDED,
    MOST_AHEAD,
    OUTSIDE,
    REFUSED,
    TokenTable,
)
from guided_spec.ops.mask_words import num_mask_words

__all__ = ["build_table", "without_tokens"]

_PREFIXES = 4  # times the limit of bytes, for the columns of all beginnings of tokens


def build_table(rules: Rules, spelling: Spelling, limits: TableLimits, clock: Clock) -> TokenTable:
    """The table of a grammar's rules over a vocabulary.

    Raises NoTableError where it is beyond the limits, or where not even the start is inside.
    """
    automaton = explore(rules, limits, clock)
    columns = _Columns(automaton, limits, clock)
    of_tokens = columns.of_tokens(spelling)
    used, classes = np.unique(of_tokens, return_inverse=True)
    count = len(automaton.then)
    stop = np.where(automaton.can_end, count + 2, columns.refused).astype(np.uint16)
    then = np.stack([*(columns.values[at] for at in used.tolist()), stop])
    classes[spelling.stop_token_ids] = len(used)
    reached = _reached(then, (then != columns.unknown).all(axis=0))
    names = np.full(count + 3, OUTSIDE, dtype=np.int16)
    names[columns.refused], names[count + 2] = REFUSED, ENDED
    names[reached] = np.arange(len(reached))
    merged, index = _merge(names[then[:, reached]])
    ends = _longest_ends(merged, automaton.missing[reached], clock)
    return _with_rows(merged, index[classes], ends, limits, clock)


def without_tokens(
    table: TokenTable, lacking: Mapping[int, Sequence[int]], limits: TableLimits, clock: Clock
) -> TokenTable:
    """The same table, but that some tokens are refused in some states. lacking: token to states.

    Raises NoTableError where it is beyond the limits.
    """
    columns, classes = [*table.then.T], table.classes.copy()
    for token_id, states in lacking.items():
        column = table.then[:, table.classes[token_id]].copy()
        column[list(states)] = REFUSED
        classes[token_id] = len(columns)
        columns.append(column)
    used, numbers = np.unique(classes, return_inverse=True)
    merged, index = _merge(np.stack([columns[at] for at in used.tolist()]))
    return _with_rows(merged, index[numbers], table.ends, limits, clock)


class _Columns:
    """What texts do to all states at once; texts that do the same share a column.

    values: uint16 [N] each, the state behind the text from every state; ``refused`` where it is
    illegal, ``unknown`` where it passes an open state.

    The columns of a text and one byte more is the byte's, looked up at the text's: so there is one
    look-up for each distinct pair, however many tokens there are.
    """

    def __init__(self, automaton: ByteAutomaton, limits: TableLimits, clock: Clock) -> None:
        count, kinds = automaton.then.shape
        self.refused, self.unknown = count, count + 1
        self._kinds = automaton.kinds
        self._limit = _PREFIXES * limits.bytes
        self._clock = clock
        self._steps = np.full((kinds, count + 2), self.refused, dtype=np.uint16)
        then = automaton.then.T
        self._steps[:, :count] = np.where(then == NOWHERE, self.refused, then)
        self._steps[:, :count][:, automaton.is_open] = self.unknown
        self._steps[:, self.unknown] = self.unknown
        self.values: list[NDArray[np.uint16]] = []
        self._known: dict[bytes, int] = {}
        self._behind: dict[int, int] = {}
        self._empty = self._number(np.arange(count, dtype=np.uint16))
        self._nowhere = self._number(np.full(count, self.refused, dtype=np.uint16))

    def of_tokens(self, spelling: Spelling) -> NDArray[np.int64]:
        """int64 [V]: every token's column, an index into ``values``."""
        at = np.full(len(spelling.ids), self._empty, dtype=np.int64)
        for column in spelling.columns:
            pairs = at[: len(column)] * len(self._steps) + self._kinds[column]
            distinct, index = np.unique(pairs, return_inverse=True)
            behind = np.array([self._after(pair) for pair in distinct.tolist()], dtype=np.int64)
            at[: len(column)] = behind[index]
        found = np.full(spelling.vocab_size, self._nowhere, dtype=np.int64)
        found[spelling.ids] = at
        return found

    def _after(self, pair: int) -> int:
        known = self._behind.get(pair)
        if known is None:
            before, kind = divmod(pair, len(self._steps))
            known = self._behind[pair] = self._number(self._steps[kind][self.values[before]])
        return known

    def _number(self, column: NDArray[np.uint16]) -> int:
        key = column.tobytes()
        number = self._known.get(key)
        if number is None:
            self._clock.look()
            if (len(self.values) + 1) * len(key) > self._limit:
                raise NoTableError("too many tokens differ in it")
            number = self._known[key] = len(self.values)
            self.values.append(np.frombuffer(key, dtype=np.uint16))
        return number


def _reached(then: NDArray[np.uint16], is_inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64: the states inside that tokens lead to from the start; the start is the first."""
    if not is_inside[0]:
        raise NoTableError("it has too many states, from the first token on")
    is_reached = np.zeros(len(is_inside), dtype=np.bool_)
    new = np.zeros(1, dtype=np.int64)
    while len(new):
        is_reached[new] = True
        found = np.unique(then[:, new]).astype(np.int64)
        found = found[found < len(is_inside)]
        new = found[is_inside[found] & ~is_reached[found]]
    return np.flatnonzero(is_reached)


def _merge(then: NDArray[np.int16]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Distinct rows of ``then``, and which of them each row is."""
    distinct, index = np.unique(then, axis=0, return_inverse=True)
    return distinct, index.reshape(-1)


def _with_rows(
    then: NDArray[np.int16],
    classes: NDArray[np.int64],
    ends: NDArray[np.int32],
    limits: TableLimits,
    clock: Clock,
) -> TokenTable:
    """then: int16 [C, N]. classes: int64 [V]. The others are those of ``TokenTable``."""
    allowed, row_of = np.unique(then.T != REFUSED, axis=0, return_inverse=True)
    words = num_mask_words(len(classes))
    size = then.nbytes + 4 * (len(classes) + len(row_of) + words * len(allowed))
    if size > limits.bytes:
        raise NoTableError(f"it takes {size} bytes, more than bytes={limits.bytes}")
    rows = np.empty((len(allowed), words), dtype=np.int32)
    for row, is_legal in zip(rows, allowed, strict=True):
        clock.look()
        row[:] = pack_row(is_legal[classes])
    return TokenTable(
        classes.astype(np.int32),
        np.ascontiguousarray(then.T),
        rows,
        row_of.reshape(-1).astype(np.int32),
        _margins(then, clock),
        ends,
    )


def _longest_ends(
    then: NDArray[np.int16], missing: NDArray[np.int32], clock: Clock
) -> NDArray[np.int32]:
    """``TokenTable.ends``; then: int16 [C, N]. missing: [N], of each state itself."""
    before: list[list[int]] = [[] for _ in missing]
    for state, thens in enumerate(then.T):
        clock.look()
        for following in set(thens.tolist()):
            if following >= 0:
                before[following].append(state)
    ends = [-1] * len(missing)
    for most in np.argsort(-missing, kind="stable").tolist():
        waiting = [most]
        while waiting:  # what leads there, and to no state that misses more
            state = waiting.pop()
            if ends[state] < 0:
                ends[state] = int(missing[most])
                waiting += before[state]
    return np.array(ends, dtype=np.int32)


def _margins(then: NDArray[np.int16], clock: Clock) -> NDArray[np.uint8]:
    """See ``TokenTable``; then: int16 [C, N]."""
    margins = np.full(then.shape[1], ANY_NUMBER, dtype=np.uint8)
    leads_out = (then == OUTSIDE).any(axis=0)
    for margin in range(MOST_AHEAD if leads_out.any() else 0):
        clock.look()
        margins[leads_out & (margins == ANY_NUMBER)] = margin
        known = np.append(leads_out, [False] * 3)  # for what is no state
        before = known[then].any(axis=0) | leads_out
        if np.array_equal(before, leads_out):
            break
        leads_out = before
    return margins
