"""Schemas joined into one that says what several say together, or that admits what any admits."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any

from guided_spec.grammar.regex import readable, spend_on_search
from guided_spec.grammar.steps import spend, spend_on_value

_OF_MERGE = 4  # steps of merging two schemas
_MOST_PAIRS = 64  # of alternatives that are written out
# Keywords whose meaning depends on their neighbours: never split between the two sides.
_OBJECT = {"properties", "patternProperties", "additionalProperties"}
_ARRAY = {"prefixItems", "items"}
_LOWER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_UPPER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$defs", "definitions", "discriminator"}
    | {"contentEncoding", "contentMediaType", "contentSchema"}
)


def merge(one: Any, other: Any) -> Any:
    """One schema with the meaning of both together, or None where that is not plain to see."""
    if one is True or other is True:
        return other if one is True else one
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    spend(_OF_MERGE + len(one) + len(other))
    left, right = _asserting(one), _asserting(other)
    if _lists(left) and _lists(right):
        left, right = _with_enum(left), _with_enum(right)
    objects: dict[str, Any] | None = {}
    if not left.keys().isdisjoint(_OBJECT) and not right.keys().isdisjoint(_OBJECT):
        objects = _merge_objects(left, right)
    if objects is None:
        return None
    parted = {**objects, **(_merge_arrays(left, right) if _lists_by_position(left, right) else {})}
    merged = {**left, **right, **parted}
    for key in left.keys() & right.keys() - parted.keys():
        merged[key] = _merge_values(key, left[key], right[key])
        if merged[key] is None:
            return None
        if key in ("type", "enum") and not merged[key]:
            return False
    if merged.get("type") == "object" and "anyOf" in merged:
        merged["anyOf"] = [part for part in merged["anyOf"] if not _lacks_a_key(part)] or [False]
    return False if _lacks_a_part(merged) else merged


def is_reference(schema: Any) -> bool:
    """Whether it is a reference and nothing else."""
    return isinstance(schema, dict) and schema.keys() == {"$ref"}


def merge_parts(node: dict[str, Any], target: Callable[[dict[str, Any]], Any]) -> Any:
    """One schema for a node, what it refers to and its ``allOf``.

    target: of a reference. None where that is not plain to see.
    """
    joined: Any = {key: value for key, value in node.items() if key not in ("allOf", "$ref")}
    parts = [*node.get("allOf", ()), *([{"$ref": node["$ref"]}] if "$ref" in node else [])]
    for part in parts:
        joined = merge(joined, target(part) if is_reference(part) else part)
        if joined is None:
            return None
    return joined


def _lists_by_position(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both say what items are, and one of them says it by their place."""
    both = one.keys() & _ARRAY and other.keys() & _ARRAY
    return bool(both) and "prefixItems" in {*one, *other}


