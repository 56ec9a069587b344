"""Arrays of listed values that combine nothing: the meaning stays, by jsonschema."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.grammar.backends.listed_items import with_listed_items
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.llguidance_schema import prepare_for_llguidance
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts
from tests.tiers import examples

NAMES = ["a", "ab", 1]
ARRAYS = [list(one) for n in range(4) for one in itertools.product([*NAMES, "c"], repeat=n)]
LIST = {"type": "array", "items": {"enum": NAMES}}
ITEM: st.SearchStrategy[Any] = st.sampled_from(
    [True, False, {"type": "string"}, {"enum": ["a", 1]}, {"const": "ab"}, {"pattern": "b"}]
)
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["array", "string", ["array", "null"]]),
        "items": ITEM,
        "prefixItems": st.lists(ITEM, min_size=1, max_size=2),
        "minItems": st.integers(0, 3),
        "maxItems": st.integers(0, 3),
    },
)
PARTS = st.lists(st.one_of(PART, st.booleans()), min_size=1, max_size=3)
CONDITION = st.recursive(
    PART,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=3),
        },
    ),
    max_leaves=6,
)


def valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@settings(max_examples=examples(150), deadline=None)
@given(CONDITION)
def test_an_array_keeps_its_meaning(condition: dict[str, Any]) -> None:
    schema = {**LIST, "allOf": [condition]}
    written = with_listed_items(schema)
    assert not written.keys() & {"allOf"}
    for value in [*ARRAYS, "a", None]:
        assert valid(written, value) == valid(schema, value), value


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(CONDITION, st.sampled_from([["x"], []])), min_size=1, max_size=3))
def test_an_object_keeps_its_meaning(options: list[tuple[dict[str, Any], list[str]]]) -> None:
    conditions = [{"properties": {"x": one}, "required": names} for one, names in options]
    schema = {"type": "object", "properties": {"x": LIST}, "anyOf": conditions}
    written = with_listed_items(schema)
    assert written["properties"] == {"x": True}
    for value in [{}, *({"x": one} for one in [*ARRAYS, "a", None])]:
        assert not written["anyOf"] or valid(written, value) == valid(schema, value), value
        assert written["anyOf"] or not valid(schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"enum": NAMES}},
        {"items": {"enum": NAMES}, "allOf": [{"minItems": 1}]},
        {**LIST, "allOf": [{"$ref": "#/$defs/a"}]},
        {"type": "array", "items": {"enum": [[1]]}, "allOf": [{"minItems": 1}]},
        {"type": "object", "properties": {"x": LIST}, "anyOf": [{"required": ["x"]}]},
    ],
)
def test_what_is_plain_or_not_seen_through_stays(schema: dict[str, Any]) -> None:
    assert with_listed_items(schema) is schema


NOT = {"not": {"required": ["x"], "properties": {"x": {"contains": {"const": "b"}}}}}
WITH_CONTAINS: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "array", "items": {"enum": ["a", "b", "c"]}}, "b": {}, "c": {}},
    "oneOf": [
        {"required": ["x"], "properties": {"x": {"type": "array", "contains": {"const": "a"}}}},
        {"required": ["c"]},
    ],
    "dependentSchemas": {"b": NOT},
}


def test_conditions_on_listed_items_need_no_patterns() -> None:
    prepared = prepare_for_llguidance(lower(WITH_CONTAINS, additional="closed"))
    assert "pattern" not in json.dumps(prepared)
    compiled = LLGuidanceBackend(BYTES).compile(GrammarSpec.json_schema(WITH_CONTAINS))
    for names in (["x"], ["x", "b"], ["x", "c"], ["b"], ["c"], ["b", "c"]):
        for items in (["a"], ["b"], ["c"], ["c", "a"], ["b", "a"], []):
            value = {name: items if name == "x" else 0 for name in names}
            assert accepts(compiled, json.dumps(value)) == valid(WITH_CONTAINS, value), value


PAIRS = (("a", "b"), ("c", "d"), ("e", "f"), ("g", "h"))


def test_patterns_that_count_beside_each_other_lead_to_no_empty_row() -> None:
    grammar = "start: A\nA: " + " & ".join(f"/.*{one}.{{400}}{end}.*/" for one, end in PAIRS)
    matcher = LLGuidanceBackend(BYTES).compile(GrammarSpec.lark(grammar)).new_matcher()
    row = np.zeros((1, 9), dtype=np.int32)
    for byte in b"aceg" * 5:
        matcher.fill_next_token_bitmask(row)
        assert row.any()
        assert matcher.accept_token(byte)
