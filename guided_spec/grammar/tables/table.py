"""Makes the table of a grammar, and compares it with the matchers that it replaces.

The rules are advanced by all tokens from all states at once. The table is then compared with the
grammar's own matcher in every state and on random texts.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import (
    EndLostError,
    Rules,
    RuleTexts,
    UnreadableGrammarError,
)
from guided_spec.grammar.completion.rule_endings import NOWHERE, ParseStates
from guided_spec.grammar.completion.rules import rules_of
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher, legal_row
from guided_spec.grammar.tables.token_table import (
    ANY_NUMBER,
    ENDED,
    MOST_AHEAD,
    OUTSIDE,
    REFUSED,
    TokenTable,
)
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar
from guided_spec.ops.mask_words import ids_of, num_mask_words, pack_row


class Clock:
    """Raises NoTableError in ``look`` once ``seconds`` of this thread's CPU time are spent."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.thread_time()

    def look(self) -> None:
        """Raise NoTableError if the time is spent."""
        if time.thread_time() - self._began > self._seconds:
            raise NoTableError(f"it takes longer than seconds={self._seconds:g}")


class ByteAutomaton(NamedTuple):
    """States 0 to N - 1, of which 0 is the start.

    kinds: int64 [256], of each byte; bytes of a kind lead from every state to the same one.
    then: int32 [N, kinds], the next state, or ``NOWHERE``. can_end: bool [N].
    is_open: bool [N], states that were not expanded: nothing is known about what comes after them.
    missing: int32 [N], bytes of the shortest path to the end.
    """

    kinds: NDArray[np.int64]
    then: NDArray[np.int32]
    can_end: NDArray[np.bool_]
    is_open: NDArray[np.bool_]
    missing: NDArray[np.int32]


def explore(rules: Rules, limits: TableLimits, clock: Clock) -> ByteAutomaton:
    """Expand states by every byte from the start, until none is new or their limit is reached.

    A state is a ``ParseState``: all readings of a text, each a position in the rules and the
    calls that are open around it. Two texts share a state only if these sets are equal, so both
    have the same continuations.

    Raises NoTableError for rules that no automaton can be made of.
    """
    try:
        parse_states = ParseStates(RuleTexts(rules, 0))
    except (EndLostError, UnreadableGrammarError) as error:
        raise NoTableError(f"its rules have no states: {error}") from error
    waiting = [(parse_states.start.depth, parse_states.start.number)]
    count, made = 1, list[int]()
    while waiting and count <= limits.states:
        clock.look()
        _, number = heapq.heappop(waiting)
        try:
            last = int(parse_states.rows((number,))[number].max())
        except EndLostError:
            continue  # too many readings of one text: it stays open
        made.append(number)
        for then in range(count, last + 1):
            heapq.heappush(waiting, (parse_states[then].depth, then))
        count = max(count, last + 1)
    rows = parse_states.rows(())[:count]
    _, first, kinds = np.unique(rows[made], axis=1, return_index=True, return_inverse=True)
    can_end = np.array([parse_states[number].can_end for number in range(count)])
    is_open = np.ones(count, dtype=np.bool_)
    is_open[made] = False
    missing = np.array([len(parse_states[number].text) for number in range(count)], dtype=np.int32)
    return ByteAutomaton(kinds.reshape(-1), rows[:, first], can_end, is_open, missing)


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


