"""A schema that names no draft is of the one that it can only be of."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.lowered import Lowered
from guided_spec.grammar.schema.prepare import lower_checked

OLD = "http://json-schema.org/draft-04/schema#"
LISTED = "https://json-schema.org/draft/2019-09/schema"
PAIR = [{"type": "integer"}, {"type": "string"}]
ABOVE = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}


def is_valid(lowered: Lowered, value: Any) -> bool:
    return jsonschema.Draft202012Validator(lowered.schema).is_valid(value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("schema", "draft", "valid", "invalid"),
    [
        ({"type": "array", "items": PAIR}, LISTED, [[], [1], [1, "a"]], [["a"], [1, 2]]),
        (
            {"type": "array", "items": PAIR, "additionalItems": False},
            LISTED,
            [[1, "a"]],
            [[1, "a", 2], ["a", 1]],
        ),
        (ABOVE, OLD, [4], [3, 2]),
        ({"properties": {"a": ABOVE}, "required": ["a"], "type": "object"}, OLD, [{"a": 4}], [{}]),
        (
            {"type": "number", "maximum": 3, "exclusiveMaximum": False, "exclusiveMinimum": True}
            | {"minimum": 0},
            OLD,
            [3, 0.5],
            [0, 3.5],
        ),
        ({"type": "object", "definitions": {"a": ABOVE}, "properties": {"b": {}}}, OLD, [{}], [1]),
        (
            {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": ABOVE}}},
            OLD,
            [4],
            [3],
        ),
    ],
)
def test_it_is_read_as_what_it_can_only_be(
    schema: dict[str, Any], draft: str, valid: list[Any], invalid: list[Any]
) -> None:
    lowered = lower_checked(schema)
    assert [(e.keyword, e.level) for e in lowered.entries] == [("$schema", "note")]
    assert draft in lowered.entries[0].reason
    named = lower_checked({"$schema": draft, **schema})
    assert (named.schema, named.entries) == (lowered.schema, ())
    validator = jsonschema.validators.validator_for({"$schema": draft})(
        {"$schema": draft, **schema}
    )
    for value in valid:
        assert validator.is_valid(value)
        assert is_valid(lowered, value)
    for value in invalid:
        assert not is_valid(lowered, value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"items": PAIR, "prefixItems": 5}, "/prefixItems"),
        ({"items": PAIR, "prefixItems": PAIR}, "/items"),
        ({"items": [{"type": "strnig"}]}, "/type"),
        ({**ABOVE, "if": 5}, "/if"),
        ({"exclusiveMinimum": True}, ""),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "items": PAIR}, "/items"),
        ({"$schema": LISTED, **ABOVE}, "/exclusiveMinimum"),
        ({"properties": {"a": ABOVE, "b": {"exclusiveMinimum": 5}}}, ""),
    ],
)
def test_what_no_draft_has_is_refused(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(GrammarCompileError, match=f"not a JSON schema.*{pointer}"):
        lower_checked(schema)


def test_other_schemas_are_left_alone() -> None:
    for schema in (
        {"enum": [{"items": ["a"]}, 1]},
        {"prefixItems": PAIR, "items": False},
        {"exclusiveMinimum": 3, "type": "integer"},
        {"properties": {"items": {"type": "array"}, "exclusiveMinimum": {"type": "boolean"}}},
        {"properties": {"exclusiveMinimum": True}, "type": "object"},
    ):
        assert not [entry for entry in lower(schema).entries if entry.keyword == "$schema"]


def test_null_of_openapi_is_a_note() -> None:
    (entry,) = lower_checked({"properties": {"a": {"type": "string", "nullable": True}}}).entries
    assert (entry.pointer, entry.keyword, entry.level) == ("/properties/a", "nullable", "note")
    assert '"null"' in entry.fix
    assert not lower_checked({"type": ["string", "null"], "nullable": True}).entries
    assert not lower_checked({"properties": {"nullable": {"type": "boolean"}}}).entries


def test_groups_are_named_as_ecmascript_does() -> None:
    schema = {"pattern": r"^(?<year>\d{4})-(?<month>\d\d)\(?<$", "type": "string"}
    lowered = lower_checked(schema)
    assert is_valid(lowered, "2024-05(<") or is_valid(lowered, "2024-05<")
    assert not is_valid(lowered, "2024")
    named = lower_checked({"patternProperties": {"^(?<a>x)$": {"type": "null"}}, "type": "object"})
    assert is_valid(named, {"x": None})
    assert not is_valid(named, {"x": 1})
    data = {"const": {"pattern": "(?<a>x)"}}
    assert is_valid(lower_checked(data), {"pattern": "(?<a>x)"})
    with pytest.raises(GrammarCompileError, match="pattern"):
        lower_checked({"pattern": "(?<a>x"})


def test_dependencies_may_be_schemas_and_lists() -> None:
    dependencies = {"a": {"properties": {"b": {"type": "null"}}}, "c": ["d"]}
    for draft in ("http://json-schema.org/draft-07/schema#", OLD):
        schema = {"$schema": draft, "type": "object", "dependencies": dependencies}
        lowered = lower_checked(schema)
        for value in ({}, {"a": 1, "b": None}, {"c": 1, "d": 1}):
            assert is_valid(lowered, value)
        for value in ({"a": 1, "b": 1}, {"c": 1}):
            assert not is_valid(lowered, value)
