"""Patterns as sets of texts: one without another, both at once, and none of one.

``re`` writes these as lookahead and word boundaries, and JSON schemas as ``not`` and ``allOf``.
Backends know none of them. Here patterns become automata over classes of characters, whose product
is written as a pattern.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.characters import Ranges, category, code_points, normalize, set_of
from guided_spec.grammar.regex import (
    BOUNDARIES,
    RE_PARSER,
    begun_with,
    readable,
    to_fullmatch,
    to_search_bounded,
)
from guided_spec.grammar.steps import spend

_LONGEST = 4_096  # characters of a pattern that is read
_MOST_WRITTEN = 16_384  # and of one that is written
_MOST_STATES = 1_024
_MOST_RANGES = 48  # of a class that is written
_LOOKS = re.compile(r"\(\?[=!]|\\[bB]")
_FLAGS = re.compile(r"\(\?[aims]+\)")
_ONE = re.compile(r"\[[^]]*\]|\w|\\u\w{4}|\\U\w{8}")  # character or class, as written here
_FIRST = ("AT_BEGINNING", "AT_BEGINNING_STRING")


class Texts(NamedTuple):
    """A set of texts. pattern: for them as whole texts, as ``to_search`` writes it.

    is_in: whether these texts are meant, or all others.
    """

    pattern: str
    is_in: bool = True


@lru_cache(maxsize=1024)  # a schema is read more than once
def without_looks(pattern: str) -> str | None:
    """A pattern that ``re.search`` finds in the same texts, without the lookahead it begins with
    and without word boundaries.

    As ``to_fullmatch`` it may match fewer. None where there is other lookahead, or neither, and
    where the pattern would be very long.
    """
    if len(pattern) > _LONGEST or not _LOOKS.search(pattern):
        return None
    try:
        items = RE_PARSER.parse(pattern)
        return in_all(list(_looked_at(pattern, list(items), items.state.flags)))
    except (re.error, OverflowError, RecursionError, GrammarCompileError):
        return None


def to_whole(pattern: str) -> str:
    """``to_fullmatch`` of a pattern that may begin with lookahead and may have word boundaries.

    Raises what that does.
    """
    if not _LOOKS.search(pattern):
        return to_fullmatch(pattern)
    found = _FLAGS.match(pattern)
    flags, rest = ("", pattern) if found is None else (found[0], pattern[found.end() :])
    return to_fullmatch(without_looks(f"{flags}^(?:{rest})\\Z") or pattern)


def outside(pattern: str) -> str | None:
    """A pattern for the texts in which ``re.search`` finds none of ``pattern``.

    None where it is no regular language, and where the pattern would be very long.
    """
    if len(pattern) > _LONGEST:
        return None
    try:
        return in_all([Texts(to_search_bounded(pattern, most=True), is_in=False)])
    except (GrammarCompileError, RecursionError):
        return None


@lru_cache(maxsize=1024)  # each branch of a oneOf is held against each other one
def are_apart(one: str, other: str) -> bool:
    """Whether ``re.search`` finds the two patterns in no text together; False where unsure."""
    if len(one) > _LONGEST or len(other) > _LONGEST:
        return False
    try:
        both = [Texts(to_search_bounded(pattern, most=True)) for pattern in (one, other)]
        table, _ = _table_of(both)
    except (GrammarCompileError, RecursionError):
        return False
    return not any(table.ends)


def _looked_at(pattern: str, items: Sequence[Any], flags: int) -> Iterator[Texts]:
    at = 0
    if not items or str(items[0][1]) not in _FIRST:
        yield Texts(to_search_bounded(pattern))
        return
    while at < len(items) and str(items[at][0]) in ("AT", "ASSERT", "ASSERT_NOT"):
        op, value = str(items[at][0]), items[at][1]
        if op == "AT":
            if str(value) not in _FIRST:
                break
        elif value[0] < 0:
            raise GrammarCompileError("it looks behind")
        else:
            is_in = op == "ASSERT"
            written = begun_with(pattern, [items[0], *value[1]], flags, most=not is_in)
            yield Texts(written, is_in)
        at += 1
    yield Texts(begun_with(pattern, [items[0], *items[at:]], flags))


def searched(pattern: str, *, is_in: bool = True) -> Texts:
    """The texts in which ``re.search`` finds a pattern, or those in which it does not.

    Fewer where it is unsure. Raises GrammarCompileError for what is no regular language.
    """
    return Texts(to_search_bounded(pattern, most=not is_in), is_in)


def in_all(sets: Sequence[Texts]) -> str | None:
    """A pattern for the texts in all of ``sets``, for Python's ``re``; None where there is none.

    Raises GrammarCompileError for one of many states, and one that would be very long.
    """
    table, classes = _table_of(sets)
    if not any(table.ends):
        return None
    for most in (sys.maxunicode, _MOST_RANGES):  # as they are, or else the widest
        written = _Elimination(table, [_some(one, most) for one in classes]).write()
        if written is not None and len(written) <= _MOST_WRITTEN:
            return f"^(?:{written})\\Z"
    raise GrammarCompileError("a pattern that would be very long")


def _table_of(sets: Sequence[Texts]) -> tuple[_Table, list[Ranges]]:
    """The automaton of the texts in all of ``sets``, and the classes of characters of its edges."""
    parsed = [RE_PARSER.parse(readable(one.pattern)) for one in sets]
    classes = _classes(pair for items in parsed for pair in _sets(items))
    machines = [_Machine(items, classes) for items in parsed]
    return _product(machines, [one.is_in for one in sets], classes), classes


def _sets(items: Any) -> Iterator[Ranges]:
    for op, value in items:
        match str(op):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                yield code_points([(op, value)])
            case "SUBPATTERN":
                yield from _sets(value[3])
            case "BRANCH":
                for option in value[1]:
                    yield from _sets(option)
            case "MAX_REPEAT" | "MIN_REPEAT":
                yield from _sets(value[2])
            case "AT":
                yield category("word", ascii_only=False)


_ALL: Ranges = ((1, 0xD7FF), (0xE000, 0x10FFFF))  # U+0000 is matched by nothing that is written


def _classes(sets: Iterable[Ranges]) -> list[Ranges]:
    """Characters that no set tells from each other, together; they are all characters."""
    known = list(dict.fromkeys(sets))
    bounds = sorted(
        {edge for one in (_ALL, *known) for low, high in one for edge in (low, high + 1)}
    )
    spend(len(bounds) * (1 + len(known)))
    if len(bounds) * len(known) > 10**6:
        raise GrammarCompileError("a pattern of too many classes")
    starts: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    iterators = [_Member(one) for one in (_ALL, *known)]
    for low, end in zip(bounds, bounds[1:], strict=False):
        found = tuple(one.holds(low) for one in iterators)
        if found[0]:
            starts.setdefault(found, []).append((low, end - 1))
    return [normalize(ranges) for ranges in starts.values()]


class _Member:
    """Whether ascending characters are in a set."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._at = 0

    def holds(self, code: int) -> int:
        while self._at < len(self._ranges) and self._ranges[self._at][1] < code:
            self._at += 1
        return int(self._at < len(self._ranges) and self._ranges[self._at][0] <= code)


