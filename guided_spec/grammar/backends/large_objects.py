"""Objects of very many keys as rules of llguidance's Lark dialect, their keys in order.

llguidance writes such objects so that each optional key adds four items to every row in which a key
may begin, and looks at each pair of items. Here a rule has the number of the next key as its
parameter, and the names of the keys are a tree of what they begin with: no row gets more than some
dozens of items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from guided_spec.grammar.backends.json_rules import (
    FIXED,
    SPACED,
    STRING,
    KeptError,
    Writer,
    as_literal,
    declared_keys,
    other_pairs,
    terminal,
)
from guided_spec.grammar.schema.keys import every_part
from guided_spec.grammar.schema.lowered import Unenforced, escape
from guided_spec.grammar.steps import spend

LARGE = 256
"""Optional keys of one object up to which rows of llguidance's own take up to a millisecond."""

_NUMBER = "[0:20]"  # the bits of the parameter that hold the number of the next key
_MOST_KEYS = 2**20 - 1
_LONGEST = 2**24  # characters of a grammar
_ATOMS = re.compile(r"\\u[0-9a-f]{4}|\\.|.", re.DOTALL)
_REST = STRING.replace('"', "", 1)  # of a string that has begun
_ANYTHING = r"/(.|\n)*/"


class Rules(NamedTuple):
    """lines: of a grammar. top: the rule of the whole value. notes: what is narrower.

    is_whole: whether all large objects are written as rules.
    """

    top: str
    lines: tuple[str, ...]
    notes: tuple[Unenforced, ...]
    is_whole: bool


def large_object_rules(
    prepared: dict[str, Any],
    options: dict[str, Any],
    prefix: str = "",
    objects: LargeObjects | None = None,
) -> Rules | None:
    """Rules for the texts of a schema that ``prepare_for_llguidance`` has made.

    options: how JSON is spelled, the ``x-guidance`` of llguidance. prefix: of the rules' names.
    objects: which are large. None where no object is large, or no rules can be written.
    """
    large = objects or LargeObjects()
    if not holds_large_object(prepared, large):
        return None
    spelling = SPACED if options["whitespace_flexible"] else FIXED
    writer = Writer(prepared, large, spelling, options, prefix)
    try:
        top = writer.rule(writer.parts.root, "")
    except (KeptError, RecursionError):
        return None
    if top is None or sum(map(len, writer.rules)) > _LONGEST:
        return None
    found = writer.report.entries
    lost = tuple(entry for entry in found if entry.keyword != "properties")
    return Rules(top, tuple(writer.rules), lost, is_whole=len(lost) == len(found))


def holds_large_object(prepared: Any, objects: LargeObjects | None = None) -> bool:
    """Whether an object in a prepared schema lists very many optional keys."""
    large = objects or LargeObjects()
    return any(isinstance(part, dict) and large.wants(part) for part in every_part(prepared))


class LargeObjects:
    """Writes objects with their keys in order, see ``ObjectRules``.

    most_optional: keys of an object that needs no rules. most_together: names that are written out
    next to each other, whatever they begin with.
    """

    def __init__(self, most_optional: int = LARGE, most_together: int = 24) -> None:
        self._most_optional, self._most_together = most_optional, most_together

    def wants(self, node: Mapping[str, Any]) -> bool:
        """Whether it lists very many optional keys."""
        listed, most = node.get("properties", ()), self._most_optional
        return len(listed) > most and len(listed) - len(node.get("required", ())) > most

    def write(self, writer: Writer, node: dict[str, Any], pointer: str) -> str | None:
        """What matches the objects of ``node``, which has keywords of objects only; None: none."""
        required = frozenset(node.get("required", ()))
        low = max(int(node.get("minProperties", 0)), len(required))
        declared = declared_keys(node)
        if "maxProperties" in node or low > max(1, len(required)) or len(declared) > _MOST_KEYS:
            return writer.keep_order(node, pointer, "keys are counted")
        keys: list[_Key] = []
        first = num_keys = 0
        for name, part in declared.items():
            value = writer.rule(part, f"{pointer}/properties/{escape(name)}")
            if value is None and name in required:
                return None
            keys.append(_Key(_atoms(name), num_keys, first, value))
            num_keys += value is not None
            first = num_keys if name in required else first
        names = _Names(writer, num_keys, first, self._most_together)
        if node.get("patternProperties"):
            if node.get("additionalProperties", True) is not False:
                reason = "no key that matches no pattern is written with escapes"
                fix = "leave the patterns out, or set additionalProperties to false"
                writer.report.note(pointer, "additionalProperties", reason, fix)
            others = other_pairs(writer, list(declared), node, pointer)
            options = [names.listed(key) for key in keys if key.value is not None]
            options += [names.other(key, value) for key, value in others]
            is_open = bool(others)
        else:
            place = f"{pointer}/additionalProperties"
            extra = writer.rule(node.get("additionalProperties", True), place)
            options, is_open = names.tree(keys, extra), extra is not None
        return names.object(options, can_be_empty=low == 0, is_open=is_open)


