"""Objects with their keys in order as rules of llguidance's Lark dialect, where those are needed.

These are objects of very many keys: llguidance writes them so that each optional key adds four
items to every row in which a key may begin, and looks at each pair of items. Here a rule has the
number of the next key as its parameter, and the names of the keys are a tree of what they begin
with: no row gets more than some dozens of items. And they are objects whose keys are counted, which
llguidance refuses: there the number of keys is the parameter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from guided_spec.grammar.backends.json_rules import (
    FIXED,
    LONGEST,
    SPACED,
    STRING,
    KeptError,
    Pair,
    Writer,
    as_literal,
    declared_keys,
    other_pairs,
    terminal,
)
from guided_spec.grammar.regex import readable
from guided_spec.grammar.schema.keys import every_part, has_finite_value, runs_out
from guided_spec.grammar.schema.lowered import Unenforced, escape
from guided_spec.grammar.schema.unique.amounts import texts_of
from guided_spec.grammar.steps import spend

LARGE = 256
"""Optional keys of one object up to which rows of llguidance's own take up to a millisecond."""

_NUMBER = "[0:20]"  # the bits of the parameter that hold the number of the next key
_MOST_KEYS = 2**20 - 1
_MOST_COUNTED = 512  # keys of an object that are listed, where keys are counted
_ATOMS = re.compile(r"\\u[0-9a-f]{4}|\\.|.", re.DOTALL)
_REST = STRING.replace('"', "", 1)  # of a string that has begun
_IF = re.compile(r' %if [^"]*$')
_ANYTHING = r"/(.|\n)*/"


class Rules(NamedTuple):
    """lines: of a grammar. top: the rule of the whole value. notes: what is narrower.

    is_whole: whether all large objects are written as rules.
    """

    top: str
    lines: tuple[str, ...]
    notes: tuple[Unenforced, ...]
    is_whole: bool


def ordered_object_rules(
    prepared: dict[str, Any],
    options: dict[str, Any],
    prefix: str = "",
    objects: OrderedObjects | None = None,
) -> Rules | None:
    """Rules for the texts of a schema that ``prepare_for_llguidance`` has made.

    options: how JSON is spelled, the ``x-guidance`` of llguidance. prefix: of the rules' names.
    objects: which are large. None where no object is large, or no rules can be written.
    """
    large = objects or OrderedObjects()
    if not holds_ordered_object(prepared, large):
        return None
    spelling = SPACED if options["whitespace_flexible"] else FIXED
    writer = Writer(prepared, large, spelling, options, prefix)
    try:
        top = writer.rule(writer.parts.root, "")
    except (KeptError, RecursionError):
        return None
    if top is None or sum(map(len, writer.rules)) > LONGEST:
        return None
    found = writer.report.entries
    lost = tuple(entry for entry in found if entry.keyword != "properties")
    return Rules(top, tuple(writer.rules), lost, is_whole=len(lost) == len(found))


def holds_ordered_object(prepared: Any, objects: OrderedObjects | None = None) -> bool:
    """Whether an object in a prepared schema lists very many optional keys."""
    large = objects or OrderedObjects()
    return any(isinstance(part, dict) and large.wants(part) for part in every_part(prepared))


