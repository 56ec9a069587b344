"""Regexes inside a printed grammar: the ones that ``regex.py`` writes, and no others."""

from __future__ import annotations

import re

from guided_spec.grammar.charset import JSON_PLAIN, intersect, normalize
from guided_spec.grammar.completion_states import Call, Rules, UnreadableGrammarError

__all__ = ["RegexReader"]

_CHARACTER = re.compile(r"\\u\{([0-9a-fA-F]+)\}|([^\\()\[\]{}|.^$*+?])")
_CLASS = re.compile(r"\[((?:\\u\{[0-9a-fA-F]+\}|-)*)\]")
_RANGE = re.compile(r"\\u\{([0-9a-fA-F]+)\}(?:-\\u\{([0-9a-fA-F]+)\})?")
_REPEAT = re.compile(r"\{(\d+),(\d*)\}")


class RegexReader:
    """Adds the states of a regex to ``rules``.

    text: literals and ranges as ``\\u{41}``, groups ``(?:...)``, alternatives, repeats ``{1,}``.
    in_json: inside of a JSON string, where the backend refuses characters that JSON escapes, and
        the backslash, even if the regex holds them.
    """

    def __init__(self, rules: Rules, text: str, *, in_json: bool) -> None:
        self._rules = rules
        self._text = text
        self._in_json = in_json
        self._at = 0

    def read(self, first: int, end: int) -> None:
        """Between two states. Raises UnreadableGrammarError for anything else."""
        self._alternatives(first, end)
        if self._at != len(self._text):
            raise self._unread()

    def _unread(self) -> UnreadableGrammarError:
        return UnreadableGrammarError(f"not understood: {self._text[self._at : self._at + 40]!r}")

    def _alternatives(self, first: int, end: int) -> None:
        self._sequence(first, end)
        while self._text.startswith("|", self._at):
            self._at += 1
            self._sequence(first, end)

    def _sequence(self, first: int, end: int) -> None:
        state = self._rules.new_state()
        self._rules.skips[first].append(state)
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            state = self._item(state)
        self._rules.skips[state].append(end)

    def _item(self, state: int) -> int:
        rules, text = self._rules, self._text
        if text.startswith("(?:", self._at):
            return self._group(state)
        found = _CLASS.match(text, self._at)
        then = rules.new_state()
        if found is not None:
            pairs = [(low, high or low) for low, high in _RANGE.findall(found.group(1))]
            self._set(state, then, [(int(a, 16), int(b, 16)) for a, b in pairs])
        else:
            found = _CHARACTER.match(text, self._at)
            if found is None:
                raise self._unread()
            code, plain = found.groups()
            point = ord(plain) if plain else int(code, 16)
            self._set(state, then, [(point, point)])
        self._at = found.end()
        return then

    def _set(self, state: int, then: int, ranges: list[tuple[int, int]]) -> None:
        if self._in_json:
            ranges = list(intersect(normalize(ranges), JSON_PLAIN))
        self._rules.set(state, ranges, then)
        if any(low <= 0xFFFF < high for low, high in ranges):
            # A class across both lengths: the backend begins the longer ones at F0 80 80 80.
            at = self._rules.step(state, 0xF0, 0xF0)
            for low, high in ((0x80, 0x8F), (0x80, 0xBF)):
                at = self._rules.step(at, low, high)
            self._rules.chars[at].append((0x80, 0xBF, then))

    def _group(self, state: int) -> int:
        rules = self._rules
        self._at += len("(?:")
        first, end, then = rules.new_state(), rules.new_state(is_end=True), rules.new_state()
        self._alternatives(first, end)
        if not self._text.startswith(")", self._at):
            raise UnreadableGrammarError("a group that does not close")
        self._at += 1
        repeat = _REPEAT.match(self._text, self._at)
        least, most = 1, 1
        if repeat is not None:
            self._at = repeat.end()
            least, most = int(repeat.group(1)), int(repeat.group(2) or -1)
        rules.calls[state].append(Call(first, then, least, most))
        return then