class _Machine:
    """A nondeterministic automaton: edges by class, and edges without a character.

    bounds: edges without a character that hold where a word begins or ends (True), or elsewhere.
    """

    def __init__(self, items: Any, classes: list[Ranges]) -> None:
        self._classes = classes
        self._numbers: dict[Ranges, frozenset[int]] = {}
        self.edges: list[list[tuple[frozenset[int], int]]] = []
        self.skips: list[list[int]] = []
        self.bounds: list[list[tuple[bool, int]]] = []
        self.start, self.end = self._new(), self._new()
        self._sequence(list(items), self.start, self.end)

    def closure(self, states: Iterable[int], *, is_bound: bool | None) -> frozenset[int]:
        """These and all that are reached without a character.

        is_bound: whether a word begins or ends here; None takes it for neither.
        """
        found, waiting = set[int](), list(states)
        while waiting:
            state = waiting.pop()
            if state not in found:
                found.add(state)
                waiting += self.skips[state]
                waiting += [then for wanted, then in self.bounds[state] if wanted == is_bound]
        spend(1 + len(found))
        return frozenset(found)

    def step(self, states: frozenset[int], number: int) -> frozenset[int]:
        """The states right after a character of a class. states: a closure."""
        edges = (edge for state in states for edge in self.edges[state])
        return frozenset(then for own, then in edges if number in own)

    def _new(self) -> int:
        if len(self.edges) >= 4 * _MOST_STATES:
            raise GrammarCompileError("a pattern of too many states")
        spend(2)
        self.edges.append([])
        self.skips.append([])
        self.bounds.append([])
        return len(self.edges) - 1

    def _sequence(self, items: Sequence[Any], first: int, last: int) -> None:
        at = first
        for op, value in items:
            then = self._new()
            self._item(str(op), value, at, then)
            at = then
        self.skips[at].append(last)

    def _item(self, op: str, value: Any, first: int, last: int) -> None:
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                self.edges[first].append((self._within(set_of(op, value, re.DOTALL)), last))
            case "SUBPATTERN":
                self._sequence(list(value[3]), first, last)
            case "BRANCH":
                for option in value[1]:
                    self._sequence(list(option), first, last)
            case "MAX_REPEAT" | "MIN_REPEAT":
                self._repeat(value, first, last)
            case "AT" if str(value) in BOUNDARIES:
                self.bounds[first].append((str(value) == "AT_BOUNDARY", last))
            case _:
                raise GrammarCompileError("a pattern that is no regular language")

    def _repeat(self, value: Any, first: int, last: int) -> None:
        low, high, inner = value
        at = first
        for _ in range(low):
            then = self._new()
            self._sequence(list(inner), at, then)
            at = then
        if high is RE_PARSER.MAXREPEAT:
            loop = self._new()
            self.skips[at].append(loop)
            self._sequence(list(inner), loop, loop)
            at = loop
        else:
            for _ in range(high - low):
                then = self._new()
                self._sequence(list(inner), at, then)
                self.skips[at].append(last)
                at = then
        self.skips[at].append(last)

    def _within(self, ranges: Ranges) -> frozenset[int]:
        known = self._numbers.get(ranges)
        if known is None:
            members = [_Member(ranges) for _ in self._classes]
            pairs = zip(members, self._classes, strict=True)
            held = [member.holds(one[0][0]) for member, one in pairs]
            known = frozenset(number for number, is_held in enumerate(held) if is_held)
            self._numbers[ranges] = known
        return known


