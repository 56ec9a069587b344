"""A schema is refused where jsonschema refuses it, which is seldom asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.bundled import bundled_asset
from guided_spec.grammar.schema.prepare import check_schema

KEYWORDS = [
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "not"),
    *("minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxItems", "pattern"),
    *("additionalProperties", "prefixItems", "$ref", "$defs", "$schema", "$id", "title", "format"),
    *("uniqueItems", "propertyNames", "contains", "default", "patternProperties", "if", "unknown"),
    *("id", "definitions", "dependencies", "additionalItems", "exclusiveMaximum", "examples"),
    *("then", "$comment", "minContains", "unevaluatedItems", "dependentRequired"),
]
NAMES = {
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "http://json-schema.org/draft-06/schema": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
}
VALUES = st.recursive(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            2.0,
            0.5,
            "",
            "object",
            "integer",
            "[",
            "a+",
            "#/$defs/a",
            "x y",
            "https://example.com/a#",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
SCHEMAS = st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=4)


def is_valid(schema: Any, check: Callable[[Any], None]) -> bool:
    try:
        check(schema)
    except jsonschema.SchemaError:
        return False
    return True


@given(SCHEMAS, st.sampled_from(sorted(NAMES)))
def test_the_check_is_that_of_jsonschema(schema: dict[str, Any], name: str) -> None:
    named = {**schema, "$schema": name}
    assert is_valid(named, check_schema) == is_valid(named, NAMES[name].check_schema)


OTHER = "http://json-schema.org/draft-04/schema#"
NO_SCHEMA = {"$schema": OTHER, "type": None}


@pytest.mark.parametrize(
    "schema",
    [
        {"const": NO_SCHEMA},
        {"enum": [NO_SCHEMA]},
        {"default": NO_SCHEMA, "examples": [{"$schema": "", "items": 3}]},
        {"properties": {"a": {"const": {"a": [NO_SCHEMA]}}}},
    ],
    ids=str,
)
def test_a_value_is_no_schema(schema: dict[str, Any]) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"$schema": NO_SCHEMA}},
        {"allOf": [{"items": {"not": NO_SCHEMA}}]},
        {"$defs": {"const": {"$schema": OTHER, "required": []}}},
    ],
    ids=str,
)
def test_a_part_is_held_against_its_own_draft(schema: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.SchemaError):
        check_schema(schema)


@given(SCHEMAS)
def test_without_a_draft_it_is_that_of_2020(schema: dict[str, Any]) -> None:
    schema.pop("$schema", None)
    check = jsonschema.Draft202012Validator.check_schema
    assert is_valid(schema, check_schema) == is_valid(schema, check)


@pytest.mark.parametrize(
    "schema",
    [
        {"required": []},
        {"enum": []},
        {"enum": ["a", "a"]},
        {"enum": [1, 1.0]},
        {"exclusiveMinimum": 3},
        {"exclusiveMinimum": True},
        {"properties": {"a": True}},
        {"items": []},
    ],
    ids=str,
)
def test_what_draft_4_refuses(schema: dict[str, Any]) -> None:
    named = {**schema, "$schema": "http://json-schema.org/draft-04/schema#"}
    with pytest.raises(jsonschema.SchemaError):
        check_schema(named)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"type": []},
        {"type": ["null", "null"]},
        {"type": [["null"]]},
        {"required": "name"},
        {"required": ["a", "a"]},
        {"properties": []},
        {"properties": {"a": 1}},
        {"prefixItems": [], "items": [{}]},
        {"anyOf": []},
        {"anyOf": {}},
        {"minLength": -1},
        {"minLength": True},
        {"maximum": "3"},
        {"maximum": True},
        {"multipleOf": 0},
        {"pattern": "["},
        {"pattern": 3},
        {"enum": "a"},
        {"title": 1},
        {"$defs": {"a": {"type": 3}}},
    ],
)
def test_broken_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.SchemaError):
        check_schema(schema)


@pytest.fixture
def _asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("jsonschema was asked")

    monkeypatch.setattr(jsonschema.validators, "validator_for", fail)


@pytest.mark.usefixtures("_asks_nobody")
@pytest.mark.parametrize("name", NAMES)
def test_ordinary_schemas_of_older_drafts_are_not_shown_to_jsonschema(name: str) -> None:
    check_schema(
        {
            "$schema": name,
            "id": "http://example.com/a.json#",
            "$id": "schemas/a.json",
            "type": "object",
            "properties": {"a": {"$ref": "#/definitions/a"}, "b": {"enum": ["x", 2, None]}},
            "patternProperties": {"^x-": {"pattern": "a+"}},
            "additionalProperties": False,
            "required": ["a"],
            "definitions": {"a": {"type": "string", "maxLength": 3, "x-own": [1]}},
        }
    )


@pytest.mark.usefixtures("_asks_nobody")
def test_nor_are_ordinary_ones_and_deep_ones() -> None:
    lines = Path(bundled_asset("heldout.jsonl")).read_text(encoding="utf-8").splitlines()
    schemas = [record["schema"] for record in map(json.loads, lines) if record["schema"]]
    assert schemas
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"items": deep}
    for schema in (*schemas, True, False, deep):
        check_schema(schema)
