from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from tests.strategies import json_values, schemas

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "string"}}}


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), json.dumps(SCHEMA, indent=4)])
def test_one_schema_is_one_spec(schema: object) -> None:
    spec = GrammarSpec.json_schema(schema)
    assert spec == GrammarSpec.json_schema(SCHEMA)
    assert hash(spec) == hash(GrammarSpec.json_schema(SCHEMA))


@given(schemas())
def test_the_source_keeps_the_schema_and_the_order_of_its_keys(schema: dict[str, Any]) -> None:
    source = GrammarSpec.json_schema(schema).source
    assert json.dumps(json.loads(source)) == json.dumps(schema)


def test_broken_text_is_kept_for_the_compiler_to_report() -> None:
    assert GrammarSpec.json_schema("{oops").source == "{oops"


@given(json_values())
def test_a_structural_tag_is_a_dict_or_text(value: Any) -> None:
    tag = {"type": "structural_tag", "format": value}
    assert GrammarSpec.structural_tag(tag) == GrammarSpec.structural_tag(json.dumps(tag))


def test_choice_drops_repeats_and_keeps_the_order() -> None:
    assert json.loads(GrammarSpec.choice(["é", "a", "é"]).source) == ["é", "a"]


@pytest.mark.parametrize(
    ("response_format", "spec"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, GrammarSpec.json_object()),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            GrammarSpec.json_schema(SCHEMA, strict=True),
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            GrammarSpec.json_schema(SCHEMA),
        ),
        ({"type": "regex_schema", "regex_schema": "a+"}, GrammarSpec.regex("a+")),
        (
            {"type": "structural_tag", "format": {"type": "any_text"}},
            GrammarSpec.structural_tag({"type": "structural_tag", "format": {"type": "any_text"}}),
        ),
    ],
)
def test_response_formats(response_format: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert GrammarSpec.from_response_format(response_format) == spec


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.json_schema(3),
        lambda: GrammarSpec.json_schema({"enum": [{1}]}),
        lambda: GrammarSpec.json_schema({"minimum": float("nan")}),
        lambda: GrammarSpec.json_schema({}, any_whitespace=1),  # type: ignore[arg-type]
        lambda: GrammarSpec.regex(b"a"),  # type: ignore[arg-type]
        lambda: GrammarSpec.choice([]),
        lambda: GrammarSpec.choice("ab"),
        lambda: GrammarSpec.choice(["a", ""]),
        lambda: GrammarSpec.choice([1]),  # type: ignore[list-item]
        lambda: GrammarSpec.ebnf(None),  # type: ignore[arg-type]
        lambda: GrammarSpec.lark(None),  # type: ignore[arg-type]
        lambda: GrammarSpec.structural_tag([]),
        lambda: GrammarSpec("xml", ""),  # type: ignore[arg-type]
        lambda: GrammarSpec("regex", "a", any_whitespace=True),
        lambda: GrammarSpec.from_response_format("json"),
        lambda: GrammarSpec.from_response_format({}),
        lambda: GrammarSpec.from_response_format({"type": "json_schema"}),
        lambda: GrammarSpec.from_response_format({"type": "json_schema", "json_schema": {}}),
        lambda: GrammarSpec.from_response_format({"type": "regex_schema", "regex_schema": 1}),
    ],
)
def test_wrong_types_are_named(make: Any) -> None:
    with pytest.raises(ConfigError, match="="):
        make()
