"""Reads a grammar that xgrammar printed into automata over bytes that call each other.

xgrammar does not report a matcher's state, and two matchers cannot be compared. But a compiled
grammar can be printed, in a small and regular notation. From that text this module computes how
documents can end, without asking a matcher. It reads only regexes that ``regex.py`` writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.llguidance import LLGuidanceGrammar
from guided_spec.grammar.backends.printed import set_ranges, unescape
from guided_spec.grammar.backends.tag import ending_rules
from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.characters import JSON_PLAIN, intersect, normalize
from guided_spec.grammar.completion.endings import Call, Rules, UnreadableGrammarError
from guided_spec.grammar.completion.spelling import NO_TEXT, mark_of
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.regex import to_fullmatch


def tells_rules(compiled: CompiledGrammar) -> bool:
    """Whether ``rules_of`` may know the rules of a compiled grammar.

    llguidance tells those of a regex, choice or tag only, registered backends none.
    """
    if isinstance(compiled, LLGuidanceGrammar):
        return compiled.pattern is not None or compiled.tag is not None
    return isinstance(compiled, XGrammarGrammar)


class RuleSource(NamedTuple):
    """Where the rules of a grammar are read from: xgrammar's print of it, or a regex.

    named: added tokens that it names; each is read as its mark, see ``mark_of``.
    """

    text: str
    is_regex: bool
    named: frozenset[int] = frozenset()

    def read(self) -> Rules:
        """The rules. Raises UnreadableGrammarError."""
        return read_regex(self.text) if self.is_regex else read_rules(self.text)


def source_of(compiled: CompiledGrammar) -> RuleSource:
    """Of a compiled grammar. Raises UnreadableGrammarError where its backend tells no rules."""
    if isinstance(compiled, XGrammarGrammar):
        named = frozenset[int]() if compiled.source is None else compiled.source.named
        return RuleSource(str(compiled.compiled.grammar), is_regex=False, named=named)
    if isinstance(compiled, LLGuidanceGrammar) and compiled.pattern is not None:
        return RuleSource(compiled.pattern, is_regex=True)
    if isinstance(compiled, LLGuidanceGrammar) and compiled.tag is not None:
        try:
            text = ending_rules(compiled.tag, compiled.source.vocabulary)
        except GrammarCompileError as error:
            raise UnreadableGrammarError("xgrammar does not take the tag") from error
        return RuleSource(text, is_regex=False, named=compiled.source.named)
    raise UnreadableGrammarError("its backend does not expose its rules")


def rules_of(compiled: CompiledGrammar) -> Rules:
    """The rules of a compiled grammar. Raises UnreadableGrammarError where they are not known."""
    return source_of(compiled).read()


_CHARACTER = re.compile(r"\\u\{([0-9a-fA-F]+)\}|([^\\()\[\]{}|.^$*+?])")
_CLASS = re.compile(r"\[((?:\\u\{[0-9a-fA-F]+\}|-)*)\]")
_RANGE = re.compile(r"\\u\{([0-9a-fA-F]+)\}(?:-\\u\{([0-9a-fA-F]+)\})?")
_REPEAT = re.compile(r"\{(\d+),(\d*)\}|\*|\+")


class RegexReader:
    """Adds the states of a regex to ``rules``.

    text: literals and ranges as ``\\u{41}``, groups ``(?:...)``, alternatives, and the repeats
        ``{1,3}``, ``{2,}``, ``*`` and ``+``.
    in_json: inside of a JSON string, where the backend refuses characters that JSON escapes, and
        the backslash, even if the regex holds them.
    """

    def __init__(self, rules: Rules, text: str, *, in_json: bool = False) -> None:
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
            if repeat.group(1) is None:
                least, most = int(repeat.group() == "+"), -1
            else:
                least, most = int(repeat.group(1)), int(repeat.group(2) or -1)
        rules.calls[state].append(Call(first, then, least, most))
        return then


def read_regex(pattern: str) -> Rules:
    """The rules of a regex as ``to_fullmatch`` writes it, for any backend.

    Raises UnreadableGrammarError.
    """
    rules = Rules()
    rules.root = rules.new_state()
    RegexReader(rules, pattern).read(rules.root, rules.new_state(is_end=True))
    return rules


_TEXT = r'"((?:[^"\\]|\\.)*)"'
_WHOLE = re.compile(
    r"^TagDispatch\(\s*(?P<tags>(?:\(" + _TEXT + r", [\w.:-]+\),\s*)*)"
    r"loop_after_dispatch=(?P<loop>true|false),\s*"
    r"excludes=\((?P<not>(?:" + _TEXT + r"(?:, )?)*)\)\s*\)"
)
_TAG = re.compile(r"\(" + _TEXT + r", ([\w.:-]+)\)")


class FreeText(NamedTuple):
    """Free text: where it may stop, and what comes then.

    triggers: bytes to the name of the rule that follows them. excludes: bytes it must not contain.
    loops: whether free text continues after a trigger's rule.
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
        for low, high, then in _byte_ranges(follow[prefix]):
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