class _Key(NamedTuple):
    """One listed key.

    text: as JSON has it, quotes and escapes included, one atom after the other. number: in the
    order of the keys that may be there. first: the key after the required one before it, which is
    the next one at the earliest. value: the rule; None for a key that must not be there.
    """

    text: tuple[str, ...]
    number: int
    first: int
    value: str | None


def _atoms(name: str) -> tuple[str, ...]:
    return tuple(_ATOMS.findall(json.dumps(name, ensure_ascii=False)))


class _Names:
    """Writes the rules of one object.

    num_keys: that may be there. last: the key after the last required one.
    """

    def __init__(self, writer: Writer, num_keys: int, last: int, most_together: int) -> None:
        self._most_together = most_together
        self._writer, self._num_keys, self._last = writer, num_keys, last
        self._next, self._more = writer.new_name("x"), writer.new_name("y")
        self._end = f"ge({_NUMBER}, {last})" if last else ""

    def object(self, options: list[str], *, can_be_empty: bool, is_open: bool) -> str | None:
        """What matches the object. options: what a key with its value, and all after it, may be."""
        _, _, space, _ = spelling = self._writer.spelling
        closing = f'{space}"}}"'
        if not options:
            return f'"{{" {closing}' if can_be_empty else None
        end = f"{closing} %if {self._end}" if self._end else closing
        again = "" if is_open else f" %if lt({_NUMBER}, {self._num_keys})"
        self._writer.rules.append(f"{self._next}::_ : {' | '.join(options)}")
        rule = f"{self._more}::_ : {end} | {spelling.comma} {self._next}::_{again}"
        self._writer.rules.append(rule)
        begin = f'"{{" {space}{self._next}::0'
        return f'{begin} | "{{" {closing}' if can_be_empty else begin

    def tree(self, keys: Sequence[_Key], extra: str | None, depth: int = 0) -> list[str]:
        """What may come after ``depth`` atoms that all keys begin with.

        extra: the value of keys that are not listed; None where there are none.
        """
        spend(1 + len(keys))
        options: list[str] = []
        taken: list[str] = []
        is_long = len(keys) > self._most_together
        for group in _groups(keys, depth) if is_long else [[key] for key in keys]:
            edge = _shared(group) if len(group) > 1 else len(group[0].text)
            text = "".join(group[0].text[depth:edge])
            if len(group) == 1:
                options += [] if group[0].value is None else [self.listed(group[0], depth)]
                taken.append(as_literal(text))
                continue
            inner = self.tree(group, extra, edge)
            taken.append(f"{as_literal(text)} {_ANYTHING}")
            if inner:
                name = self._writer.new_name("x")
                self._writer.rules.append(f"{name}::_ : {' | '.join(inner)}")
                spans = [*_spans(group), *([] if extra is None else [(self._last, None)])]
                options.append(f"{as_literal(text)} {name}::_{_among(spans)}")
        if extra is not None:
            text = _REST if depth else STRING
            options.append(self.other(terminal(self._writer, text, taken), extra))
        return options

    def listed(self, key: _Key, depth: int = 0) -> str:
        """A listed key after ``depth`` of its atoms, and all after it."""
        text = as_literal("".join(key.text[depth:]))
        colon, among = self._writer.spelling.colon, _among(_spans([key]))
        return f"{text} {colon} {key.value} {self._more}::{key.number + 1}{among}"

    def other(self, key: str, value: str) -> str:
        """A key that is not listed, by the name of a terminal, and all after it."""
        end = f" %if {self._end}" if self._end else ""
        return f"{key} {self._writer.spelling.colon} {value} {self._more}::{self._num_keys}{end}"


def _groups(keys: Sequence[_Key], depth: int) -> Iterable[Sequence[_Key]]:
    """Keys that have the same next atom."""
    groups: dict[str, list[_Key]] = {}
    for key in keys:
        groups.setdefault(key.text[depth], []).append(key)
    return groups.values()


def _shared(keys: Sequence[_Key]) -> int:
    """How many atoms all keys begin with."""
    low, high = min(key.text for key in keys), max(key.text for key in keys)
    return next(at for at, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1])


_Span = tuple[int, int | None]  # numbers from one to another, or without an end


def _spans(keys: Sequence[_Key]) -> list[_Span]:
    """At which numbers of the next key one of ``keys`` may come."""
    ends: dict[int, int] = {}
    for key in keys:
        if key.value is not None:
            ends[key.first] = max(ends.get(key.first, 0), key.number)
    return [*ends.items()]


def _among(spans: Sequence[_Span]) -> str:
    """The condition that the number is in one of the spans."""
    conditions: list[str] = []
    for low, high in spans:
        within = [f"ge({_NUMBER}, {low})"] if low else []
        within += [] if high is None else [f"le({_NUMBER}, {high})"]
        if not within:
            return ""
        conditions.append(within[0] if len(within) == 1 else f"and({', '.join(within)})")
    return f" %if {_any_of(conditions)}"


def _any_of(conditions: Sequence[str]) -> str:
    if len(conditions) == 1:
        return conditions[0]
    half = len(conditions) // 2
    return f"or({_any_of(conditions[:half])}, {_any_of(conditions[half:])})"
