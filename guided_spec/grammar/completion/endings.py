"""How a text can end in time: rules as automata over bytes, and the shortest text of each state."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.steps import spend
from guided_spec.grammar.text.row_filter import Probe

NEVER = int(np.iinfo(np.int32).max)
"""The cost of what cannot be."""


class EndLostError(Exception):
    """Following a text takes more memory than it is worth. Never leaves the package."""


class Endings(Protocol):
    """How the texts of one grammar can end; shared by requests and threads.

    A state is the position of a text; it depends on the text's tokens and budget alone. Its cost
    is a number of tokens within which the text can be ended, the stop token among them, and some
    legal token leads from each state to one whose cost is smaller by one or more. All but ``start``
    and ``cost`` may raise EndLostError.

    vocab_size: V. is_exact: whether costs are the least there are, and every token is judged by
    them.
    """

    vocab_size: int
    is_exact: bool

    @property
    def is_filling_up(self) -> bool:
        """Whether new texts should get new endings: these have few states left to give."""
        return False

    @property
    def memory_size_bytes(self) -> int:
        """What is kept for all texts together, roughly."""
        ...

    @property
    def start(self) -> Any:
        """The state of the empty text; of a text of its own at every call."""
        ...

    def cost(self, state: Any) -> int:
        """Tokens within which the text can end: at least 1, ``NEVER`` if no path is known."""
        ...

    def stride(self, state: Any, remaining: int) -> int:
        """How many tokens are taken from a state before ``after`` is asked: at least 1.

        ``remaining``, here and below: the tokens that the text may still get.
        """
        del state, remaining
        return 1

    def after(self, state: Any, token_ids: Sequence[int], probe: Probe) -> Any:
        """The state after some tokens, no stop token among them; None where no way is known.

        probe: stands after the tokens, and does so again afterwards.
        """
        ...

    def is_free(self, state: Any, remaining: int) -> bool:
        """Whether every legal token leads to a state that costs less than ``remaining``.

        May be False although it is so: the rows are then looked at one by one.
        """
        ...

    def row(
        self, state: Any, remaining: int, probe: Probe, legal: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """int32 [W]: tokens that lead to a state that costs less than ``remaining``.

        probe: stands at the state, and does so again afterwards. legal: int32 [W], the row of the
        probe, where the caller has it; it is not kept.
        With the stop tokens where the text may end; a token that the grammar refuses may be there.
        """
        ...

    def admits(self, state: Any, token_id: int, remaining: int, probe: Probe) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        ...


LAST = 0x10FFFF
"""The largest code point."""

# Surrogates have no encoding in UTF-8, so no class holds them.
_PLANES = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST))


@lru_cache(1024)
def byte_sequences(ranges: tuple[tuple[int, int], ...]) -> list[list[tuple[int, int]]]:
    """Inclusive ranges of code points to sequences of inclusive byte ranges, one for each byte.

    The list is remembered, and not to be changed.
    """
    found: list[list[tuple[int, int]]] = []
    for low, high in ranges:
        for first, last in _PLANES:
            if max(low, first) <= min(high, last):
                found.extend(_split(_utf8(max(low, first)), _utf8(min(high, last))))
    return found


def _utf8(code: int) -> bytes:
    return chr(code).encode()


def _split(low: bytes, high: bytes) -> list[list[tuple[int, int]]]:
    """Byte ranges of all sequences from ``low`` to ``high``, which are equally long."""
    if len(low) == 1:
        return [[(low[0], high[0])]]
    if low[0] == high[0]:
        return [[(low[0], low[0]), *rest] for rest in _split(low[1:], high[1:])]
    least, most = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    found: list[list[tuple[int, int]]] = []
    first, last = low[0], high[0]
    if low[1:] != least:
        found.extend([(first, first), *rest] for rest in _split(low[1:], most))
        first += 1
    above: list[list[tuple[int, int]]] = []
    if high[1:] != most:
        above = [[(last, last), *rest] for rest in _split(least, high[1:])]
        last -= 1
    if first <= last:
        found.append([(first, last), *((0x80, 0xBF) for _ in least)])
    return found + above


_MOST_STATES = 200_000
_OF_STATE = 12  # steps, those of finding its shortest text included


class UnreadableGrammarError(Exception):
    """The printed grammar holds something that is not understood here. Never leaves the package."""


class Call(NamedTuple):
    """From one state through a rule, ``least`` to ``most`` times (-1: any number), to ``then``.

    rule: the first state of that rule.
    """

    rule: int
    then: int
    least: int = 1
    most: int = 1


@dataclass(slots=True)
class Rules:
    """States 0 to N - 1 of all rules.

    chars: [N] lists of (lowest byte, highest byte, next state). calls: [N] lists.
    skips: [N] lists of states that are reached without a byte. ends: [N], whether a rule is
    complete there. root: the first state of the whole grammar.
    """

    chars: list[list[tuple[int, int, int]]] = field(default_factory=list)
    calls: list[list[Call]] = field(default_factory=list)
    skips: list[list[int]] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    root: int = -1

    def new_state(self, *, is_end: bool = False) -> int:
        """Add a state; returns its number."""
        if len(self.ends) >= _MOST_STATES:
            raise UnreadableGrammarError("too many states")
        spend(_OF_STATE)
        self.chars.append([])
        self.calls.append([])
        self.skips.append([])
        self.ends.append(is_end)
        return len(self.ends) - 1

    def step(self, state: int, low: int, high: int) -> int:
        """Add a state after one byte; returns its number."""
        then = self.new_state()
        self.chars[state].append((low, high, then))
        return then

    def text(self, state: int, text: str) -> int:
        """Add the states of a text; returns the one after it."""
        return self.bytes(state, text.encode("utf-8", "surrogatepass"))

    def bytes(self, state: int, data: bytes) -> int:
        """Add the states of some bytes; returns the one after them."""
        for byte in data:
            state = self.step(state, byte, byte)
        return state

    def set(self, state: int, ranges: Iterable[tuple[int, int]], then: int) -> None:
        """From a state by one character of these ranges to another state."""
        for sequence in byte_sequences(tuple(ranges)):
            at = state
            for low, high in sequence[:-1]:
                at = self.step(at, low, high)
            self.chars[at].append((*sequence[-1], then))

    def is_bare_end(self, state: int) -> bool:
        """Whether nothing but the rule's end follows."""
        while not self.chars[state] and not self.calls[state]:
            if self.ends[state]:
                return not self.skips[state]
            if len(self.skips[state]) != 1:
                return False
            state = self.skips[state][0]
        return False


