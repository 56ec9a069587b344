"""What is joined admits what both sides admit, and nothing else."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.grammar.schema.joining import canonical, conflict, merge
from tests.tiers import examples

NAMES = st.sampled_from(["a", "b", "xa", "x"])
SCALARS = st.sampled_from([None, True, 0, 1, 1.0, "a", "b"])
LISTS = st.lists(SCALARS | st.just([1]) | st.just({"a": 1}), min_size=1, max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)
LEAVES = st.one_of(
    LISTS.map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.sampled_from([{}, True, False, {"type": "string"}, {"type": ["integer", "null"]}]),
    st.sampled_from([{"minimum": 1}, {"maxLength": 1}, {"required": ["a"]}, {"type": "object"}]),
)
PATTERNS = st.sampled_from(["^x", "a$", "^[ab]$"])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(NAMES, inner, min_size=1, max_size=2),
            "patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=2),
            "additionalProperties": inner,
            "required": st.lists(NAMES, max_size=2, unique=True),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
        },
    ) | st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})


SCHEMAS = st.recursive(LEAVES, objects, max_leaves=6)


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@settings(max_examples=examples(400))
@given(SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=1, max_size=12))
def test_both_sides_hold(one: Any, other: Any, values: list[Any]) -> None:
    merged = merge(one, other)
    if merged is None:
        assert isinstance(conflict(one, other), str)
        return
    for value in values:
        both = is_valid(one, value) and is_valid(other, value)
        assert is_valid(merged, value) == both


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        ({"enum": [1, "a", True]}, {"enum": [1.0, "b"]}, {"enum": [1]}),
        ({"const": 1}, {"enum": [True]}, False),
        ({"const": "a"}, {"const": "a"}, {"enum": ["a"]}),
        ({"anyOf": [{"type": "null"}, {"minimum": 1}]}, {"anyOf": [{"maximum": 3}]}, None),
    ],
)
def test_lists_are_joined(one: Any, other: Any, joined: Any) -> None:
    if joined is None:
        joined = {"anyOf": [{"type": "null", "maximum": 3}, {"minimum": 1, "maximum": 3}]}
    assert merge(one, other) == joined


def test_many_alternatives_are_left_as_they_are() -> None:
    one, other = ({"anyOf": [{f"{name}imum": n} for n in range(9)]} for name in ("min", "max"))
    assert merge(one, other) is None
    assert conflict(one, other) == "anyOf"


def test_equal_values_are_one() -> None:
    assert canonical([1, {"a": None}]) == canonical([1.0, {"a": None}])
    assert canonical([True]) != canonical([1])
    assert canonical(["true"]) != canonical([True])
