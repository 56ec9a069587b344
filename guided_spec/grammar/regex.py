"""Python regular expressions, rewritten so that the backend reads them as ``re.fullmatch`` does.

The backend's own reading differs without a word: ``.`` takes a newline, ``\x41b`` is one
character, anchors inside a pattern are dropped. So the pattern is parsed by ``re``, and only
literals, explicit ranges, groups, alternatives and greedy repeats are written back.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.characters import (
    ANY_CHARACTER,
    ESCAPED,
    JSON_PLAIN,
    Ranges,
    intersect,
    normalize,
    set_of,
)
from guided_spec.grammar.steps import is_limited, spend, spend_on_text

_CODE = re.compile(r"\\u\{([0-9a-f]+)\}")


def readable(written: str) -> str:
    """What ``to_fullmatch`` has written, anchored or not, as ``re.fullmatch`` reads it."""
    pattern = _CODE.sub(lambda found: f"\\U{int(found[1], 16):08x}", written)
    return pattern.removeprefix("^").removesuffix("$")


Context = Literal["text", "json_string", "json_plain", "most"]
"""What a pattern is about: the text itself; the inside of a JSON string, whose value it is about;
or one of which no character is escaped, unless nothing else would match. "most": the text itself,
and nothing that ``re`` matches is left out."""

RE_PARSER: Any = importlib.import_module("re._parser")
"""What ``re.compile`` itself parses with."""
ANY_CASE = re.compile(r"\(\?[a-zA-Z]*i")
"""Where upper and lower case become one."""

_IN_JSON: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_SHORT = 4096  # characters of a pattern that is remembered
_MOST_WRITTEN_OUT = 128  # beyond it xgrammar counts in one state, by an automaton of its own
# Characters by their bytes in UTF-8: at most two, three, four.
_LENGTHS: tuple[Ranges, ...] = (((0, 0x7FF),), ((0x800, 0xFFFF),), ((0x10000, 0x10FFFF),))
_BEGIN = ("AT_BEGINNING", "AT_BEGINNING_STRING")
_END = ("AT_END", "AT_END_STRING")
BOUNDARIES: Mapping[str, str] = MappingProxyType({"AT_BOUNDARY": "\\b", "AT_NON_BOUNDARY": "\\B"})
"""Word boundaries, by the parser's names."""

_REFUSED = {
    "AT": "an anchor or word boundary (^ $ \\b \\B) inside the pattern",
    "ASSERT": "lookahead or lookbehind",
    "ASSERT_NOT": "negative lookahead or lookbehind",
    "ATOMIC_GROUP": "an atomic group (?>...)",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group (?(1)...)",
    "POSSESSIVE_REPEAT": "a possessive quantifier such as a*+",
}
_JSON_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}


def json_escape(character: str) -> str:
    """A character as it stands in a JSON string, in one spelling."""
    code = ord(character)
    if any(low <= code <= high for low, high in JSON_PLAIN):
        return character
    named = _JSON_ESCAPES.get(code)
    return f"\\u{code:04x}" if named is None else f"\\{named}"


def to_fullmatch(pattern: str, *, context: Context = "text") -> str:
    """The backend's spelling of ``pattern``: every text it matches satisfies ``re.fullmatch``.

    It matches all such texts, with two exceptions: ``\\d``, ``\\w`` and ``\\s`` stand for ASCII
    characters only (their negations still leave out the whole Unicode class), and U+0000 is never
    matched. With ``context="json_string"`` the result matches the inside of a JSON string whose
    decoded value satisfies the pattern; what JSON escapes, U+0000 too, stands there in its shortest
    escape. With ``context="json_plain"`` classes leave these characters out.

    Raises GrammarCompileError for a pattern that ``re`` refuses or that is no regular language.
    """
    write = _write_short if len(pattern) <= _SHORT else _write
    return write(pattern, context)


def to_search(pattern: str, *, most: bool = False) -> str:
    """A pattern for whole texts, in the backend's spelling: those in which ``re.search`` finds it.

    Where ``pattern`` has no anchor at a side, anything may stand there; each of its alternatives
    has its own anchors. Exceptions and errors are those of ``to_fullmatch``.
    most: there are no exceptions, but it may match more: before a newline at the end, ``$`` holds.
    """
    write = _write_short if len(pattern) <= _SHORT else _write
    return write(pattern, "most" if most else "text", _ANYWHERE)


def begun_with(pattern: str, items: Sequence[Any], flags: int, *, most: bool = False) -> str:
    """A pattern for whole texts that begin as parsed items of ``pattern`` say, as ``to_search``.

    For automata: word boundaries stay as they are. most: nothing that ``re`` matches is left out;
    for what other texts must not be.
    """
    writer = _Writer(pattern, "most" if most else "text", tuple(BOUNDARIES))
    return writer.sequence(items, flags, _Edge(closes=True))