def _merge_arrays(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The items of both, each as both sides want it at its place."""
    left, right = one.get("prefixItems", []), other.get("prefixItems", [])
    rest, more = one.get("items", True), other.get("items", True)
    pairs = itertools.zip_longest(left, right)
    spend(len(left) + len(right))
    prefix = [
        _both(rest if at >= len(left) else part, more if at >= len(right) else beside)
        for at, (part, beside) in enumerate(pairs)
    ]
    items = {"items": _both(rest, more)} if "items" in one or "items" in other else {}
    return {"prefixItems": prefix, **items}


def _lists(schema: dict[str, Any]) -> bool:
    return "enum" in schema or "const" in schema


def _with_enum(schema: dict[str, Any]) -> dict[str, Any]:
    """Its values in one list."""
    if "const" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("const", "enum")}
    is_listed = "enum" not in schema or _common([schema["const"]], schema["enum"])
    return {**rest, "enum": [schema["const"]] if is_listed else []}


def _lacks_a_key(schema: Any) -> bool:
    """Whether a key must be in its objects and cannot."""
    if not isinstance(schema, dict):
        return schema is False
    properties = schema.get("properties", {})
    return any(properties.get(name) is False for name in schema.get("required", ()))


def _lacks_a_part(schema: dict[str, Any]) -> bool:
    """Whether a key or an item must be in its values and cannot."""
    if schema.get("type") != "array":
        return schema.get("type") == "object" and _lacks_a_key(schema)
    low, first = int(schema.get("minItems", 0)), schema.get("prefixItems", [])
    return False in first[:low] or (low > len(first) and schema.get("items") is False)


def conflict(one: Any, other: Any) -> str:
    """The keyword for which ``merge`` returned None."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return "allOf"
    left, right = _asserting(one), _asserting(other)
    if left.keys() & _OBJECT and right.keys() & _OBJECT and _merge_objects(left, right) is None:
        return "patternProperties"
    parted = _ARRAY if _lists_by_position(left, right) else set()
    shared = [key for key in left if key in right and key not in _OBJECT | parted]
    return next(key for key in shared if _merge_values(key, left[key], right[key]) is None)


def _asserting(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _ANNOTATIONS}


def _merge_values(key: str, one: Any, other: Any) -> Any:
    """What one keyword says on both sides; None where that has no spelling."""
    if key == "type":
        return _common_types(one, other)
    if key == "required":
        spend(len(one) + len(other))
        return list(dict.fromkeys([*one, *other]))
    if key == "enum":
        return _common(one, other)
    if key == "items":
        return _both(one, other)
    if key == "anyOf":
        return _pairs(one, other)
    if key in _LOWER:
        return max(one, other)
    if key in _UPPER:
        return min(one, other)
    # A null here is a const: two of them are not worth a special case.
    return one if text_of(one) == text_of(other) else None


def _common(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """The values of ``one`` that JSON holds equal to one of ``other``."""
    known = {canonical(value) for value in other}
    spend(len(one) + len(other))
    return [value for value in one if canonical(value) in known]


def _pairs(one: Sequence[Any], other: Sequence[Any]) -> list[Any] | None:
    """The alternatives of two lists that both hold; None where they are many.

    Those that cannot be joined here, such as references, stand side by side.
    """
    if len(one) * len(other) > _MOST_PAIRS:
        return None
    merged = [_merged_or_both(*pair) for pair in itertools.product(one, other)]
    return [option for option in merged if option is not False] or [False]


def _merged_or_both(one: Any, other: Any) -> Any:
    merged = merge(one, other)
    return {"allOf": [one, other]} if merged is None else merged


def canonical(value: Any) -> Hashable:
    """What values that JSON holds equal share, as ``json.loads`` reads them: not 1 and true."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return tuple(map(canonical, value))
    if isinstance(value, dict):
        return frozenset((canonical(key), canonical(part)) for key, part in value.items())
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    number: float = value
    return number


def _merge_objects(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """The properties of both, each key as both sides want it."""
    if "patternProperties" in one or "patternProperties" in other:
        return _merge_patterns(one, other)
    extra, more = one.get("additionalProperties", True), other.get("additionalProperties", True)
    left, right = one.get("properties", {}), other.get("properties", {})
    names = dict.fromkeys([*left, *right])
    spend(len(names))
    properties = {name: _both(left.get(name, extra), right.get(name, more)) for name in names}
    merged: dict[str, Any] = {"properties": properties} if names else {}
    if "additionalProperties" in one or "additionalProperties" in other:
        merged["additionalProperties"] = _both(extra, more)
    return merged


def _merge_patterns(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Where one side alone has patterns; keys that it lists match them besides."""
    if "patternProperties" in one and "patternProperties" in other:
        return _merge_same_patterns(one, other)
    names = dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])
    with_patterns, plain = (one, other) if "patternProperties" in one else (other, one)
    patterns: dict[str, Any] = with_patterns["patternProperties"]
    left, right = with_patterns.get("properties", {}), plain.get("properties", {})
    extra = with_patterns.get("additionalProperties", True)
    more = plain.get("additionalProperties", True)
    properties: dict[str, Any] = {}
    for name in names:
        matching = [part for pattern, part in patterns.items() if holds(pattern, name)]
        if name in right and matching and more not in (True, False, {}):
            return None  # for ``more`` would then hold for this key too
        wanted = [left[name]] if name in left else [] if matching else [extra]
        wanted += matching if more is False else []
        properties[name] = reduce(_both, wanted, right.get(name, more))
    merged: dict[str, Any] = {"properties": properties} if names else {}
    kept = {} if more is False else {p: _both(part, more) for p, part in patterns.items()}
    if "additionalProperties" in one or "additionalProperties" in other:
        merged["additionalProperties"] = _both(extra, more)
    return {**merged, "patternProperties": kept}


