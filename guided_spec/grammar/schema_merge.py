"""Schemas combined: two into one, values against a schema, branches against each other."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema

__all__ = ["are_disjoint", "keep_valid", "merge"]

_ALL_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords whose meaning depends on their neighbours: never split between the two sides.
_TIED = (
    {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"},
    {"prefixItems", "items", "unevaluatedItems"},
)
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
    left = {k: v for k, v in one.items() if k not in _ANNOTATIONS}
    right = {k: v for k, v in other.items() if k not in _ANNOTATIONS}
    for tied in _TIED:
        if left.keys() & tied and right.keys() & tied:
            return None
    merged = {**left, **right}
    for key in left.keys() & right.keys():
        if key == "type":
            merged[key] = _common_types(left[key], right[key])
            if not merged[key]:
                return False
        elif key == "required":
            merged[key] = list(dict.fromkeys([*left[key], *right[key]]))
        elif _text(left[key]) != _text(right[key]):
            return None
    return merged


def keep_valid(values: list[Any], schema: dict[str, Any]) -> list[Any] | None:
    """The values that are valid under ``schema``; None if it refers elsewhere."""
    if '"$ref"' in _text(schema):
        return None
    validator = jsonschema.Draft202012Validator(schema)
    return [value for value in values if validator.is_valid(value)]


def are_disjoint(branches: list[Any]) -> bool:
    """Whether no value can be valid under two of the branches; False when unsure."""
    return all(_apart(one, other) for one, other in itertools.combinations(branches, 2))


def _apart(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    left, right = _values(one), _values(other)
    if left is not None and right is not None:
        return not {_text(v) for v in left} & {_text(v) for v in right}
    if not _common_types(_types(one), _types(other)):
        return True
    if _types(one) != ["object"] or _types(other) != ["object"]:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        _apart(one.get("properties", {}).get(name), other.get("properties", {}).get(name))
        for name in shared
    )


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    # 1 and 1.0 are one value with two spellings.
    return None if values is None or any(isinstance(v, float) for v in values) else values


def _types(schema: dict[str, Any]) -> list[str]:
    values = _values(schema)
    if values is not None:
        return sorted({_type_of(value) for value in values})
    types = schema.get("type", _ALL_TYPES)
    return [types] if isinstance(types, str) else list(types)


def _type_of(value: Any) -> str:
    for kind, python in (("boolean", bool), ("number", int | float), ("string", str)):
        if isinstance(value, python):
            return kind
    return "null" if value is None else "array" if isinstance(value, list) else "object"


def _common_types(one: Any, other: Any) -> Any:
    left = [one] if isinstance(one, str) else list(one)
    right = [other] if isinstance(other, str) else list(other)
    both = [t for t in left if t in right or (t == "integer" and "number" in right)]
    both += ["integer"] if "integer" in right and "number" in left and "integer" not in both else []
    return both[0] if len(both) == 1 else both


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
