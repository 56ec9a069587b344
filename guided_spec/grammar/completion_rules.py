"""A grammar as xgrammar prints it, read into automata over bytes that call each other.

xgrammar tells nobody in which state a matcher is, and two matchers cannot be compared. Its compiled
grammar can be printed, though, in a small and regular notation. From that text the ways a document
can end are computed here: no question about them has to be put to a matcher.
"""

from __future__ import annotations

import re

from guided_spec.grammar.completion_regex import RegexReader
from guided_spec.grammar.completion_states import Call, Rules, UnreadableGrammarError
from guided_spec.grammar.completion_tags import FreeText, read_free_text
from guided_spec.grammar.completion_utf8 import LAST

__all__ = ["read_rules"]

_RULE = re.compile(r"^([\w.:-]+) ::= ", re.MULTILINE)
_ITEM = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")'
    r"|(?P<set>\[(?:[^\]\\]|\\.)*\])(?P<star>\*?)"
    r"|(?P<name>[\w.:-]+)(?:\{(?P<least>\d+),\s*(?P<most>-?\d+)\})?"
    r"|(?P<mark>\(=?|\)|\|))"
)
_REGEX = re.compile(r'^Regex\("((?:[^"\\]|\\.)*)"(, json_string=true)?\)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|([^\\])")
_NAMED = dict(zip("nrt0abfve", "\n\r\t\0\a\b\f\v\x1b", strict=True))


def read_rules(text: str) -> Rules:
    """The rules of ``str(compiled.grammar)``.

    The whole is the only rule that no other one calls, else the one named ``root``. Raises
    UnreadableGrammarError.
    """
    rules = Rules()
    starts = [(match.group(1), match.start(), match.end()) for match in _RULE.finditer(text)]
    names: dict[str, int] = {}
    for name, _, _ in starts:
        if name in names:
            raise UnreadableGrammarError(f"the rule {name} stands there twice")
        names[name] = rules.new_state()
    bounds = [start for _, start, _ in starts[1:]] + [len(text)]
    for (name, _, start), end in zip(starts, bounds, strict=True):
        _Body(rules, names, text[start:end].strip()).read(names[name])
    called = {call.rule for calls in rules.calls for call in calls}
    tops = [state for state in names.values() if state not in called]
    root = tops[0] if len(tops) == 1 else names.get("root")
    if root is None:
        raise UnreadableGrammarError("which rule is the whole grammar is not known")
    rules.root = root
    return rules


class _Body:
    """One rule's text: alternatives of sequences, and what the backend expects to follow."""

    def __init__(self, rules: Rules, names: dict[str, int], text: str) -> None:
        self._rules = rules
        self._names = names
        self._text = text

    def read(self, first: int) -> None:
        rules, end = self._rules, self._rules.new_state(is_end=True)
        regex = _REGEX.match(self._text)
        if regex is not None:
            reader = RegexReader(rules, _unescape(regex.group(1)), in_json=bool(regex.group(2)))
            reader.read(first, end)
            return
        free = FreeText.parse(self._text, _unescape)
        if free is not None:
            read_free_text(rules, free, self._names, first, end)
            return
        self._alternatives(first, end)

    def _alternatives(self, first: int, end: int) -> None:
        """``((item item) | (item))``, or ``""`` for one of them."""
        rules, at, depth, state = self._rules, 0, 0, first
        while at < len(self._text):
            item = _ITEM.match(self._text, at)
            if item is None:
                raise UnreadableGrammarError(f"not understood: {self._text[at : at + 40]!r}")
            at, mark = item.end(), item.group("mark")
            if mark == "(=":  # a hint for the masks; it forbids nothing
                break
            depth += {"(": 1, ")": -1}.get(mark, 0)
            if mark == "(" and depth == 2:
                state = rules.new_state()
                rules.skips[first].append(state)
            elif mark == ")" and depth == 1:
                rules.skips[state].append(end)
            elif depth == 1 and item.group("text") == '""':
                rules.skips[first].append(end)
            elif mark is None and depth == 2:
                state = self._append(state, item)
            elif mark is None or depth > 2:
                raise UnreadableGrammarError("an item outside of a sequence")
        if depth != 0:
            raise UnreadableGrammarError("brackets that do not close")

    def _append(self, state: int, item: re.Match[str]) -> int:
        rules = self._rules
        if item.group("text") is not None:
            return rules.text(state, _unescape(item.group("text")[1:-1]))
        if item.group("set") is None:
            return self._call(state, item)
        then = rules.new_state()
        begin = state
        if item.group("star"):
            rules.skips[state].append(then)
            begin = then
        rules.set(begin, _ranges(item.group("set")[1:-1]), then)
        return then

    def _call(self, state: int, item: re.Match[str]) -> int:
        name, least = item.group("name"), item.group("least")
        if name not in self._names:
            raise UnreadableGrammarError(f"no rule is named {name}")
        then = self._rules.new_state()
        times = (1, 1) if least is None else (int(least), int(item.group("most")))
        self._rules.calls[state].append(Call(self._names[name], then, *times))
        return then


def _unescape(text: str) -> str:
    found = []
    for match in _ESCAPE.finditer(text):
        *codes, named, plain = match.groups()
        code = next((code for code in codes if code), None)
        if code is not None:
            found.append(chr(int(code, 16)))
        else:
            found.append(plain if plain is not None else _NAMED.get(named, named))
    return "".join(found)


def _ranges(text: str) -> list[tuple[int, int]]:
    """Of ``a-z_`` or ``^a-z_``: inclusive ranges of code points."""
    is_negated = text.startswith("^")
    parts = [match.group(0) for match in _ESCAPE.finditer(text[is_negated:])]
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(parts):
        low = ord(_unescape(parts[at]))
        if at + 2 < len(parts) and parts[at + 1] == "-":
            found.append((low, ord(_unescape(parts[at + 2]))))
            at += 3
        else:
            found.append((low, low))
            at += 1
    if not is_negated:
        return found
    gaps, first = [], 0
    for low, high in sorted(found):
        if low > first:
            gaps.append((first, low - 1))
        first = max(first, high + 1)
    return [*gaps, (first, LAST)] if first <= LAST else gaps