class _Table(NamedTuple):
    """A deterministic automaton from state 0.

    edges: by state, by class, the next state. ends: by state, whether a text may end.
    """

    edges: list[list[int]]
    ends: list[bool]


class _State(NamedTuple):
    """own: the states of each machine, before what is reached without a character. is_word: whether
    the last character is a word's, where a machine asks for it."""

    own: tuple[frozenset[int], ...]
    is_word: bool = False


def _product(
    machines: Sequence[_Machine], is_in: Sequence[bool], classes: Sequence[Ranges]
) -> _Table:
    """Of the texts that each machine takes, or does not, as ``is_in`` says."""
    start = _State(tuple(frozenset([machine.start]) for machine in machines))
    numbers, waiting = {start: 0}, deque([start])
    words = _words_among(classes) if any(any(one.bounds) for one in machines) else ()
    edges: list[list[int]] = []
    ends: list[bool] = []
    while waiting:
        state = waiting.popleft()
        pairs = list(zip(machines, state.own, strict=True))
        bounded = [
            tuple(one.closure(own, is_bound=is_bound) for one, own in pairs)
            for is_bound in (False, True)
        ]
        last = list(zip(machines, bounded[state.is_word], is_in, strict=True))
        if state == start:  # before Python 3.14 the empty text has no \B
            last = [
                (one, one.closure([one.start], is_bound=None) if wanted else own, wanted)
                for one, own, wanted in last
            ]
        ends.append(all((machine.end in own) == wanted for machine, own, wanted in last))
        row = []
        for number in range(len(classes)):
            is_word = number in words
            here = zip(machines, bounded[is_word != state.is_word], strict=True)
            then = _State(tuple(machine.step(own, number) for machine, own in here), is_word)
            if then not in numbers:
                if len(numbers) >= _MOST_STATES:
                    raise GrammarCompileError("patterns of too many states")
                numbers[then] = len(numbers)
                waiting.append(then)
            row.append(numbers[then])
        edges.append(row)
    return _smallest(_Table(edges, ends))


def _words_among(classes: Sequence[Ranges]) -> frozenset[int]:
    """Those classes that are of words' characters; no class has others too."""
    word = category("word", ascii_only=False)
    pairs = enumerate(classes)
    return frozenset(at for at, one in pairs if _Member(word).holds(one[0][0]))