def _byte_ranges(nexts: list[bytes]) -> list[tuple[int, int, bytes]]:
    found: list[tuple[int, int, bytes]] = []
    for byte, then in enumerate(nexts):
        if found and found[-1][2] == then:
            found[-1] = (found[-1][0], byte, then)
        else:
            found.append((byte, byte, then))
    return found


_TOKENS = re.compile(
    r"^TokenTagDispatch\(\s*(?P<tags>(?:\(\d+, [\w.:-]+\),\s*)*)"
    r"loop_after_dispatch=(?P<loop>true|false),\s*excludes=\([\d, ]*\)\s*\)"
)
_TOKEN_TAG = re.compile(r"\((\d+), ([\w.:-]+)\)")


def read_free_tokens(
    rules: Rules, found: re.Match[str], names: Mapping[str, int], first: int, end: int
) -> None:
    """Add the states of any tokens but named ones, of which some go on with a rule.

    found: of ``_TOKENS``.
    """
    rules.skips[first].append(end)
    rules.chars[first].append((0, NO_TEXT - 1, first))
    back = first if found["loop"] == "true" else end
    for token_id, name in _TOKEN_TAG.findall(found["tags"]):
        if name not in names:
            raise UnreadableGrammarError(f"no rule is named {name}")
        after = rules.bytes(first, mark_of(int(token_id)))
        rules.calls[after].append(Call(names[name], back))


_RULE = re.compile(r"^([\w.:-]+) ::= ", re.MULTILINE)
_ITEM = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")'
    r"|Token\((?P<tokens>\d+(?:, ?\d+)*)\)"
    r"|(?P<set>\[(?:[^\]\\]|\\.)*\])(?P<star>\*?)"
    r"|(?P<name>[\w.:-]+)(?:\{(?P<least>\d+),\s*(?P<most>-?\d+)\})?"
    r"|(?P<mark>\(=?|\)|\|))"
)
_REGEX = re.compile(r'^Regex\("((?:[^"\\]|\\.)*)"(, json_string=true)?\)')


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
    """One rule's text: alternatives of sequences, and what the backend expects next."""

    def __init__(self, rules: Rules, names: dict[str, int], text: str) -> None:
        self._rules = rules
        self._names = names
        self._text = text

    def read(self, first: int) -> None:
        rules, end = self._rules, self._rules.new_state(is_end=True)
        regex = _REGEX.match(self._text)
        if regex is not None:
            in_json = bool(regex.group(2))
            pattern = _spelled(unescape(regex.group(1)), in_json=in_json)
            RegexReader(rules, pattern, in_json=in_json).read(first, end)
            return
        if (tokens := _TOKENS.match(self._text)) is not None:
            read_free_tokens(rules, tokens, self._names, first, end)
            return
        free = FreeText.parse(self._text, unescape)
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
            return rules.text(state, unescape(item.group("text")[1:-1]))
        if item.group("tokens") is not None:
            then = rules.new_state()
            for token_id in item.group("tokens").split(","):
                rules.skips[rules.bytes(state, mark_of(int(token_id)))].append(then)
            return then
        if item.group("set") is None:
            return self._call(state, item)
        then = rules.new_state()
        begin = state
        if item.group("star"):
            rules.skips[state].append(then)
            begin = then
        rules.set(begin, set_ranges(item.group("set")[1:-1]), then)
        return then

    def _call(self, state: int, item: re.Match[str]) -> int:
        name, least = item.group("name"), item.group("least")
        if name not in self._names:
            raise UnreadableGrammarError(f"no rule is named {name}")
        then = self._rules.new_state()
        times = (1, 1) if least is None else (int(least), int(item.group("most")))
        self._rules.calls[state].append(Call(self._names[name], then, *times))
        return then


def _spelled(pattern: str, *, in_json: bool) -> str:
    """A regex as ``RegexReader`` reads it. One between anchors was not written by this package."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return pattern
    try:
        return to_fullmatch(pattern, context="json_plain" if in_json else "text")
    except GrammarCompileError as error:
        raise UnreadableGrammarError(str(error)) from error