def _merge_same_patterns(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Where both sides have the same patterns, so that the same keys are further ones to both."""
    patterns, more_patterns = one["patternProperties"], other["patternProperties"]
    if patterns.keys() != more_patterns.keys():
        return None
    left, right = one.get("properties", {}), other.get("properties", {})
    extra, more = one.get("additionalProperties", True), other.get("additionalProperties", True)
    properties: dict[str, Any] = {}
    for name in dict.fromkeys([*left, *right]):
        is_further = not any(holds(pattern, name) for pattern in patterns)
        own = left.get(name, extra if is_further else True)
        properties[name] = _both(own, right.get(name, more if is_further else True))
    merged: dict[str, Any] = {"properties": properties} if properties else {}
    if "additionalProperties" in one or "additionalProperties" in other:
        merged["additionalProperties"] = _both(extra, more)
    both = {pattern: _both(part, more_patterns[pattern]) for pattern, part in patterns.items()}
    return {**merged, "patternProperties": both}


def holds(pattern: str, name: str) -> bool:
    """Whether a key matches a pattern of the schema, or one as a backend gets it."""
    if "\\u{" in pattern:  # which no pattern of Python's has
        own = readable(pattern)
        spend_on_search(own, name)
        return re.fullmatch(own, name) is not None
    spend_on_search(pattern, name)
    return re.search(pattern, name) is not None


def _both(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or one == {} or text_of(one) == text_of(other):
        return other
    has_types = isinstance(other, dict) and "type" in one and "type" in other
    if has_types and not _common_types(one["type"], other["type"]):
        return False
    return one if other is True or other == {} else {"allOf": [one, other]}


def _common_types(one: Any, other: Any) -> Any:
    left = [one] if isinstance(one, str) else list(one)
    right = [other] if isinstance(other, str) else list(other)
    both = [t for t in left if t in right or (t == "integer" and "number" in right)]
    both += ["integer"] if "integer" in right and "number" in left and "integer" not in both else []
    return both[0] if len(both) == 1 else both


def text_of(value: Any) -> str:
    """A JSON value as text, the same for all orders of its keys."""
    spend_on_value(value)
    return json.dumps(value, sort_keys=True)


def join_all(parts: Sequence[Any]) -> Any:
    """One schema for what all parts admit: side by side where they share no keyword, else allOf."""
    spend(1 + len(parts))
    if any(part is False for part in parts):
        return False
    joined: dict[str, Any] = {}
    place = 0  # of the joined ones: properties are generated in the order of the parts
    rest: list[Any] = []
    for part in _distinct([part for part in parts if part is not True]):
        merged = None
        if "allOf" not in part and "$ref" not in part:
            merged = merge(joined, part)
        if merged is False:
            return False
        if merged is None:
            rest += part["allOf"] if part.keys() == {"allOf"} else [part]
            spend(1 + len(rest) // 16)
        else:
            place = place if joined else len(rest)
            joined = merged
    if not rest:
        return joined
    if not joined and len(rest) == 1:
        return rest[0]
    return {"allOf": [*rest[:place], *([joined] if joined else []), *rest[place:]]}


def any_of(parts: Sequence[Any]) -> Any:
    """One schema for what any part admits; False for none."""
    spend(1 + len(parts))
    if any(part is True or part == {} for part in parts):
        return {}
    options: list[Any] = []
    for part in _distinct([part for part in parts if part is not False]):
        options += part["anyOf"] if part.keys() == {"anyOf"} else [part]
        spend(1 + len(options) // 16)
    if len(options) < 2:
        return options[0] if options else False
    return {"anyOf": options}


def _distinct(parts: Sequence[Any]) -> list[Any]:
    if len(parts) < 2:  # most are, and writing one out is what costs
        return [part for part in parts if part]
    seen: set[str] = set()
    kept = []
    for part in parts:
        text = text_of(part)
        if part and text not in seen:
            kept.append(part)
            seen.add(text)
    return kept
