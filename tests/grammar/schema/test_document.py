"""References lead where the specification says, into other resources and metaschemas too."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_specifications import REGISTRY

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.schema.document import Document
from guided_spec.grammar.schema.lowered import Lowered
from guided_spec.grammar.schema.prepare import examine_schema, lower_checked
from tests.grammar.schema.test_lower import SCHEMAS
from tests.tiers import examples

METASCHEMAS = sorted(uri for uri in REGISTRY if uri.endswith("/schema") and "draft-03" not in uri)
NO_SCHEMAS: list[Any] = [{"type": 5}, {"properties": {"a": 1}}, {"enum": {}}, {"minimum": "a"}, 5]
FINE_SCHEMAS: list[Any] = [{}, {"type": "string"}, {"properties": {"a": {"type": ["null"]}}}]
TREES: list[Any] = [{"children": [{"data": 1}]}, {"children": [{"children": []}]}]
NO_TREES: list[Any] = [{"daat": 1}, {"children": [{"daat": 1}]}]
NAMES = st.sampled_from(["type", "properties", "items", "enum", "minimum", "required", "$ref", "x"])


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema, registry=REGISTRY).is_valid(value)


def lowered_reference(uri: str) -> Lowered:
    return lower_checked({"$ref": uri}, "schema")


@pytest.mark.every_case
@pytest.mark.parametrize("uri", METASCHEMAS)
def test_metaschemas_are_known(uri: str) -> None:
    lowered = lowered_reference(uri)
    assert not lowered.errors
    assert '"$dynamicRef"' not in str(lowered.schema)
    assert not any(is_valid(lowered.schema, value) for value in NO_SCHEMAS)
    assert all(is_valid(lowered.schema, value) for value in FINE_SCHEMAS)


@settings(max_examples=examples(100))
@given(st.sampled_from(METASCHEMAS), SCHEMAS, NAMES, st.integers())
def test_lowered_metaschemas_admit_schemas_alone(
    uri: str, schema: Any, name: str, number: int
) -> None:
    lowered = lowered_reference(uri)
    for value in (schema, {**schema, name: number} if isinstance(schema, dict) else number):
        if is_valid(lowered.schema, value):
            assert is_valid({"$ref": uri}, value)


@pytest.mark.parametrize("uri", [METASCHEMAS[0], METASCHEMAS[-1]])
def test_a_part_of_a_metaschema_is_known(uri: str) -> None:
    pointer = "#/$defs/nonNegativeInteger" if "2020" in uri else "#/definitions/positiveInteger"
    where = uri.replace("/schema", "/meta/validation") if "2020" in uri else uri
    lowered = lower_checked({"properties": {"a": {"$ref": where + pointer}}})
    assert not lowered.errors
    assert is_valid(lowered.schema, {"a": 0})
    assert not is_valid(lowered.schema, {"a": -1})


def dynamic(**inner: Any) -> dict[str, Any]:
    """A tree, and a stricter one that refers to it, as section 8.2.3.2 has them."""
    tree = {
        "$id": "https://example.com/tree",
        "$dynamicAnchor": "node",
        "type": "object",
        "properties": {"data": {}, "children": {"items": {"$dynamicRef": "#node"}}},
    }
    strict = {"$dynamicAnchor": "node", "$ref": "tree", "unevaluatedProperties": False}
    return {**strict, "$id": "https://example.com/strict-tree", "$defs": {"tree": tree}, **inner}


def test_a_dynamic_reference_leads_to_the_first_anchor_on_the_way() -> None:
    lowered = lower_checked(dynamic(), "schema")
    assert not lowered.errors
    for schema in (dynamic(), lowered.schema):
        assert all(is_valid(schema, value) for value in TREES)
        assert not any(is_valid(schema, value) for value in NO_TREES)


def test_a_dynamic_reference_that_can_lead_to_several_is_refused() -> None:
    ways = [{"$ref": "strict-tree"}, {"$ref": "tree"}]
    schema = {"$id": "https://example.com/", "$defs": {"strict": dynamic()}, "anyOf": ways}
    (error,) = {entry.keyword for entry in lower_checked(schema).errors}
    assert error == "$dynamicRef"


def test_parts_in_other_drafts_are_read_as_these() -> None:
    old = "http://json-schema.org/draft-04/schema#"
    part = {"id": "old.json", "$schema": old, "minimum": 3, "exclusiveMinimum": True}
    schema = {"$ref": "old.json", "type": "integer", "$defs": {"old": part}}
    lowered = lower_checked(schema)
    assert not lowered.errors
    assert is_valid(lowered.schema, 4)
    assert not is_valid(lowered.schema, 3)
    with pytest.raises(GrammarCompileError, match="/minimum"):
        lower_checked({**schema, "$defs": {"old": {**part, "minimum": "a"}}})


def test_references_lead_where_no_schema_is_expected() -> None:
    """Also next to a part with a URI of its own, whose references are relative to that."""
    pet = {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Pet"}}}
    schema = {"$ref": "#/components/schemas/Pet", "components": {"schemas": {"Pet": pet}}}
    for other in ({}, {"$defs": {"other": {"$id": "https://example.com/other"}}}):
        lowered = lower_checked({**schema, **other})
        assert not lowered.entries
        assert is_valid(lowered.schema, {"next": {"next": {}}})
        assert not is_valid(lowered.schema, {"next": {"next": 1}})


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("urllib.request.urlopen", fail)
    schema = {"$ref": "http://example.com/a.json"}
    (error,) = lower_checked(schema).errors
    assert "nothing is fetched" in error.reason
    assert "resources=" in error.fix
    one_of = {"oneOf": [{"$ref": "http://example.com/a.json"}, {"const": 1}]}
    assert lower_checked(one_of).errors
    assert Document(schema).resolve(schema) is None
    examine_schema(lower_checked({"enum": [1, 2], **schema}))