_MOST_BYTES = 64 * 2**20


def shortest_texts(rules: Rules) -> list[bytes | None]:
    """[N]: from each state to the end of its rule, the shortest text; of equals the smallest.

    None where the rule cannot end. Knuth, "A Generalization of Dijkstra's Algorithm", Information
    Processing Letters 6(1), 1977. Raises UnreadableGrammarError where they take too much memory.
    """
    callers = _callers(rules)
    found: list[bytes | None] = [None] * len(rules.ends)
    queue: list[tuple[int, bytes, int]] = []
    for state, is_end in enumerate(rules.ends):
        if is_end:
            queue.append((0, b"", state))
    total = 0
    while queue:
        length, text, state = heapq.heappop(queue)
        if found[state] is not None:
            continue
        found[state] = text
        total += length
        if total > _MOST_BYTES:
            raise UnreadableGrammarError("too long in its shortest form")
        for before, low, call in callers[state]:
            if found[before] is not None:
                continue
            if call is None:
                rest = text if low < 0 else bytes([low]) + text
            else:
                inner, after = found[call.rule], found[call.then]
                if after is None or (inner is None and call.least > 0):
                    continue
                rest = (inner or b"") * call.least + after
            heapq.heappush(queue, (len(rest), rest, before))
    return found


def _callers(rules: Rules) -> dict[int, list[tuple[int, int, Call | None]]]:
    """By state: the states whose shortest text may come from that one's."""
    found: dict[int, list[tuple[int, int, Call | None]]] = defaultdict(list)
    for state in range(len(rules.ends)):
        for low, _, then in rules.chars[state]:
            found[then].append((state, low, None))
        for then in rules.skips[state]:
            found[then].append((state, -1, None))
        for call in rules.calls[state]:
            found[call.then].append((state, -1, call))
            found[call.rule].append((state, -1, call))
    return found


def rest_of_call(call: Call, texts: list[bytes | None], done: int) -> bytes:
    """The bytes that must come after an open call; ``done`` counts the open one as complete."""
    inner, after = texts[call.rule], texts[call.then]
    assert inner is not None
    assert after is not None
    return inner * max(0, call.least - done) + after


def _require_no_left_recursion(rules: Rules, texts: list[bytes | None]) -> None:
    """Raises UnreadableGrammarError where a rule may call itself before its first byte."""
    state_of: dict[int, int] = {}  # 1: on the way, 2: done
    for root in {call.rule for calls in rules.calls for call in calls} | {rules.root}:
        if root in state_of:
            continue
        state_of[root] = 1
        stack = [(root, _first_calls(rules, texts, root))]
        while stack:
            rule, callees = stack[-1]
            callee = next(callees, None)
            if callee is None:
                state_of[rule] = 2
                stack.pop()
            elif state_of.get(callee) == 1:
                raise UnreadableGrammarError("a rule that begins with itself")
            elif callee not in state_of:
                state_of[callee] = 1
                stack.append((callee, _first_calls(rules, texts, callee)))


