"""The quick check admits nothing that the metaschema refuses, and is quick where it matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.bundled import bundled_asset
from guided_spec.grammar.schema.prepare import check_schema, is_plainly_valid

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


def is_valid(schema: Any, draft: Any = jsonschema.Draft202012Validator) -> bool:
    try:
        draft.check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


@given(SCHEMAS)
def test_what_is_plainly_valid_is_valid(schema: dict[str, Any]) -> None:
    if is_plainly_valid(schema):
        assert is_valid(schema)


@given(SCHEMAS, st.sampled_from(sorted(NAMES)))
def test_so_it_is_in_every_draft(schema: dict[str, Any], name: str) -> None:
    named = {**schema, "$schema": name}
    if is_plainly_valid(named):
        assert is_valid(named, NAMES[name])


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
    assert not is_plainly_valid(named)
    with pytest.raises(jsonschema.SchemaError):
        check_schema(named)


def test_ordinary_schemas_of_older_drafts_take_the_quick_way() -> None:
    for name in NAMES:
        assert is_plainly_valid(
            {
                "$schema": name,
                "id": "http://example.com/a.json#",
                "$id": "schemas/a.json",
                "type": "object",
                "properties": {"a": {"$ref": "#/definitions/a"}, "b": {"enum": ["x", 2, None]}},
                "additionalProperties": False,
                "required": ["a"],
                "definitions": {"a": {"type": "string", "maxLength": 3, "x-own": [1]}},
            }
        )


@given(SCHEMAS)
def test_the_check_is_that_of_jsonschema(schema: dict[str, Any]) -> None:
    if "$schema" in schema:
        return
    try:
        check_schema(schema)
    except jsonschema.SchemaError:
        assert not is_valid(schema)
    else:
        assert is_valid(schema)


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
        {"items": [{}]},
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
    assert not is_plainly_valid(schema)
    with pytest.raises(jsonschema.SchemaError):
        check_schema(schema)


def test_ordinary_schemas_take_the_quick_way() -> None:
    lines = Path(bundled_asset("heldout.jsonl")).read_text(encoding="utf-8").splitlines()
    schemas = [record["schema"] for record in map(json.loads, lines) if record["schema"]]
    assert schemas
    assert all(is_plainly_valid(schema) for schema in schemas)
    assert all(map(is_plainly_valid, (True, False)))


def test_what_is_too_deep_to_see_is_left_to_jsonschema() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"items": schema}
    assert not is_plainly_valid(schema)
    check_schema(schema)
