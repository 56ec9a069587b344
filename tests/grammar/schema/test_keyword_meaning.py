"""Each keyword that is lowered means what it says: one small schema each, and values that tell.

The second value is like the first, but for what the keyword forbids. Drawn schemas are in
``test_lower.py``.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from guided_spec.grammar.schema.lower import lower

ROOT = {"$id": "https://example.com/root.json"}  # what makes every schema one to be lowered
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "oneOf": ({"oneOf": [{"minimum": 2}, {"maximum": 5}]}, 1, 3),
    "anyOf": ({"anyOf": [STRING, INTEGER]}, 3, None),
    "allOf": ({"allOf": [{"minimum": 2}, {"maximum": 5}], "type": "integer"}, 3, 6),
    "allOf of bounds": ({"allOf": [{"minimum": 2}, {"minimum": 4}], "type": "integer"}, 4, 3),
    "allOf of lengths": ({"allOf": [{"maxLength": 3}, {"maxLength": 1}], **STRING}, "a", "ab"),
    "allOf of required": (
        {"type": "object", "allOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "allOf of properties": (
        {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": STRING}}]},
        {"a": 1, "b": "x"},
        {"a": 1, "b": 1},
    ),
    "not": ({"not": {"const": "a"}, **STRING}, "b", "a"),
    "then": ({"if": {"minimum": 5}, "then": {"maximum": 7}, **INTEGER}, 6, 8),
    "else": ({"if": {"minimum": 5}, "else": {"minimum": 2}, **INTEGER}, 3, 1),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "dependentSchemas": (
        {"dependentSchemas": {"a": {"properties": {"b": INTEGER}}}},
        {"a": 1, "b": 1},
        {"a": 1, "b": "x"},
    ),
    "contains": ({"contains": {"const": 1}, "type": "array"}, [0, 1], [0]),
    "minContains": ({"contains": {"const": 1}, "minContains": 2}, [1, 1], [1, 0]),
    "maxContains": ({"contains": {"const": 1}, "maxContains": 1}, [1], [1, 1]),
    "propertyNames": ({"propertyNames": {"enum": ["a", "b"]}}, {"b": 1}, {"c": 1}),
    "minProperties": ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, {"b": 1}, {}),
    "maxProperties": (
        {"properties": {"a": {}, "b": {}}, "maxProperties": 1},
        {"b": 1},
        {"a": 1, "b": 1},
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        ["b", "a"],
        ["b", "b"],
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"a": 1},
        {"b": 1},
    ),
    "unevaluatedItems": ({"prefixItems": [{}], "unevaluatedItems": False}, [1], [1, 2]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("keyword", CASES)
def test_it_forbids_what_it_says_and_no_more(keyword: str) -> None:
    schema, valid, invalid = CASES[keyword]
    lowered = lower({**ROOT, **schema})
    assert not lowered.errors
    for judged in (schema, lowered.schema):
        validator = jsonschema.Draft202012Validator(judged)
        assert validator.is_valid(valid)
        assert not validator.is_valid(invalid)
