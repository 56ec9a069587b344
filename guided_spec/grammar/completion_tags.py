"""Free text in a printed grammar: any bytes, up to a trigger that calls a rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from guided_spec.grammar.completion_states import Call, Rules, UnreadableGrammarError

__all__ = ["FreeText", "read_free_text"]

_TEXT = r'"((?:[^"\\]|\\.)*)"'
_WHOLE = re.compile(
    r"^TagDispatch\(\s*(?P<tags>(?:\(" + _TEXT + r", [\w.:-]+\),\s*)*)"
    r"loop_after_dispatch=(?P<loop>true|false),\s*"
    r"excludes=\((?P<not>(?:" + _TEXT + r"(?:, )?)*)\)\s*\)"
)
_TAG = re.compile(r"\(" + _TEXT + r", ([\w.:-]+)\)")


class FreeText(NamedTuple):
    """Where it may stop, and what then.

    triggers: bytes to the name of the rule that follows them. excludes: what may not stand there.
    loops: whether free text goes on behind a trigger's rule.
    """

    triggers: Mapping[bytes, str]
    excludes: frozenset[bytes]
    loops: bool

    @classmethod
    def parse(cls, text: str, unescape: Callable[[str], str]) -> FreeText | None:
        """Of a rule's body as it is printed; None where it is no free text."""
        found = _WHOLE.match(text)
        if found is None:
            return None
        triggers = {unescape(t).encode(): name for t, name in _TAG.findall(found.group("tags"))}
        excludes = frozenset(unescape(t).encode() for t in re.findall(_TEXT, found.group("not")))
        if b"" in triggers or b"" in excludes:
            raise UnreadableGrammarError("an empty trigger")
        return cls(triggers, excludes, found.group("loop") == "true")


def read_free_text(
    rules: Rules, free: FreeText, names: Mapping[str, int], first: int, end: int
) -> None:
    """Add the states of free text between two states.

    They are those of the automaton of Aho and Corasick, "Efficient string matching", CACM 18(6),
    1975: what the text ends with, of all beginnings of triggers and excluded strings. The text may
    end in each of them.
    """
    follow = _automaton([*free.triggers, *free.excludes])
    states = {b"": first}
    for prefix in follow:
        if prefix and not _found(prefix, free):
            states[prefix] = rules.new_state()
    for prefix, state in states.items():
        rules.skips[state].append(end)
        for low, high, then in _ranges(follow[prefix]):
            excluded, trigger = _found(then, free) or (False, None)
            if excluded:
                continue
            if trigger is None:
                rules.chars[state].append((low, high, states[then]))
            else:
                after = rules.step(state, low, high)
                back = first if free.loops else end
                if free.triggers[trigger] not in names:
                    raise UnreadableGrammarError(f"no rule is named {free.triggers[trigger]}")
                rules.calls[after].append(Call(names[free.triggers[trigger]], back))


def _found(prefix: bytes, free: FreeText) -> tuple[bool, bytes | None] | None:
    """What the text now ends with: (whether it is excluded, else the longest trigger)."""
    tails = [prefix[start:] for start in range(len(prefix))]
    if any(tail in free.excludes for tail in tails):
        return True, None
    trigger = next((tail for tail in tails if tail in free.triggers), None)
    return None if trigger is None else (False, trigger)


def _automaton(patterns: list[bytes]) -> dict[bytes, list[bytes]]:
    """By what the text ends with: the same after each of the 256 bytes."""
    prefixes = {pattern[:end] for pattern in patterns for end in range(len(pattern) + 1)} | {b""}
    found: dict[bytes, list[bytes]] = {}
    for prefix in sorted(prefixes):
        nexts = []
        for byte in range(256):
            text = prefix + bytes([byte])
            while text not in prefixes:
                text = text[1:]
            nexts.append(text)
        found[prefix] = nexts
    return found


def _ranges(nexts: list[bytes]) -> list[tuple[int, int, bytes]]:
    found: list[tuple[int, int, bytes]] = []
    for byte, then in enumerate(nexts):
        if found and found[-1][2] == then:
            found[-1] = (found[-1][0], byte, then)
        else:
            found.append((byte, byte, then))
    return found
