"""How a text can end in time: a grammar's rules as automata over bytes that call each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.protocol import Matcher

__all__ = [
    "LAST",
    "NEVER",
    "Call",
    "EndLostError",
    "Endings",
    "Rules",
    "UnreadableGrammarError",
    "byte_sequences",
]

NEVER = int(np.iinfo(np.int32).max)
"""The cost of what cannot be."""


class EndLostError(Exception):
    """Following a text takes more memory than it is worth. Never leaves the package."""


class Endings(Protocol):
    """The ways in which the texts of one grammar can end; shared by requests and threads.

    A state is where a text stands, and depends on the text's tokens and its budget alone. Its cost
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
        """Whether new texts should get endings made anew: there is little room for more states."""
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
        """Tokens within which the text can be ended: at least 1, ``NEVER`` if no way is known."""
        ...

    def stride(self, state: Any, remaining: int) -> int:
        """How many tokens are taken from a state before ``after`` is asked: at least 1.

        ``remaining``, here and below: the tokens that the text may still get.
        """
        del state, remaining
        return 1

    def after(self, state: Any, token_ids: Sequence[int], matcher: Matcher) -> Any:
        """The state behind some tokens, no stop token among them; None where no way is known.

        matcher: stands behind the tokens, and does so again afterwards.
        """
        ...

    def is_free(self, state: Any, remaining: int) -> bool:
        """Whether every legal token leads to a state that costs less than ``remaining``.

        May be False although it is so: the rows are then looked at one by one.
        """
        ...

    def row(self, state: Any, remaining: int, matcher: Matcher) -> NDArray[np.int32]:
        """int32 [W]: tokens that lead to a state that costs less than ``remaining``.

        matcher: stands at the state, and does so again afterwards.
        With the stop tokens where the text may end; a token that the grammar refuses may be there.
        """
        ...

    def admits(self, state: Any, token_id: int, remaining: int, matcher: Matcher) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        ...


LAST = 0x10FFFF
"""The largest code point. Surrogates count as characters, as the backend has it."""


@lru_cache(1024)
def byte_sequences(ranges: tuple[tuple[int, int], ...]) -> list[list[tuple[int, int]]]:
    """Inclusive ranges of code points to sequences of inclusive byte ranges, one for each byte.

    The list is remembered, and not to be changed.
    """
    found: list[list[tuple[int, int]]] = []
    for low, high in ranges:
        for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST)):
            if max(low, first) <= min(high, last):
                found.extend(_split(_utf8(max(low, first)), _utf8(min(high, last))))
    return found


def _utf8(code: int) -> bytes:
    return chr(code).encode("utf-8", "surrogatepass")


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
        self.chars.append([])
        self.calls.append([])
        self.skips.append([])
        self.ends.append(is_end)
        return len(self.ends) - 1

    def step(self, state: int, low: int, high: int) -> int:
        """Add a state behind one byte; returns it."""
        then = self.new_state()
        self.chars[state].append((low, high, then))
        return then

    def text(self, state: int, text: str) -> int:
        """Add the states of a text; returns the one behind it."""
        for byte in text.encode("utf-8", "surrogatepass"):
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
