"""Resources become parts of a schema, which then means what it means with them beside it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.schema.bundle import bundle
from guided_spec.grammar.schema.prepare import lower_checked
from guided_spec.grammar.spec import GrammarSpec
from tests.grammar.schema.test_lower import SCHEMAS, VALUES
from tests.masks.walks import BYTES, accepts
from tests.tiers import examples

OLD = "http://json-schema.org/draft-04/schema#"
POINT: dict[str, Any] = {
    "$schema": OLD,
    "id": "https://example.com/point.json",
    "type": "object",
    "properties": {"x": {"$ref": "number.json"}, "next": {"$ref": "#"}},
    "required": ["x"],
}
NUMBER = {"type": "integer", "minimum": 0, "exclusiveMinimum": True}
RESOURCES = {"https://example.com/point.json": POINT, "https://example.com/number.json": NUMBER}
VALID = [{"x": 1}, {"x": 2, "next": {"x": 3}}]
INVALID = [{"x": 0}, {}, {"x": 2, "next": {}}, {"x": "a"}]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.com/point.json"},
        {"$ref": "https://example.com/point.json#"},
        {"$id": "https://example.com/root.json", "allOf": [{"$ref": "point.json"}]},
        {"$schema": OLD, "$ref": "https://example.com/point.json"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"p": {}}}
        | {"allOf": [{"$ref": "https://example.com/point.json"}]},
    ],
)
def test_others_are_found_by_their_uris(schema: dict[str, Any]) -> None:
    spec = GrammarSpec.json_schema(schema, resources=RESOURCES)
    compiled = AutoBackend(BYTES).compile(spec)
    assert all(accepts(compiled, json.dumps(value)) for value in VALID)
    assert not any(accepts(compiled, json.dumps(value)) for value in INVALID)


def test_others_are_found_by_relative_names() -> None:
    for number in ("number.json", "https://example.com/number.json"):
        resources = {"point.json": POINT, number: NUMBER}
        schema = {"$ref": "https://example.com/point.json"}  # its own id
        compiled = AutoBackend(BYTES).compile(GrammarSpec.json_schema(schema, resources=resources))
        assert accepts(compiled, '{"x": 1}')
        assert not accepts(compiled, '{"x": 0}')
    plain = {"a.json": {"items": {"$ref": "b.json#/$defs/c"}, "type": "array"}}
    plain["b.json"] = {"$defs": {"c": {"const": 1}}}
    compiled = AutoBackend(BYTES).compile(
        GrammarSpec.json_schema('{"$ref": "a.json"}', resources=plain)
    )
    assert accepts(compiled, "[1, 1]")
    assert not accepts(compiled, "[2]")


def test_only_what_is_needed_becomes_a_part() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}}}
    assert GrammarSpec.json_schema(schema, resources=RESOURCES) == GrammarSpec.json_schema(schema)
    parts = bundle({"$ref": "https://example.com/number.json"}, RESOURCES)["definitions"]
    assert [*parts] == ["https://example.com/number.json"]
    taken = {"definitions": {"https://example.com/number.json": {"const": 5}}}
    both = bundle({"$ref": "https://example.com/number.json", **taken}, RESOURCES)
    assert both["definitions"]["https://example.com/number.json"] == {"const": 5}
    assert lower_checked(both).schema != {"const": 5}


@settings(max_examples=examples(60))
@given(st.lists(SCHEMAS, min_size=2, max_size=2), st.lists(VALUES, max_size=10))
def test_drawn_schemas_mean_the_same_as_parts(parts: list[Any], values: list[Any]) -> None:
    first, second = (part if isinstance(part, dict) else {"allOf": [part]} for part in parts)
    resources = {"urn:one": {"$defs": {"own": first}, "$ref": "#/$defs/own"}, "urn:two": second}
    resources["urn:two"] = {"allOf": [second, {"$ref": "urn:one"}]}
    schema = {"properties": {"a": {"$ref": "urn:two"}}, "anyOf": [{"$ref": "urn:one"}, True]}
    registry: Any = Registry().with_resources(
        (uri, DRAFT202012.create_resource(part)) for uri, part in resources.items()
    )
    apart = jsonschema.Draft202012Validator(schema, registry=registry)
    together = jsonschema.Draft202012Validator(bundle(schema, resources))
    for value in [*values, *({"a": value} for value in values)]:
        assert apart.is_valid(value) == together.is_valid(value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("resources", "told"),
    [
        ([NUMBER], "must be a dict of JSON schemas by URI"),
        ({"": NUMBER}, "URIs without a fragment"),
        ({"a#b": NUMBER}, "URIs without a fragment"),
        ({1: NUMBER}, "URIs without a fragment"),
        ({"a": 5}, r"resources\['a'\]"),
    ],
)
def test_what_is_no_resource_is_refused(resources: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        GrammarSpec.json_schema({"$ref": "a"}, resources=resources)


def test_a_broken_resource_fails_when_it_is_compiled() -> None:
    spec = GrammarSpec.json_schema({"$ref": "a"}, resources={"a": {"type": "strnig"}})
    with pytest.raises(GrammarCompileError, match="'strnig' is no type, did you mean string"):
        AutoBackend(BYTES).compile(spec)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": 5}, "at '/type': 5 is no type: the types are array"),
        ({"type": ["string", None]}, "at '/type': None is no type: the types are array"),
        ({"type": []}, r"at '/type': \[\] is no type"),
        ({"properties": {"type": "string"}}, "at '/properties/type': 'string' is not of type 'obj"),
        ({"pattern": "("}, "at '/pattern': '[(]' is no regular expression"),
    ],
)
def test_why_a_keyword_is_broken(schema: Any, told: str) -> None:
    with pytest.raises(GrammarCompileError, match=told):
        AutoBackend(BYTES).compile(GrammarSpec.json_schema(schema))


def test_strict_specs_refuse_misspelt_keywords() -> None:
    schema = {"type": "object", "properites": {}}
    AutoBackend(BYTES).compile(GrammarSpec.json_schema(schema))
    with pytest.raises(GrammarCompileError, match="'properites'.*'properties' is one"):
        AutoBackend(BYTES).compile(GrammarSpec.json_schema(schema, strict=True))
    nested = GrammarSpec.json_schema({"$ref": "a"}, resources={"a": schema}, strict=True)
    with pytest.raises(GrammarCompileError, match="properites"):
        AutoBackend(BYTES).compile(nested)
