"""Branches that are no rivals share no value; large unions are told apart in linear time."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.grammar.schema.document import Document
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.rivals import find_rivals
from guided_spec.grammar.schema.values import Disjointness, type_of
from guided_spec.grammar.steps import limit_steps
from tests.tiers import examples

NAMES = st.sampled_from(["kind", "type", "a"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 1.0, 2, "", "a", "b"])
LISTED = st.one_of(
    SCALARS.map(lambda value: {"const": value}),
    st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr).map(lambda values: {"enum": values}),
)
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", ["object", "string"], "string"]),
        "properties": st.dictionaries(NAMES, LISTED | st.just({}), max_size=3),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": st.booleans(),
        "patternProperties": st.just({"^k": {}}),
        "minProperties": st.just(1),
    },
)
PARTS = st.one_of(OBJECTS, OBJECTS, LISTED, st.booleans(), st.just({"$ref": "#/$defs/shared"}))
BRANCHES = st.one_of(
    PARTS,
    PARTS,
    st.lists(PARTS, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
    st.tuples(PARTS, st.lists(PARTS, min_size=1, max_size=3)).map(
        lambda pair: (
            {**pair[0], "oneOf": pair[1]} if isinstance(pair[0], dict) else {"anyOf": pair[1]}
        )
    ),
)
VALUES = SCALARS | st.dictionaries(NAMES, SCALARS, max_size=3) | st.lists(SCALARS, max_size=1)


@settings(max_examples=examples(400))
@given(st.lists(BRANCHES, min_size=2, max_size=5), PARTS, OBJECTS, st.lists(VALUES, max_size=20))
def test_no_value_is_valid_under_two_that_are_no_rivals(
    branches: list[Any], context: Any, shared: dict[str, Any], values: list[Any]
) -> None:
    root = {"oneOf": branches, "$defs": {"shared": shared, "context": context}}
    rivals = find_rivals(branches, context, Disjointness(Document(root)))
    for value in values:
        defs = root["$defs"]
        fits = [
            index
            for index, branch in enumerate(branches)
            if jsonschema.Draft202012Validator(
                {"allOf": [branch, context], "$defs": defs}
            ).is_valid(value)
        ]
        for index in fits:
            assert len(fits) == 1 or rivals[index][type_of(value)] >= set(fits)


def tagged(number: int, name: str = "kind") -> dict[str, Any]:
    properties = {name: {"const": f"k{number}"}, "x": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": [name]}


def without_type(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "type"}


def keyed(number: int) -> dict[str, Any]:
    """As serde writes a variant that holds something."""
    name = f"V{number}"
    part = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = {"additionalProperties": False, "required": [name]}
    return {"type": "object", "properties": {name: part}, **closed}


def union(kind: str, count: int) -> dict[str, Any]:
    numbers = range(count)
    match kind:
        case "tag":
            return {"oneOf": [tagged(number) for number in numbers]}
        case "no type":
            return {"oneOf": [without_type(tagged(number)) for number in numbers]}
        case "references":
            defs = {f"M{number}": tagged(number) for number in numbers}
            union = {"oneOf": [{"$ref": f"#/$defs/M{number}"} for number in numbers]}
            return {"properties": {"item": union}, "required": ["item"], "$defs": defs}
        case "keys":
            return {"oneOf": [{"enum": ["A", "B"]}, *map(keyed, numbers)]}
        case "constants":
            return {"oneOf": [{"const": f"V{number}", "title": "a"} for number in numbers]}
        case "unions":
            parts = [tagged(number) for number in numbers]
            return {"oneOf": [{"oneOf": parts[at : at + 5]} for at in range(0, count, 5)]}
        case _:
            properties = [{"properties": {"x": {"type": "integer"}}, **tagged(n)} for n in numbers]
            versions = [
                {**part, "properties": {**part["properties"], "version": {"const": 1}}}
                for part in properties
            ]
            return {"oneOf": [{**part, "required": ["version", "kind"]} for part in versions]}


@pytest.mark.parametrize(
    "kind", ["tag", "no type", "references", "keys", "constants", "unions", "versions"]
)
def test_large_unions_are_lowered_in_linear_time(kind: str) -> None:
    steps = []
    for count in (100, 500):
        with limit_steps(10**7) as spent:
            lowered = lower(union(kind, count), additional="closed")
        assert lowered.entries == ()
        steps.append(spent.spent)
    assert steps[1] < 8 * steps[0]
    assert steps[1] < 800_000


def test_branches_with_the_same_tag_exclude_each_other() -> None:
    twice = [tagged(0), tagged(1), {**copy.deepcopy(tagged(1)), "required": ["kind", "x"]}]
    rivals = find_rivals(twice, {}, Disjointness(Document({"oneOf": twice})))
    assert rivals == [{"object": {0}}, {"object": {1, 2}}, {"object": {1, 2}}]
    optional = [{"properties": {"kind": {"const": name}}, "type": "object"} for name in "ab"]
    rivals = find_rivals(optional, {}, Disjointness(Document({"oneOf": optional})))
    assert rivals == [{"object": {0, 1}}, {"object": {0, 1}}]


def test_values_are_held_against_schemas_next_to_resources() -> None:
    """Also within the limit of steps, though a resource names its own draft."""
    draft = "http://json-schema.org/draft-07/schema#"
    resource = {"$id": "https://example.com/x", "$schema": draft, "type": "null"}
    tool = {"type": "string", "oneOf": [{"pattern": "(npm|bun)@[0-9]+"}, {"const": "bun"}]}
    with limit_steps(10_000):
        lowered = lower({**tool, "$defs": {"x": resource}})
    assert lowered.entries == ()
    assert "(?:|[^b]" not in str(lowered.schema)  # no branch excludes the other


def test_what_refers_to_itself_is_excluded_once() -> None:
    """As the conditional exports of package.json do, many times in each other."""
    names = [f"k{number}" for number in range(8)]
    entry = {"anyOf": [{"$ref": "#/$defs/path"}, {"$ref": "#/$defs/object"}]}
    defs = {
        "path": {"type": "string"},
        "object": {
            "type": "object",
            "properties": {name: {"$ref": "#/$defs/entry"} for name in names},
        },
        "entry": entry,
    }
    objects = [{"$ref": "#/$defs/object"}, {"properties": {"a": {"type": "string"}}}]
    with limit_steps(100_000):
        lowered = lower({"oneOf": objects, "type": "object", "$defs": defs})
    assert not [found for found in lowered.entries if found.level == "error"]