def _smallest(table: _Table) -> _Table:
    """The automaton with states joined that no text tells apart (Moore's algorithm)."""
    group = [int(end) for end in table.ends]
    count = len(set(group))
    while True:
        spend(len(group) * len(table.edges[0]) if table.edges[0] else 1)
        keys = [(group[s], *(group[t] for t in row)) for s, row in enumerate(table.edges)]
        numbers = {key: at for at, key in enumerate(dict.fromkeys(keys))}
        group = [numbers[key] for key in keys]
        if len(numbers) == count:
            break
        count = len(numbers)
    first: dict[int, int] = {}
    for state, number in enumerate(group):
        first.setdefault(number, state)
    edges = [[group[t] for t in table.edges[first[n]]] for n in range(count)]
    return _Table(edges, [table.ends[first[n]] for n in range(count)])


class _Elimination:
    """Writes an automaton as a pattern: one state after another is replaced by what goes by it."""

    def __init__(self, table: _Table, classes: list[Ranges]) -> None:
        first, last = len(table.edges), len(table.edges) + 1
        self._into: list[dict[int, str]] = [{} for _ in range(last + 1)]
        self._out: list[dict[int, str]] = [{} for _ in range(last + 1)]
        self._first, self._last = first, last
        self._add(first, 0, "")
        for state, row in enumerate(table.edges):
            by_then: dict[int, list[tuple[int, int]]] = {}
            for number, then in enumerate(row):
                by_then.setdefault(then, []).extend(classes[number])
            for then, ranges in by_then.items():
                self._add(state, then, _class(normalize(ranges)))
            if table.ends[state]:
                self._add(state, last, "")

    def write(self) -> str | None:
        """The pattern; None where there is no text, or it would be very long."""
        self._drop_dead()
        left = [s for s in range(self._first) if self._out[s] and self._into[s]]
        while left:
            state = min(left, key=self._weight)
            left.remove(state)
            if not self._eliminate(state):
                return None
        return self._out[self._first].get(self._last)

    def _drop_dead(self) -> None:
        alive, waiting = set[int](), [self._last]
        while waiting:
            state = waiting.pop()
            if state not in alive:
                alive.add(state)
                waiting += self._into[state]
        for state in range(self._first):
            if state not in alive:
                for before in list(self._into[state]):
                    del self._out[before][state]
                for then in list(self._out[state]):
                    self._into[then].pop(state, None)
                self._into[state], self._out[state] = {}, {}

    def _weight(self, state: int) -> int:
        own = self._out[state].get(state, "")
        into = sum(len(text) for before, text in self._into[state].items() if before != state)
        out = sum(len(text) for then, text in self._out[state].items() if then != state)
        num_in, num_out = len(self._into[state]) - bool(own), len(self._out[state]) - bool(own)
        return into * num_out + out * num_in + len(own) * num_in * num_out

    def _eliminate(self, state: int) -> bool:
        into, out = self._into[state], self._out[state]
        own = into.pop(state, None)
        out.pop(state, None)
        loop = "" if not own else f"{_atom(own)}*"
        for before, left in into.items():
            for then, right in out.items():
                text = f"{left}{loop}{right}"
                if len(text) > _MOST_WRITTEN:
                    return False
                self._add(before, then, text)
        for before in into:
            del self._out[before][state]
        for then in out:
            del self._into[then][state]
        self._into[state], self._out[state] = {}, {}
        return True

    def _add(self, before: int, then: int, text: str) -> None:
        known = self._out[before].get(then)
        joined = text if known is None else _either(known, text)
        self._out[before][then] = self._into[then][before] = joined
        spend(1 + len(joined) // 8)


def _some(ranges: Ranges, most: int) -> Ranges:
    """At most so many ranges of a class, such as that of all letters: the first and the widest."""
    if len(ranges) <= most:
        return ranges
    half = most // 2
    rest = sorted(ranges[half:], key=lambda pair: pair[0] - pair[1])
    return normalize([*ranges[:half], *rest[: most - half]])


def _either(one: str, other: str) -> str:
    if one == other:
        return one
    if not one or not other:
        return f"{_atom(one or other)}?"
    return f"(?:{one}|{other})"


def _atom(text: str) -> str:
    """The text as what a quantifier after it repeats."""
    is_class = _ONE.fullmatch(text) is not None
    is_group = text.startswith("(?:") and text.endswith(")") and _closes_last(text)
    return text if is_class or is_group else f"(?:{text})"


def _closes_last(text: str) -> bool:
    """Whether the first parenthesis closes with the last one; classes here hold none."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at == len(text) - 1
    return False


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    return f"[{''.join(_range(low, high) for low, high in ranges)}]"


def _range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