def _first_calls(rules: Rules, texts: list[bytes | None], rule: int) -> Iterator[int]:
    """The rules that may be called at the very start of a rule."""
    seen, waiting = {rule}, [rule]
    while waiting:
        state = waiting.pop()
        nexts = list(rules.skips[state])
        for call in rules.calls[state]:
            yield call.rule
            if call.least == 0 or texts[call.rule] == b"":
                nexts.append(call.then)
        waiting.extend(then for then in nexts if then not in seen)
        seen.update(nexts)


class Rests(NamedTuple):
    """Of ``longest_rest``. of: int64 [N]. is_lasting: holds after any number of bytes."""

    of: NDArray[np.int64]
    is_lasting: bool


def longest_rest(
    rules: Rules, texts: list[bytes | None], num_bytes: int, size: Callable[[bytes], int]
) -> Rests:
    """The most that may be missing after any ``num_bytes`` bytes from a state.

    size: of a missing text; of two texts it is at most the sum of theirs.

    Counts only up to the end of the state's own rule and of the rules called meanwhile, for the one
    reading that the bytes took; the shortest end over several readings is at most as long. It is
    the fixed point of::

        f[n](q) = max(f[n-1](q), f[n-1](after a byte), f[n](after a skip),
                      f[n](start of a called rule) + rest after it, f[m](after the call))

    with m = n - 1 where the called rule holds a byte at least, else n. Once f[n] equals f[n-1], it
    equals f for every larger number; this happens unless rules call each other for ever.
    """
    table = _Table(rules, texts, size)
    before = np.array([0 if text is None else size(text) for text in texts], dtype=np.int64)
    for _ in range(num_bytes):
        now = table.closure(table.bytes_on(before))
        if np.array_equal(now, before):
            return Rests(before, is_lasting=True)
        before = now
    return Rests(before, is_lasting=False)


class _Table:
    """The edges as arrays: (from, to, what is added)."""

    def __init__(
        self, rules: Rules, texts: list[bytes | None], size: Callable[[bytes], int]
    ) -> None:
        later: list[tuple[int, int, int]] = []  # one byte is gone
        same: list[tuple[int, int, int]] = []
        for state in range(len(rules.ends)):
            later.extend((state, then, 0) for _, _, then in rules.chars[state])
            same.extend((state, then, 0) for then in rules.skips[state])
            for call in rules.calls[state]:
                if texts[call.rule] is None or texts[call.then] is None:
                    continue
                same.append((state, call.rule, size(rest_of_call(call, texts, 1))))
                is_empty = call.least == 0 or texts[call.rule] == b""
                (same if is_empty else later).append((state, call.then, 0))
        self._later = np.array(later, dtype=np.int64).reshape(-1, 3)
        self._same = np.array(same, dtype=np.int64).reshape(-1, 3)

    def bytes_on(self, before: NDArray[np.int64]) -> NDArray[np.int64]:
        now = before.copy()
        np.maximum.at(now, self._later[:, 0], before[self._later[:, 1]])
        return now

    def closure(self, now: NDArray[np.int64]) -> NDArray[np.int64]:
        """Apply edges without a byte until nothing changes; they contain no cycle."""
        for _ in range(len(now)):
            grown = now.copy()
            np.maximum.at(grown, self._same[:, 0], now[self._same[:, 1]] + self._same[:, 2])
            if np.array_equal(grown, now):
                break
            now = grown
        return now


_FORESEEN = 64  # bytes: most rules that do not call themselves have no more to leave after them


class RuleTexts:
    """A grammar's rules with the shortest text from each of their states.

    num_bytes: of the longest token. texts: [N], see ``shortest_texts``.

    What else is said here is found when it is first asked for, and handed over with it.

    Raises UnreadableGrammarError for rules that no text matches, or that begin with themselves.
    """

    def __init__(self, rules: Rules, num_bytes: int) -> None:
        self.rules, self.num_bytes = rules, num_bytes
        self.texts = shortest_texts(rules)
        _require_no_left_recursion(rules, self.texts)
        if self.texts[rules.root] is None:
            raise UnreadableGrammarError("no text matches")
        self._by_tokens: Rests | None = None

    @property
    def shortest_bytes(self) -> frozenset[int]:
        """The bytes that any shortest text is made of."""
        return frozenset(b"".join(text for text in self.texts if text is not None))

    @cached_property
    def by_bytes(self) -> Rests:
        """The most bytes that may be missing after any token."""
        return self._longest_rest(len)

    def by_tokens(self, num_tokens: Callable[[bytes], int]) -> Rests:
        """The most tokens that may be missing after any token; num_tokens: that write a text."""
        if self._by_tokens is None:
            self._by_tokens = self._longest_rest(num_tokens)
        return self._by_tokens

    def _longest_rest(self, size: Callable[[bytes], int]) -> Rests:
        return longest_rest(self.rules, self.texts, max(self.num_bytes, _FORESEEN), size)
