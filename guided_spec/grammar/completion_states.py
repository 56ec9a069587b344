"""A grammar's rules as automata over bytes that call each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from guided_spec.grammar.completion_utf8 import byte_sequences

__all__ = ["Call", "Rules", "UnreadableGrammarError"]

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

    def set(self, state: int, ranges: list[tuple[int, int]], then: int) -> None:
        """From a state by one character of these ranges to another state."""
        for sequence in byte_sequences(ranges):
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