class OrderedObjects:
    """Writes objects with their keys in order, see ``ObjectRules``.

    most_optional: keys of an object that needs no rules. most_together: names that are written out
    next to each other, whatever they begin with. repeats: whether keys that are not listed may come
    twice, as where no filter is.
    """

    def __init__(
        self, most_optional: int = LARGE, most_together: int = 24, *, repeats: bool = False
    ) -> None:
        self._most_optional, self._most_together = most_optional, most_together
        self._repeats = repeats

    def wants(self, node: Mapping[str, Any]) -> bool:
        """Whether it lists very many optional keys, or counts keys as llguidance cannot."""
        listed, most = node.get("properties", ()), self._most_optional
        if len(listed) > most and len(listed) - len(node.get("required", ())) > most:
            return True
        return "enum" not in node and "const" not in node and _counts_keys(node)

    def write(self, writer: Writer, node: dict[str, Any], pointer: str) -> str | None:
        """What matches the objects of ``node``, which has keywords of objects only; None: none."""
        if _counts_keys(node):
            return self._write_counted(writer, node, pointer)
        found = _listed_keys(writer, node, pointer)
        if found is None:
            return None
        if len(found.keys) > _MOST_KEYS:
            return writer.keep_order(node, pointer, "it lists too many keys")
        names = _Names(writer, found.num_keys, found.last, self._most_together)
        if node.get("patternProperties"):
            others = _other_keys(writer, node, pointer)
            options = [names.listed(key) for key in found.keys if key.value is not None]
            options += [names.other(key, value) for key, value in others]
            is_open = bool(others)
        else:
            place = f"{pointer}/additionalProperties"
            extra = writer.rule(node.get("additionalProperties", True), place)
            options, is_open = names.tree(found.keys, extra), extra is not None
        low = max(int(node.get("minProperties", 0)), len(node.get("required", ())))
        return names.object(options, can_be_empty=low == 0, is_open=is_open)

    def _write_counted(self, writer: Writer, node: dict[str, Any], pointer: str) -> str | None:
        found = _listed_keys(writer, node, pointer)
        if found is None:
            return None
        if len(found.keys) > _MOST_COUNTED:
            raise KeptError(f"keys are counted of which more than {_MOST_COUNTED} are listed")
        others = _other_keys(writer, node, pointer)
        low, high = int(node.get("minProperties", 0)), node.get("maxProperties", math.inf)
        if self._repeats and others and low > max(1, len(node.get("required", ()))):
            raise KeptError("keys that are not listed may repeat, and are counted")
        is_enough = bool(others) and _are_enough(writer, node, low)
        if others and not is_enough and low > found.num_keys:
            raise KeptError("there may be too few keys that are not listed")
        if others and not is_enough and low:
            reason = "the least number of keys is that of those listed"
            fix = "list the keys under properties"
            writer.report.note(pointer, "minProperties", reason, fix)
        keys = [key for key in found.keys if key.value is not None]
        return _Counted(writer, keys, others, (low, high), is_enough=is_enough).object()


def _counts_keys(node: Mapping[str, Any]) -> bool:
    """Whether keys are counted that need not all be listed and required."""
    required = len(node.get("required", ()))
    low, high = node.get("minProperties", 0), node.get("maxProperties")
    is_plain = len(node.get("properties", ())) <= required and low <= max(1, required)
    return not is_plain and (low > required or high is not None)


def _are_enough(writer: Writer, node: Mapping[str, Any], low: int) -> bool:
    """Whether there surely are ``low`` keys that are not listed. The filter takes none twice."""
    if not runs_out(node, writer.parts.by_name):
        return True
    taken = len(declared_keys(node))
    found = [
        texts_of(readable(pattern))
        for pattern, part in node.get("patternProperties", {}).items()
        if has_finite_value(part, writer.parts.by_name)
    ]
    return any(amount - taken >= low for amount in found)


class _Listed(NamedTuple):
    """keys: all that are listed. num_keys: of those that may be there. last: the key after the last
    required one.
    """

    keys: list[_Key]
    num_keys: int
    last: int


def _listed_keys(writer: Writer, node: dict[str, Any], pointer: str) -> _Listed | None:
    """None where no object is left."""
    required = frozenset(node.get("required", ()))
    keys: list[_Key] = []
    first = count = 0
    for name, part in declared_keys(node).items():
        value = writer.rule(part, f"{pointer}/properties/{escape(name)}")
        if value is None and name in required:
            return None
        keys.append(_Key(_atoms(name), count, first, value, is_required=name in required))
        count += value is not None
        first = count if name in required else first
    return _Listed(keys, count, first)