def to_search_bounded(pattern: str, *, most: bool = False) -> str:
    """``to_search`` for automata: word boundaries stay as they are."""
    return _write(pattern, "most" if most else "text", _ANYWHERE, tuple(BOUNDARIES))


def parse_regex(pattern: str) -> Any:
    """What Python's parser reads. Raises GrammarCompileError where it reads none."""
    try:
        return RE_PARSER.parse(pattern)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        # A warning, where the user's filters make errors of them: of "[[" and the like.
        raise GrammarCompileError(f"regex {pattern!r}: {error}") from error


def _write(
    pattern: str,
    context: Context,
    edge: _Edge | None = None,
    kept: tuple[str, ...] = (),
) -> str:
    spend(16 + 2 * len(pattern))
    parsed = parse_regex(pattern)
    try:
        writer, edge = _Writer(pattern, context, kept), edge or _Edge()
        return _with_one_end(writer.sequence(parsed, parsed.state.flags, edge))
    except RecursionError as error:
        raise GrammarCompileError(f"regex {pattern!r}: nested too deeply") from error


_write_short = lru_cache(maxsize=256)(_write)  # schemas repeat a few patterns, and formats are some


@dataclass(frozen=True, slots=True)
class _Edge:
    """Whether nothing of the pattern can come before an item, or after it.

    opens, closes: whether anything else may: no anchor keeps it out.
    """

    first: bool = True
    last: bool = True
    opens: bool = False
    closes: bool = False

    def around(self, index: int, begun: int, ended: int, count: int) -> _Edge:
        """Of item ``index`` in a sequence of ``count``, with so many anchors at its two ends."""
        first, last = index <= begun, index >= count - 1 - ended
        return _Edge(
            self.first and first,
            self.last and last,
            self.opens and first and begun == 0,
            self.closes and last and ended == 0,
        )


_INSIDE = _Edge(first=False, last=False)
_ANYWHERE = _Edge(opens=True, closes=True)