class _Columns:
    """Where texts lead from all states at once; texts with equal results share a column.

    values: uint16 [N] each, the state after the text from every state; ``refused`` where it is
    illegal, ``unknown`` where it passes an open state.

    The column of a text and one more byte is the byte's column, indexed by the text's. So there is
    one look-up for each distinct pair, however many tokens there are.
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
    """uint8 [N]: the ``margins`` of a ``TokenTable``. then: int16 [C, N]."""
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


_LONGEST_WALK = 400  # tokens, then another text begins


class Difference(NamedTuple):
    """Where a table and a matcher disagree.

    token_ids: the text. more: tokens that the table alone allows after it. fewer: that the
    matcher alone allows.
    """

    token_ids: tuple[int, ...]
    more: tuple[int, ...]
    fewer: tuple[int, ...]


class _Path(NamedTuple):
    """A text that leads to a state: the one of another state, and a token. depth: of it, tokens."""

    state: int
    before: int
    token_id: int
    depth: int


def tabled_part(compiled: CompiledGrammar) -> CompiledGrammar:
    """The grammar that a table can replace: the inner one where only unique keys are added."""
    return compiled.inner if isinstance(compiled, UniqueKeysGrammar) else compiled


def proven_table(compiled: CompiledGrammar, spelling: Spelling, limits: TableLimits) -> TokenTable:
    """The table of a compiled grammar, compared with a matcher in each of its states.

    Raises NoTableError where its rules are not known, where the table is beyond the limits, and
    where a matcher's row differs.
    """
    clock = Clock(limits.seconds)
    try:
        rules = rules_of(compiled)
    except UnreadableGrammarError as error:
        raise NoTableError(str(error)) from error
    table = build_table(rules, spelling, limits, clock)
    for text, state, matcher in _every_state(table, compiled):
        clock.look()
        if _differ(table, state, matcher) is not None:
            raise NoTableError(f"its matcher differs after the tokens {list(text)}")
    return table


def compare_steps(table: TokenTable, compiled: CompiledGrammar) -> Difference | None:
    """Compare the rows of every state, and those after one token of each class legal there.

    Each state is reached by a shortest text. So every entry of the table is checked, and the row
    after it.
    """
    _, first = np.unique(table.classes, return_index=True)
    for text, state, matcher in _every_state(table, compiled):
        found = _differ(table, state, matcher)
        if found is not None:
            return Difference(text, *found)
        for token_class in np.flatnonzero(table.then[state] != REFUSED).tolist():
            then, token_id = int(table.then[state, token_class]), int(first[token_class])
            if not matcher.accept_token(token_id) or matcher.is_terminated() != (then == ENDED):
                return Difference(text, (token_id,), ())
            found = _differ(table, then, matcher) if then >= 0 else None
            matcher.rollback(1)
            if found is not None:
                return Difference((*text, token_id), *found)
    return None


class Comparison(NamedTuple):
    """Random texts: how many tokens and texts, in how many states, and where they disagree."""

    steps: int
    texts: int
    states: int
    difference: Difference | None


def compare_texts(
    table: TokenTable, compiled: CompiledGrammar, steps: int, seed: int
) -> Comparison:
    """Compare every row on random texts of ``steps`` tokens in all, up to the first difference.

    In each state a class of tokens is drawn, then a token of it. So rare tokens come as often as
    the thousands that a string may hold. A text ends where it leaves the table or gets too long.
    """
    dice = random.Random(seed)
    members = _members(table)
    legal = [np.flatnonzero(then != REFUSED).tolist() for then in table.then]
    seen: set[int] = set()
    taken, texts = 0, 0
    while taken < steps:
        matcher, state, text = compiled.new_matcher(), 0, list[int]()
        texts += 1
        while state >= 0 and len(text) < _LONGEST_WALK and taken < steps:
            seen.add(state)
            found = _differ(table, state, matcher)
            if found is not None:
                return Comparison(taken, texts, len(seen), Difference(tuple(text), *found))
            token_id = int(dice.choice(members[dice.choice(legal[state])]))
            state = table.after(state, token_id)
            taken += 1
            if not matcher.accept_token(token_id) or matcher.is_terminated() != (state == ENDED):
                return Comparison(taken, texts, len(seen), Difference(tuple(text), (token_id,), ()))
            text.append(token_id)
    return Comparison(taken, texts, len(seen), None)


def _differ(
    table: TokenTable, state: int, matcher: GrammarMatcher
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Tokens that the table alone allows, and that the matcher alone allows; None if none."""
    theirs, ours = legal_row(matcher, len(table.classes)), table.row(state)
    if np.array_equal(theirs, ours):
        return None
    return tuple(ids_of(ours & ~theirs)), tuple(ids_of(theirs & ~ours))


def _members(table: TokenTable) -> list[NDArray[np.int64]]:
    """By class, its tokens."""
    order = np.argsort(table.classes, kind="stable")
    ends = np.searchsorted(table.classes[order], np.arange(1, table.then.shape[1]))
    return np.split(order, ends)


def _paths(table: TokenTable) -> list[_Path]:
    """A path to each state, of the fewest tokens."""
    _, first = np.unique(table.classes, return_index=True)
    ways = {0: _Path(0, -1, -1, 0)}
    waiting = [0]
    for state in waiting:
        thens, at = np.unique(table.then[state], return_index=True)
        for then, token_class in zip(thens.tolist(), at.tolist(), strict=True):
            if then >= 0 and then not in ways:
                ways[then] = _Path(then, state, int(first[token_class]), ways[state].depth + 1)
                waiting.append(then)
    return [ways[state] for state in waiting]


def _every_state(
    table: TokenTable, compiled: CompiledGrammar
) -> Iterator[tuple[tuple[int, ...], int, GrammarMatcher]]:
    """Yield for each state a text that leads to it, the state, and one matcher after that text.

    Raises NoTableError where the matcher refuses a text.
    """
    after: dict[int, list[_Path]] = {}
    for way in _paths(table):
        after.setdefault(way.before, []).append(way)
    matcher, text = compiled.new_matcher(), list[int]()
    waiting = after.get(-1, []).copy()
    while waiting:
        way = waiting.pop()
        if way.depth:
            matcher.rollback(len(text) - way.depth + 1)
            text[way.depth - 1 :] = [way.token_id]
            if not matcher.accept_token(way.token_id):
                raise NoTableError(f"its matcher refuses the last of the tokens {text}")
        yield tuple(text), way.state, matcher
        waiting.extend(after.get(way.state, ()))