def _other_keys(writer: Writer, node: dict[str, Any], pointer: str) -> list[Pair]:
    if node.get("patternProperties") and node.get("additionalProperties", True) is not False:
        reason = "no key that matches no pattern is written with escapes"
        fix = "leave the patterns out, or set additionalProperties to false"
        writer.report.note(pointer, "additionalProperties", reason, fix)
    return other_pairs(writer, list(declared_keys(node)), node, pointer)


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
    is_required: bool


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
        self._writer.rules.append(_rule(self._next, options))
        ends = [end, f"{spelling.comma} {self._next}::_{again}"]
        self._writer.rules.append(_rule(self._more, ends))
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
                self._writer.rules.append(_rule(name, inner))
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


def _rule(name: str, options: Sequence[str]) -> str:
    """A line of the grammar. llguidance refuses a parameter on which nothing depends, and loses
    what a rule of one plain option does to it.
    """
    always = "" if any(map(_IF.search, options)) else f" %if ge({_NUMBER}, 0)"
    return f"{name}::_ : {' | '.join(options)}{always}"


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


class _Counted:
    """Writes the rules of one object whose keys are counted: two for each listed key.

    Their parameter is the number of keys so far. keys: those listed that may be there. bounds: how
    many keys there are at least and at most. others: that are not listed. is_enough: whether these
    suffice for the least number.
    """

    def __init__(
        self,
        writer: Writer,
        keys: Sequence[_Key],
        others: Sequence[Pair],
        bounds: tuple[int, float],
        *,
        is_enough: bool,
    ) -> None:
        self._writer, self._keys, self._others = writer, keys, others
        (self._low, self._high), self._is_enough = bounds, is_enough
        self._next, self._more = writer.new_name("x"), writer.new_name("y")
        needed = [key.is_required for key in keys]
        self._needed = [sum(needed[at:]) for at in range(len(keys) + 1)]

    def object(self) -> str | None:
        """What matches the object; None: none."""
        space, count = self._writer.spelling.space, len(self._keys)
        if self._needed[0] > self._high or self._low > self._high:
            return None
        if self._low > count and not self._is_enough:
            return None
        if self._high < 1 or not (self._keys or self._others):
            return f'"{{" {space}"}}"'
        rules = self._writer.rules
        for at in range(count + bool(self._others)):
            rules.append(_rule(f"{self._next}k{at}", self._options(at)))
        for at in range(min(count, 1), count + 1):
            rules.append(_rule(f"{self._more}k{at}", self._ends(at)))
        begin = f'"{{" {space}{self._next}k0::0'
        can_be_empty = self._low == 0 and not self._needed[0]
        return f'{begin} | "{{" {space}"}}"' if can_be_empty else begin

    def _options(self, at: int) -> list[str]:
        """The key ``at``, or one after it, with its value, and all that comes then."""
        colon = self._writer.spelling.colon
        if at == len(self._keys):
            among = self._among(0, self._high - 1)
            then = f"{self._more}k{at}::incr({_NUMBER}){among}"
            return [f"{key} {colon} {value} {then}" for key, value in self._others]
        key, left = self._keys[at], len(self._keys) - at
        # If it is left out up to here, those left have to suffice.
        low = 0 if self._is_enough else self._low - left
        high = self._high - 1 - self._needed[at + 1]
        then = f"{self._more}k{at + 1}::incr({_NUMBER}){self._among(low, high)}"
        options = [f"{as_literal(''.join(key.text))} {colon} {key.value} {then}"]
        if key.is_required or (at + 1 == len(self._keys) and not self._others):
            return options
        return [*(options if high >= 0 else ()), f"{self._next}k{at + 1}::_"]

    def _ends(self, at: int) -> list[str]:
        """What comes when the keys before ``at`` are over."""
        spelling = self._writer.spelling
        comma = f"{spelling.comma} {self._next}k{at}::_"
        if self._needed[at]:
            return [comma]
        end = f'{spelling.space}"}}"{self._among(self._low, math.inf)}'
        if at == len(self._keys) and not self._others:
            return [end]
        return [end, f"{comma}{self._among(0, self._high - 1)}"]

    def _among(self, low: float, high: float) -> str:
        return _among([(max(0, int(low)), None if high == math.inf else int(high))])
