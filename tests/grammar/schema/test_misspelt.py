"""A keyword that is misspelt is named, with the one that was meant; others are left alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.cli.verdict import report_schema
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.schema.misspelt import misspelt
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES

KEYWORDS = ["properties", "required", "additionalProperties", "items", "enum", "maxLength", "oneOf"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("properites", "properties"),
        ("addtionalProperties", "additionalProperties"),
        ("additional_properties", "additionalProperties"),
        ("requird", "required"),
        ("min_length", "minLength"),
        ("maxlength", "maxLength"),
        ("MinLength", "minLength"),
        ("oneof", "oneOf"),
        ("enums", "enum"),
        ("item", "items"),
        ("ref", "$ref"),
        ("$def", "$defs"),
        ("Type", "type"),
        ("itmes", "items"),
        ("enmu", "enum"),
        ("tpye", "type"),
    ],
)
def test_what_was_meant_is_named(written: str, meant: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {written: {}}}}
    (found,) = misspelt(schema)
    assert (found.pointer, found.keyword, found.level) == (
        "/properties/a~1b",
        written,
        "warning",
    )
    assert repr(meant) in found.reason
    assert repr(meant) in found.fix


@pytest.mark.parametrize(
    "name", ["note", "typed", "range", "elements", "x-propertys", "title", "nullable", "unique"]
)
def test_a_word_for_others_is_no_mistake(name: str) -> None:
    assert [*misspelt({name: {}})] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"propertys": {}, "enums": {"type": "string"}}},
        {"enum": [{"requird": 1}], "const": {"items_": 1}},
        {"default": {"typ": 1, "types": 2}, "examples": [{"item": 1}]},
        {"$defs": {"item": {}, "types": True}, "dependentRequired": {"enums": ["item"]}},
        {"anyOf": [True, {"patternProperties": {"types": {}}}]},
        True,
    ],
)
def test_names_and_values_are_no_keywords(schema: Any) -> None:
    assert [*misspelt(schema)] == []


@pytest.mark.parametrize("keyword", ["anyOf", "prefixItems", "items"])
def test_every_schema_below_is_looked_at(keyword: str) -> None:
    schema: dict[str, Any] = {keyword: [{}, {"not": {"if": {"propertys": {}}}}]}
    assert [found.pointer for found in misspelt(schema)] == [f"/{keyword}/1/not/if"]


@given(
    st.recursive(
        st.booleans() | st.none(),
        lambda inner: st.dictionaries(
            st.sampled_from([*KEYWORDS, "properites", "$defs", "not", ""]), inner | st.lists(inner)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_looked_at(schema: Any) -> None:
    for found in misspelt(schema):
        assert found.keyword == "properites"


def test_it_is_logged_and_the_check_says_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = GrammarSpec.json_schema({"type": "object", "properites": {"a": {"type": "string"}}})
    with caplog.at_level(logging.WARNING):
        XGrammarBackend(BYTES).compile(spec)
    assert "JSON schema: /: 'properites': " in caplog.text
    report = report_schema(spec, None, "auto")
    assert report["findings"][0]["keyword"] == "properites"
    assert report["findings"][0]["level"] == "warning"