@dataclass(frozen=True, slots=True)
class _Writer:
    """kept: anchors that are written as they are; others but those at an edge are refused."""

    pattern: str
    context: Context
    kept: tuple[str, ...] = ()

    def sequence(self, items: Any, flags: int, edge: _Edge) -> str:
        self._check_flags(flags)
        written = []
        nodes = list(items)
        spend(1 + len(nodes))
        begun = next((i for i, node in enumerate(nodes) if not _is_at(node, _BEGIN)), len(nodes))
        ending = enumerate(reversed(nodes))
        ended = next((i for i, node in ending if not _is_at(node, _END)), len(nodes))
        is_open = (edge.opens and not begun) or (edge.closes and not ended)
        if is_open and begun + ended >= len(nodes):  # nothing but anchors
            written.append(self._anything())
        for index, (op, value) in enumerate(nodes):
            own = edge.around(index, begun, ended, len(nodes))
            written.append(self._open_item(str(op), value, flags, own))
        return "".join(written)

    def _open_item(self, op: str, value: Any, flags: int, edge: _Edge) -> str:
        """``item``, and anything before it or after it where no anchor keeps that out."""
        is_anchor = op == "AT" and str(value) not in self.kept
        is_inside = not (edge.opens or edge.closes)
        if is_anchor or is_inside or op in ("SUBPATTERN", "BRANCH"):
            return self.item(op, value, flags, edge)
        before, after = (self._anything() if side else "" for side in (edge.opens, edge.closes))
        inner = _Edge(edge.first and not edge.opens, edge.last and not edge.closes)
        return f"{before}{self.item(op, value, flags, inner)}{after}"

    def _anything(self) -> str:
        return f"{self._characters(_IN_JSON)}*"

    def item(self, op: str, value: Any, flags: int, edge: _Edge) -> str:
        match op:
            case "AT" if (edge.first and str(value) in _BEGIN) or (
                edge.last and str(value) in _END
            ):
                is_before_newline = self.context == "most" and str(value) == "AT_END"
                return "(?:\\u{a}){0,1}" if is_before_newline else ""
            case "AT" if str(value) in self.kept and not flags & re.ASCII:
                return BOUNDARIES[str(value)]
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._characters(set_of(op, value, flags, whole=self.context == "most"))
            case "SUBPATTERN":
                _, added, removed, inner = value
                return f"(?:{self.sequence(inner, (flags | added) & ~removed, edge)})"
            case "BRANCH":
                options = [self.sequence(option, flags, edge) for option in value[1]]
                return f"(?:{'|'.join(options)})"
            case (
                "MAX_REPEAT" | "MIN_REPEAT"
            ):  # greed changes what is matched first, not what can be
                return self._repeat(value, flags, edge)
        raise self._refuse(_REFUSED.get(op, op.lower()), "rewrite it without")

    def _repeat(self, value: Any, flags: int, edge: _Edge) -> str:
        low, high, inner = value
        if high == 0:
            return ""
        if high is RE_PARSER.MAXREPEAT and (low == 0 or _is_nullable(inner)):
            parts = dict.fromkeys(part for part in self._looped(inner, flags) if part)
            return f"(?:{'|'.join(parts)})*" if parts else ""
        once = high == 1
        body = self.sequence(inner, flags, _Edge(edge.first and once, edge.last and once))
        spend_on_text(body)
        if not body:
            return ""
        if high is not RE_PARSER.MAXREPEAT:
            return _counted(body, low, high)
        # xgrammar 0.2.8 takes (?:-[a-z]{1,3}){1,} to allow "-a-abcd", and {2,} likewise.
        return f"(?:{body})+" if low == 1 else f"{_counted(body, low, low)}(?:{body})*"

    def _looped(self, items: Any, flags: int) -> list[str]:
        """Alternatives for a loop: any number of them, in any order, is any number of ``items``.

        None of them is a loop, or made of nothing but loops: a loop that can repeat without a
        character slows the backend down with each character, and makes its output unreadable.
        """
        self._check_flags(flags)
        nodes = list(items)
        if len(nodes) > 1 and not _is_nullable(nodes):
            return [self.sequence(nodes, flags, _INSIDE)]
        parts: list[str] = []
        for op, value in nodes:  # (ab)* is (a|b)*, where a and b can both be empty
            match str(op):
                case "SUBPATTERN":
                    _, added, removed, inner = value
                    parts += self._looped(inner, (flags | added) & ~removed)
                case "BRANCH":
                    for option in value[1]:
                        parts += self._looped(option, flags)
                case "MAX_REPEAT" | "MIN_REPEAT" if value[0] <= 1 or _can_be_empty(str(op), value):
                    parts += self._looped(value[2], flags) if value[1] else []
                case "AT":  # it holds where it stands, and not in any order
                    raise self._refuse(_REFUSED["AT"], "rewrite it without")
                case name:
                    parts.append(self.item(name, value, flags, _INSIDE))
        return parts

    def _check_flags(self, flags: int) -> None:
        if flags & re.MULTILINE and self.context == "most":
            raise self._refuse("the flag (?m)", "rewrite it without")

    def _characters(self, ranges: Ranges) -> str:
        if self.context == "json_string":
            return self._in_json(intersect(ranges, _IN_JSON))
        ranges = intersect(ranges, _IN_JSON if self.context == "most" else ANY_CHARACTER)
        if self.context == "json_plain":
            plain = intersect(ranges, JSON_PLAIN)
            if ranges and not plain:
                return self._in_json(ranges)
            ranges = plain
        if not ranges:
            what = "a class that holds nothing but U+0000 and halves of surrogate pairs"
            raise self._refuse(what, "widen it")
        return _group(_classes(ranges))

    def _in_json(self, ranges: Ranges) -> str:
        """As they stand in a JSON string, those as escapes that have to be."""
        ranges = normalize(ranges)
        options = _classes(intersect(ranges, JSON_PLAIN))
        if escapes := _escapes(tuple(intersect(ranges, ESCAPED))):
            options.append(escapes)
        if not options:
            raise self._refuse(
                "a class that holds nothing but halves of surrogate pairs", "widen it"
            )
        return _group(options)

    def _refuse(self, what: str, fix: str) -> GrammarCompileError:
        return GrammarCompileError(f"regex {self.pattern!r}: {what} is not supported; {fix}")


def _classes(ranges: Ranges) -> list[str]:
    """One class for each length in UTF-8.

    One class over several would take overlong UTF-8, which decodes to more characters.
    """
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return [f"\\u{{{ranges[0][0]:x}}}"]
    parts = [intersect(ranges, length) for length in _LENGTHS]
    return [_write_class(part) for part in parts if part]


