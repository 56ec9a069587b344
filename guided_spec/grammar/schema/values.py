"""Schemas as sets of values: reduced by some values, and checked against one value.

Whether two schemas can both admit one value is decided by what each surely demands.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import referencing.exceptions

from guided_spec.grammar.languages import are_apart
from guided_spec.grammar.regex import RE_PARSER
from guided_spec.grammar.schema.counting import ValueCheck
from guided_spec.grammar.schema.document import Document, refers
from guided_spec.grammar.schema.joining import text_of
from guided_spec.grammar.steps import spend

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
"""The types; an integer is a number."""
_TYPES: dict[type, str] = {
    **{bool: "boolean", int: "number", float: "number", str: "string"},
    **{type(None): "null", list: "array", dict: "object"},
}
_LONGEST = 4_000  # characters of a pattern
_MOST_GAPS = 32
_MOST_ARRAYS = 500
_RUN = re.compile(r"\^\[(\^?)((?:\\.|[^\\\]])+)\][+*]\$")
_OTHER = "é"  # stands for everything beyond ASCII
_ASCII = [chr(code) for code in range(128)]
_DEPTH = 8
_DIGITS = 15  # of a decimal number that a float keeps
# Steps of what a pattern begins with, of what a schema demands, and of one proof.
_OF_FIRST, _OF_DEMANDS, _OF_PROOF = 24, 6, 12
_MOST_STEPS = 20_000  # of one document; beyond, nothing is known to be disjoint
_RANGES = (
    ("number", "minimum", "maximum"),
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)


class Disjuncts(NamedTuple):
    """Schemas, of which any admits a value. exact: whether these are all the values meant."""

    schemas: list[Any]
    exact: bool = True


def type_of(value: Any) -> str:
    """Its JSON type, "number" for an integer too."""
    return _TYPES[type(value)]


def values_within(value: Any) -> Iterator[Any]:
    """A JSON value, and all values and keys within it."""
    stack = [value]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, dict):
            stack += [*part, *part.values()]
        elif isinstance(part, list):
            stack += part


def others(values: Sequence[Any], types: frozenset[str]) -> Disjuncts:
    """Every value of ``types`` that is none of ``values``; arrays and objects as far as it goes."""
    by_type: dict[str, list[Any]] = {}
    spend(len(values))
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    # One schema for all that are free: branches are multiplied with those of other keywords.
    free = sorted(types - by_type.keys())
    schemas: list[Any] = []
    exact = by_type.keys().isdisjoint(types & {"array", "object"})
    if free:
        schemas.append({"type": free if len(free) > 1 else free[0]})
    if "string" in types and "string" in by_type:
        pattern = _not_one_of(by_type["string"])
        exact = exact and pattern is not None
        schemas += [{"type": "string", "pattern": pattern}] if pattern else []
    if "number" in types and "number" in by_type:
        taken = sorted(set(by_type["number"]))
        if len(taken) <= _MOST_GAPS:
            schemas += _gaps(taken)
        else:
            exact = False
    if "boolean" in types and "boolean" in by_type:
        schemas += [{"enum": [value]} for value in (True, False) if value not in by_type["boolean"]]
    return Disjuncts(schemas, exact)


def _gaps(numbers: list[Any]) -> list[Any]:
    bounds = [
        {"exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(numbers)
    ]
    ends = [{"exclusiveMaximum": numbers[0]}, {"exclusiveMinimum": numbers[-1]}]
    return [{"type": "number", **bound} for bound in [*ends[:1], *bounds, *ends[1:]]]


def _not_one_of(texts: Sequence[str]) -> str | None:
    """A pattern for the strings that are none of ``texts``; None if it would be very long."""
    if sum(map(len, texts)) > _LONGEST // 8 or max(map(len, texts)) > 60:
        return None
    written = _write_others(tuple(texts))
    return written if len(written) <= _LONGEST else None


@lru_cache(maxsize=256)  # of a oneOf with a constant, each branch excludes those of all others
def _write_others(texts: tuple[str, ...]) -> str:
    spend(sum(map(len, texts)))
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^(?:{_outside(tree)})$"


def _outside(node: dict[str, Any]) -> str:
    """A pattern for continuations from here that do not end on one of the texts."""
    chars = sorted(char for char in node if char)
    options = [] if "" in node else [""]
    excluded = "".join(re.escape(char) if char != "^" else "\\^" for char in chars)
    options.append(f"[^{excluded}](?s:.)*" if chars else "(?s:.)+")
    options += [f"{re.escape(char)}(?:{_outside(node[char])})" for char in chars]
    return "|".join(options)


def other_characters(pattern: str) -> str | None:
    """For ``^[...]+$`` a pattern for strings with a character outside, else None."""
    match = _RUN.fullmatch(pattern)
    if match is None:
        return None
    negated, members = match.groups()
    if negated:
        return f"^[^\\n]*[{members}]"
    # Python's $ also matches before a last newline, which therefore does not count as outside.
    return f"^$|[^{members}\\n]" if pattern.endswith("+$") else f"[^{members}\\n]"


def unique_arrays(values: Sequence[Any], low: int, high: int) -> list[list[Any]]:
    """The arrays of ``low`` to ``high`` different values, up to a length that makes few of them.

    They are all of these where the last one has ``high`` values.
    """
    arrays: list[list[Any]] = []
    for size in range(low, high + 1):
        if len(arrays) + math.perm(len(values), size) > _MOST_ARRAYS:
            break
        spend(math.perm(len(values), size) * (1 + size // 8))
        arrays += map(list, itertools.permutations(values, size))
    return arrays


def constant(value: Any) -> dict[str, Any]:
    """A schema for this one value, an array or an object written out part by part."""
    spend(2)
    if isinstance(value, list):
        items = [constant(item) for item in value]
        schema: dict[str, Any] = {"type": "array", "items": False, "minItems": len(items)}
        return {**schema, "prefixItems": items} if items else schema
    if isinstance(value, dict):
        properties = {name: constant(part) for name, part in value.items()}
        schema = {"type": "object", "required": list(value), "additionalProperties": False}
        return {**schema, "properties": properties} if properties else schema
    return {"enum": [value]}


def keep_valid(
    values: list[Any], schema: dict[str, Any], check: ValueCheck | None = None
) -> list[Any] | None:
    """The values that are valid under ``schema``.

    check: of the whole, in which references are looked up. None if there are some and no check.
    """
    if check is None:
        if '"$ref"' in text_of(schema):
            return None
        check = ValueCheck(schema)
    return [value for value in values if check.is_valid(value, schema)]


@lru_cache(maxsize=256)
def _first_characters(pattern: str) -> frozenset[str] | None:
    """ASCII characters that a match may begin with, and "é" for all others.

    None where the pattern is not anchored, may be empty, or begins with what is not seen through.
    """
    spend(_OF_FIRST + len(pattern))
    parsed = RE_PARSER.parse(pattern)
    items = list(parsed)
    if parsed.state.flags & (re.IGNORECASE | re.MULTILINE):
        return None
    if len(items) < 2 or not str(items[0][1]).startswith("AT_BEGINNING"):
        return None
    return _of_item(*items[1])


def _of_item(op: Any, value: Any) -> frozenset[str] | None:
    match str(op):
        case "LITERAL":
            return frozenset([chr(value) if value < 128 else _OTHER])
        case "IN":
            return _of_class(value)
        case "SUBPATTERN":
            inner = list(value[3])
            return _of_item(*inner[0]) if inner and not value[1] and not value[2] else None
        case "MAX_REPEAT" | "MIN_REPEAT":
            inner = list(value[2])
            return _of_item(*inner[0]) if inner and value[0] > 0 else None
        case "BRANCH":
            parts = [_of_item(*list(option)[0]) if list(option) else None for option in value[1]]
            known = [part for part in parts if part is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
    return None


def _of_class(members: Any) -> frozenset[str]:
    found: set[str] = set()
    negated = str(members[0][0]) == "NEGATE"
    for kind, member in members[1:] if negated else members:
        match str(kind):
            case "LITERAL":
                found.add(chr(member) if member < 128 else _OTHER)
            case "RANGE":
                low, high = member
                found.update(char for char in _ASCII if low <= ord(char) <= high)
                found.update([_OTHER] if high >= 128 else [])
            case _:
                letter = str(member).rsplit("_", 1)[-1][0].lower()
                letter = letter.upper() if "_NOT_" in str(member) else letter
                found.update(char for char in _ASCII if re.match(f"\\{letter}", char))
                found.add(_OTHER)
    if not negated:
        return frozenset(found)
    return frozenset([*(char for char in _ASCII if char not in found), _OTHER])


@dataclass
class Demands:
    """What every value of a schema fulfils.

    values: the only ones, if there are few. names: the only keys, if they are known. parts: for a
    key, the schemas of its value. extras: schemas of all keys but some. first: what a string can
    begin with. patterns: that each string matches. options: lists of schemas; one of each list
    holds.
    """

    types: frozenset[str] = ALL_TYPES
    is_whole: bool = False  # its numbers are integers
    values: list[Any] | None = None
    required: set[str] = field(default_factory=set)
    names: set[str] | None = None
    parts: dict[str, list[Any]] = field(default_factory=dict)
    extras: list[tuple[frozenset[str], Any]] = field(default_factory=list)
    first: frozenset[str] | None = None
    patterns: list[str] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    options: list[list[Any]] = field(default_factory=list)
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)


class Disjointness:
    """Questions about the schemas of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._check = ValueCheck(document.root)
        self._steps = 0

    def types(self, schema: Any) -> frozenset[str]:
        """The types that a value may have; perhaps too many, never too few."""
        return self._types(schema, frozenset())

    def _types(self, schema: Any, above: frozenset[int]) -> frozenset[str]:
        """above: the ids of schemas for the same value, of which this one is an option."""
        spend(_OF_DEMANDS)
        found = self.demands([schema])
        types = found.types
        for options in found.options:
            if id(options) in above:  # it is an option of itself, which says nothing
                continue
            inside = above | {id(options)}
            types &= frozenset().union(*(self._types(option, inside) for option in options))
        return types

    def is_valid(self, value: Any, schema: Any) -> bool:
        """Whether jsonschema takes ``value`` under ``schema``, formats aside."""
        return self._check.is_valid(value, schema)

    def apart(self, one: Any, other: Any, context: Any = None) -> bool:
        """Whether no value is valid under both and ``context``; False where unsure."""
        beside = [] if context is None else [context]
        return self._apart([one, *beside], [other, *beside], _DEPTH)

    def shared_types(self, one: Any, other: Any, context: Any = None) -> frozenset[str]:
        """The types of values valid under both and ``context``; perhaps too many, never too few."""
        if self.apart(one, other, context):
            return frozenset()
        beside = [] if context is None else [context]
        left, right = self.demands([one, *beside]), self.demands([other, *beside])
        types = left.types & right.types
        return frozenset(kind for kind in types if not self._apart_as(kind, left, right, _DEPTH))

    def _apart(self, one: list[Any], other: list[Any], depth: int) -> bool:
        self._steps += 1
        if depth <= 0 or self._steps > _MOST_STEPS:
            return False
        spend(_OF_PROOF)
        left, right = self.demands(one), self.demands(other)
        for mine, theirs, all_of_theirs in ((left, right, other), (right, left, one)):
            for options in mine.options:
                rest = theirs.types
                if all(
                    self._apart([option], all_of_theirs, depth - 2) or not self.types(option) & rest
                    for option in options
                ):
                    return True
        types = left.types & right.types
        if not types:
            return True
        if left.values is not None and self._none_fits(left.values, other):
            return True
        if right.values is not None and self._none_fits(right.values, one):
            return True
        return all(self._apart_as(kind, left, right, depth) for kind in types)

    def _none_fits(self, values: list[Any], schemas: list[Any]) -> bool:
        if self._document.has_parts and any(map(refers, schemas)):
            return False  # jsonschema would look references up from the root
        try:
            return not any(
                all(self.is_valid(value, schema) for schema in schemas) for value in values
            )
        except (referencing.exceptions.Unresolvable, RecursionError):
            return False

    def _apart_as(self, kind: str, one: Demands, other: Demands, depth: int) -> bool:
        """Whether they share no value of this type."""
        low = max(one.low.get(kind, -math.inf), other.low.get(kind, -math.inf))
        if low > min(one.high.get(kind, math.inf), other.high.get(kind, math.inf)):
            return True
        spend(1 + len(one.required) + len(other.required))
        if kind == "array" and low >= 1:
            return any(self._apart([a], [b], depth - 1) for a in one.items for b in other.items)
        if kind == "string":
            if one.first is not None and other.first is not None and not one.first & other.first:
                return True
            return any(are_apart(a, b) for a in one.patterns for b in other.patterns)
        if kind != "object":
            return False
        for mine, theirs in ((one, other), (other, one)):
            if theirs.names is not None and mine.required - theirs.names:
                return True
        return any(
            self._apart([a], [b], depth - 1)
            for name in one.required | other.required
            for a in self._at(one, name)
            for b in self._at(other, name)
        )

    @staticmethod
    def _at(demands: Demands, name: str) -> list[Any]:
        """The schemas of one key's value."""
        extras = [schema for names, schema in demands.extras if name not in names]
        return demands.parts.get(name, []) + extras

    def demands(self, schemas: list[Any]) -> Demands:
        """What every value that is valid under all of ``schemas`` fulfils."""
        joined = Demands()
        for schema in schemas:
            self._add(joined, schema, 0)
        return joined

    def _add(self, found: Demands, schema: Any, depth: int) -> None:
        if schema is False:
            found.types = frozenset()
        if not isinstance(schema, dict) or depth > _DEPTH:
            return
        words = self._document.spell(schema, strict=True)
        if "$ref" in words:
            target = self._document.resolve(schema)
            if target is not None:
                self._add(found, target.schema, depth + 1)
        for part in words.get("allOf", []):
            self._add(found, part, depth + 1)
        found.options += [words[key] for key in ("anyOf", "oneOf") if key in words]
        if "type" in words:
            named = words["type"] if isinstance(words["type"], list) else [words["type"]]
            found.types &= {"number" if name == "integer" else name for name in named}
        if "enum" in words or "const" in words:
            values = [words["const"]] if "const" in words else words["enum"]
            spend(len(values) // 4)
            found.types &= {type_of(value) for value in values}
            if found.values is None or len(values) < len(found.values):
                found.values = values
        self._add_ranges(found, words)
        self._add_object(found, words)
        if "items" in words and "prefixItems" not in words:
            found.items.append(words["items"])

    @staticmethod
    def _add_ranges(found: Demands, words: dict[str, Any]) -> None:
        first = _first_characters(words["pattern"]) if "pattern" in words else None
        if first is not None:
            found.first = first if found.first is None else found.first & first
        found.patterns += [words["pattern"]] if "pattern" in words else []
        for kind, low, high in _RANGES:
            if low in words:
                found.low[kind] = max(words[low], found.low.get(kind, -math.inf))
            if high in words:
                found.high[kind] = min(words[high], found.high.get(kind, math.inf))

    @staticmethod
    def _add_object(found: Demands, words: dict[str, Any]) -> None:
        properties = words.get("properties", {})
        spend(len(properties) // 2)
        found.required.update(words.get("required", ()))
        for name, part in properties.items():
            found.parts.setdefault(name, []).append(part)
        extra = words.get("additionalProperties", True)
        if "patternProperties" in words:
            return
        if isinstance(extra, dict):
            found.extras.append((frozenset(properties), extra))
        if extra is False:
            names = set(properties)
            found.names = names if found.names is None else found.names & names


def inner_bounds(bounds: Mapping[str, float], most_decimals: int) -> dict[str, float]:
    """Bounds that include themselves, of digits that a float keeps, no wider than ``bounds``.

    Numbers are read as floats, so 5.00000000000000000001 is none above 5, and backends take bounds
    of too many digits for others. What is within the result is within ``bounds`` once it is read.
    Infinite where no number is.

    most_decimals: of the result.
    """
    found = dict[str, float]()
    for name, bound in bounds.items():
        is_strict = name.startswith("exclusive")
        if name in ("minimum", "exclusiveMinimum"):
            inner = _inner_lower(bound, most_decimals, is_strict=is_strict)
            found["minimum"] = max(found.get("minimum", inner), inner)
        else:
            inner = -_inner_lower(-bound, most_decimals, is_strict=is_strict)
            found["maximum"] = min(found.get("maximum", inner), inner)
    never = {"minimum": -math.inf, "maximum": math.inf}  # such a bound says nothing
    return {name: bound for name, bound in found.items() if bound != never[name]}


def _inner_lower(bound: float, most_decimals: int, *, is_strict: bool) -> float:
    try:
        step = _step_at(bound, most_decimals)
        number = Fraction(bound) // step * step
        while (read := float(number)) < bound or (is_strict and read == bound):
            number += step
    except OverflowError:
        return math.copysign(math.inf, bound)
    return int(number) if number.denominator == 1 else read


def _step_at(bound: float, most_decimals: int) -> Fraction:
    """Between numbers of digits that a float keeps; whole numbers and floats keep more."""
    if abs(bound) > 2**53:
        return Fraction(math.ulp(float(bound)))
    if abs(bound) >= 10**_DIGITS:
        return Fraction(1)
    exponent = math.floor(math.log10(abs(bound))) if bound else -most_decimals
    return Fraction(10) ** max(exponent + 1 - _DIGITS, -most_decimals)