def _group(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


@cache
def _escapes(ranges: Ranges) -> str:
    """The JSON escapes of characters, as one pattern; empty for none."""
    codes = [code for low, high in ranges for code in range(low, high + 1)]
    named = [ord(_JSON_ESCAPES[code]) for code in codes if code in _JSON_ESCAPES]
    options = _classes(normalize((code, code) for code in named)) if named else []
    for high in (0, 1):
        digits = [
            ord(f"{code % 16:x}")
            for code in codes
            if code < 0x20 and code // 16 == high and code not in _JSON_ESCAPES
        ]
        if digits:
            written = _group(_classes(normalize((digit, digit) for digit in digits)))
            options.append(f"u00{high}{written}")
    return f"\\u{{5c}}{_group(options)}" if options else ""


def _with_one_end(written: str) -> str:
    """``written``, with an empty group after it where its automaton could have several ends.

    xgrammar 0.2.8 merges states with equal incoming edges, and in the same pass all ends that
    nothing follows: a|a{1,2} becomes a+. Edges into one single end are merged correctly.
    """
    return f"{written}(?:)" if ")" in written else written


def _counted(body: str, low: int, high: int) -> str:
    """The content of a group, repeated ``low`` to ``high`` times.

    xgrammar 0.2.8 merges the counting state with the one before it, as in b*a{2,200}, and with
    others that begin with the same characters, and then counts wrongly. A state that two others
    lead to stays as it is: so two texts come before it, both empty.
    """
    if high <= _MOST_WRITTEN_OUT:
        return f"(?:{body}){{{low},{high}}}"
    return f"(?:|(?:|)(?:|))(?:{_with_one_end(body)}){{{low},{high}}}"


def _can_be_empty(op: str, value: Any) -> bool:
    """Whether one item matches the empty text; True for what is refused anyway."""
    match op:
        case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
            return False
        case "SUBPATTERN":
            return _is_nullable(value[3])
        case "BRANCH":
            return any(map(_is_nullable, value[1]))
        case "MAX_REPEAT" | "MIN_REPEAT":
            return value[0] == 0 or _is_nullable(value[2])
    return True


def _is_nullable(items: Any) -> bool:
    spend(1)
    return all(_can_be_empty(str(op), value) for op, value in items)


def _is_at(node: Any, anchors: tuple[str, ...]) -> bool:
    op, value = node
    return str(op) == "AT" and str(value) in anchors


def _write_class(ranges: Ranges) -> str:
    """``[...]`` with "^" last: the backend takes a first "^" for a negation, escaped or not."""
    parts = []
    for low, high in ranges:
        if low <= 0x5E <= high:
            parts += [_write_range(low, 0x5D)] if low < 0x5E else []
            parts += [_write_range(0x5F, high)] if high > 0x5E else []
        else:
            parts.append(_write_range(low, high))
    if any(low <= 0x5E <= high for low, high in ranges):
        parts.append("\\u{5e}")
    return f"[{''.join(parts)}]"


def _write_range(low: int, high: int) -> str:
    return f"\\u{{{low:x}}}" if low == high else f"\\u{{{low:x}}}-\\u{{{high:x}}}"


def fits_length(pattern: str, low: int, high: int | None) -> bool:
    """Whether every string that ``pattern`` covers has ``low`` to ``high`` characters."""
    spend(len(pattern))
    try:
        shortest, longest = RE_PARSER.parse(pattern).getwidth()
    except (re.error, OverflowError, RecursionError):
        return False
    unlimited = longest >= int(RE_PARSER.MAXREPEAT)
    return shortest >= low and (high is None or (longest <= high and not unlimited))


_TRIALS_OF_A_STEP = 64  # characters that ``re`` looks at in one step


class _Ways(NamedTuple):
    """In how many ways a pattern can match a text, at most.

    loops: each can end at any character. choices: each has two branches. doubles: whether every
    character can double their number.
    """

    loops: int = 0
    choices: int = 0
    doubles: bool = False


def spend_on_search(pattern: str, text: str) -> None:
    """Count the steps that ``re.search`` may take, which tries one match after another.

    Raises StepsSpentError beyond the limit, and re.error for a pattern that ``re`` refuses.
    """
    if not is_limited():
        return
    loops, choices, doubles = _ways(pattern)
    length = len(text) + 1
    trials = length ** min(1 + loops, 16) * 2 ** min(choices, 64)
    trials += 2 ** min(length, 64) if doubles else 0
    spend(1 + trials // _TRIALS_OF_A_STEP)


@lru_cache(maxsize=256)
def _ways(pattern: str) -> _Ways:
    spend(16 + len(pattern))
    return _ways_of(RE_PARSER.parse(pattern))


def _ways_of(items: Any) -> _Ways:
    loops, choices, doubles = 0, 0, False
    for op, value in items:
        match str(op):
            case "SUBPATTERN":
                found = _ways_of(value[3])
            case "ASSERT" | "ASSERT_NOT":
                found = _ways_of(value[1])
            case "ATOMIC_GROUP":
                found = _ways_of(value)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                inner = _ways_of(value[2])
                once = value[1] == 1
                grows = not once and bool(inner.loops or inner.choices)
                doubles = doubles or grows
                found = inner._replace(loops=inner.loops + (not once), choices=inner.choices + once)
            case "BRANCH":
                parts = [_ways_of(option) for option in value[1]]
                found = _Ways(
                    max(part.loops for part in parts),
                    1 + max(part.choices for part in parts),
                    any(part.doubles for part in parts),
                )
            case "GROUPREF_EXISTS" | "GROUPREF":
                found = _Ways(loops=1, doubles=True)
            case _:
                continue
        loops, choices = loops + found.loops, choices + found.choices
        doubles = doubles or found.doubles
    return _Ways(loops, choices, doubles)
