"""A lowered schema admits nothing that the schema does not, and without a note all that it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.grammar.formats import FORMATS
from guided_spec.grammar.schema.lower import lower
from tests.tiers import examples

DATA = Path(__file__).parent.parent.parent / "data"
SUITE = sorted((DATA / "json_schema_test_suite").glob("*.json"))
GONE = frozenset(
    {"$schema", "$id", "not", "oneOf", "if", "then", "else", "dependentRequired", "contains"}
    | {"dependentSchemas", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}
    | {"minContains", "maxContains", "$anchor", "definitions", "$dynamicRef", "title"}
)
OLD = "http://json-schema.org/draft-04/schema#"
KINDS = ("null", "string")

APPLICATORS = [
    *("allOf", "anyOf", "oneOf", "not", "if", "properties", "additionalProperties"),
    *("patternProperties", "propertyNames", "dependentSchemas", "items", "prefixItems"),
    *("contains", "unevaluatedProperties", "unevaluatedItems", "required", "type"),
]
KEYS = st.sampled_from(["a", "b", "c"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, -3, 0.5, "", "a", "ab", "b", "ba"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=5,
)
LEAVES = st.one_of(
    st.booleans(),
    st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]).map(
        lambda kind: {"type": kind}
    ),
    st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.sampled_from(
        [
            {"minimum": 1},
            {"exclusiveMaximum": 1},
            {"minLength": 2},
            {"maxLength": 1},
            {"pattern": "^[ab]+$"},
            {"pattern": "^a"},
            {"minItems": 1},
            {"maxItems": 1},
            {"minProperties": 1},
            {"maxProperties": 1},
            {"uniqueItems": True, "items": {"enum": [1, "a"]}},
            {"multipleOf": 2},
        ]
    ),
    st.lists(KEYS, min_size=1, max_size=2, unique=True).map(lambda names: {"required": names}),
    st.dictionaries(KEYS, st.lists(KEYS, max_size=2, unique=True), min_size=1, max_size=2).map(
        lambda names: {"dependentRequired": names}
    ),
)


def _combine(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    branches = st.lists(inner, min_size=1, max_size=3)
    parts = st.fixed_dictionaries(
        {
            "allOf": branches,
            "anyOf": branches,
            "oneOf": branches,
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "properties": st.dictionaries(KEYS, inner, max_size=2),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.just("^[bc]$"), inner, max_size=1),
            "propertyNames": st.sampled_from([{"maxLength": 0}, {"enum": ["a", "b"]}, False]),
            "dependentSchemas": st.dictionaries(KEYS, inner, max_size=1),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "contains": inner,
            "unevaluatedProperties": st.booleans(),
            "unevaluatedItems": st.booleans(),
            "required": st.lists(KEYS, max_size=2, unique=True),
            "type": st.sampled_from(["object", "array", ["object", "string"], ["number", "array"]]),
        }
    )
    # Few keywords at a time: most values are refused by many of them.
    chosen = st.lists(st.sampled_from(APPLICATORS), min_size=1, max_size=4, unique=True)
    picked = st.tuples(parts, chosen).map(lambda pair: _pick(*pair))
    return picked | inner


def _pick(parts: dict[str, Any], names: list[str]) -> dict[str, Any]:
    if "if" in names:
        names = [*names, "then", "else"]
    return {name: parts[name] for name in names if name in parts}


SCHEMAS = st.recursive(LEAVES, _combine, max_leaves=6)


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def check(schema: Any, values: list[Any], judge: Any = is_valid) -> None:
    lowered = lower(schema)
    if any(entry.level == "error" for entry in lowered.entries):
        return
    assert GONE.isdisjoint(keywords(lowered.schema)) or lowered.schema is schema
    for value in values:
        admitted = is_valid(lowered.schema, value)
        if admitted or not lowered.entries:
            assert admitted == judge(schema, value), (schema, lowered.schema, value)


def keywords(schema: Any) -> set[str]:
    """The keywords of a schema and of all below it; names of properties do not count."""
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs"):
            found |= keywords(list(value.values()))
        elif name not in ("enum", "const"):
            found |= keywords(value)
    return found


@settings(max_examples=examples(400))
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=12))
def test_drawn_schemas_keep_their_meaning(schema: Any, values: list[Any]) -> None:
    check(schema, [*values, None, True, 1, "a", [], {}, {"a": 1}, {"a": "a", "b": 1}, [1, "a"]])


@settings(max_examples=examples(150))
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=8))
def test_drawn_schemas_keep_it_behind_references(schema: Any, values: list[Any]) -> None:
    node = {
        "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"$ref": "#/$defs/x"}},
        "allOf": [{"$ref": "#/$defs/x"}],
    }
    root = {"$ref": "#/$defs/node", "$defs": {"node": node, "x": schema}}
    check(root, [*values, {}, {"a": {}}, {"b": 1}, {"a": {"b": "a"}, "b": "a"}])


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_the_test_suite_keeps_its_meaning(path: Path) -> None:
    for group in json.loads(path.read_text(encoding="utf-8")):
        lowered = lower(group["schema"])
        if any(entry.level == "error" for entry in lowered.entries):
            continue
        for test in group["tests"]:
            admitted = is_valid(lowered.schema, test["data"])
            if admitted or not lowered.entries:
                assert admitted == test["valid"], (group["schema"], lowered.schema, test)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"maximum": 3, "exclusiveMaximum": False}, [3], [4]),
        ({"exclusiveMinimum": True}, [4], []),
        ({"items": [{"type": "null"}], "additionalItems": False}, [[None], []], [[1], [None, 1]]),
        ({"items": {"type": "null"}, "additionalItems": False}, [[None, None]], [[1]]),
        ({"dependencies": {"a": ["b"]}}, [{"a": 1, "b": 1}, {}, 3], [{"a": 1}]),
        ({"dependencies": {"a": {"required": ["b"]}}}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"not": {"const": 1}, "type": "integer"}, [], [1, 2]),  # const is not of draft 4
        ({"$ref": "#/definitions/x", "type": "string", "definitions": {"x": {}}}, [3, "a"], []),
        ({"id": "http://x/y#", "$ref": "#/definitions/x", "definitions": {"x": {}}}, [3], []),
        (
            {
                "properties": {"a": {"$ref": "other#/definitions/y"}},
                "definitions": {"x": {"id": "other", "definitions": {"y": {"type": "null"}}}},
            },
            [{"a": None}],
            [{"a": 1}],
        ),
        ({"properties": {"a": {"$ref": "#b"}}, "definitions": {"b": {"id": "#b"}}}, [{"a": 1}], []),
    ],
    ids=str,
)
def test_draft_4(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    lowered = lower({**schema, "$schema": OLD})
    assert not lowered.entries
    assert [is_valid(lowered.schema, value) for value in valid] == [True] * len(valid)
    assert [is_valid(lowered.schema, value) for value in invalid] == [False] * len(invalid)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"$ref": "https://example.com/x.json"}, "$ref"),
        ({"$ref": "#/$defs/gone"}, "$ref"),
        (
            {
                "$defs": {"a": {"$dynamicAnchor": "n"}, "b": {"$dynamicAnchor": "n"}},
                "items": {"$dynamicRef": "#n"},
            },
            "$dynamicRef",
        ),
        ({"uniqueItems": True, "items": {"pattern": "^a?$"}, "minItems": 3}, "uniqueItems"),
        ({"not": {"multipleOf": 2}}, "not"),
        (
            {"oneOf": [{"type": "string", "pattern": "(?m)a"}, {"type": "string", "minLength": 2}]},
            "oneOf",
        ),
        ({"if": {"pattern": "(?m)a|b"}, "else": {"type": "null"}, "type": "string"}, "if"),
        ({"propertyNames": {"pattern": "(?<=a)b", "minLength": 2}}, "propertyNames"),
    ],
    ids=str,
)
def test_what_has_no_such_spelling_is_an_error(schema: dict[str, Any], keyword: str) -> None:
    schema = {"$comment": "so", **schema, "$id": "https://example.com/root.json"}
    errors = [entry for entry in lower(schema).entries if entry.level == "error"]
    assert keyword in [entry.keyword for entry in errors]


def test_branches_exclude_what_they_share_alone() -> None:
    """Objects with another constant are apart: values that are no objects are all they share."""
    branches: list[Any] = [
        {"properties": {"k": {"enum": [name]}, name: {"type": "integer"}}, "required": ["k", name]}
        for name in ("left", "right", "middle")
    ]
    lowered = lower({"oneOf": branches})
    assert not lowered.entries
    assert "pattern" not in json.dumps(lowered.schema)
    left: list[Any] = [{"k": "left", "left": 1}, {"k": "right", "right": 2, "left": "x"}]
    assert all(is_valid(lowered.schema, value) for value in left)
    gone: list[Any] = [1, "a", [], {}, {"k": "left"}, {"k": "other", "left": 1}]
    assert not any(is_valid(lowered.schema, value) for value in gone)


def test_a_schema_that_hangs_on_a_key_knows_that_the_key_is_there() -> None:
    branches = [{"properties": {"k": {"const": name}, "v": {"type": name}}} for name in KINDS]
    lowered = lower({"type": "object", "dependentSchemas": {"k": {"oneOf": branches}}})
    assert not lowered.entries
    assert "pattern" not in json.dumps(lowered.schema)
    left: list[Any] = [{}, {"v": 1}, {"k": "null", "v": None}, {"k": "string"}]
    assert all(is_valid(lowered.schema, value) for value in left)
    gone: list[Any] = [{"k": "null", "v": "a"}, {"k": "array"}, {"k": 1}]
    assert not any(is_valid(lowered.schema, value) for value in gone)


def test_harder_admits_less_instead() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "uniqueItems": True},
            "b": {"oneOf": [{"type": "string", "pattern": "a"}, {"const": "b"}, {"minLength": 3}]},
        },
    }
    lowered = lower(schema, harder=True, filtered=False)
    assert {entry.level for entry in lowered.entries} == {"note"}
    left: list[Any] = [{"a": [1]}, {"a": []}, {"b": "b"}]
    assert all(is_valid(lowered.schema, value) for value in left)
    gone: list[Any] = [{"a": [1, 2]}, {"b": "aaa"}]
    assert not any(is_valid(lowered.schema, value) for value in gone)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_a_format_admits_only_what_jsonschema_does(name: str, data: st.DataObject) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    text = data.draw(st.from_regex(FORMATS[name][1:-1], fullmatch=True))
    assert checker.conforms(text, name), text


NAME = {"type": "string", "anyOf": [{"pattern": "^[a-z]+$"}, {"const": "*"}]}
NAMED = {"type": "object", "patternProperties": {"^.*$": {"type": "integer"}}}
DYNAMIC = {"type": "array", "contains": {"const": "a"}}
WRITTEN: list[tuple[Any, list[Any], list[Any]]] = [
    (  # what names may be is said elsewhere
        {
            **NAMED,
            "propertyNames": {"anyOf": [{"const": ""}, {"$ref": "#/$defs/name"}]},
            "$defs": {"name": {"$ref": "#/$defs/inner"}, "inner": NAME},
        },
        [{}, {"": 1}, {"ab": 1, "*": 2}],
        [{"": "x"}, {"A": 1}, {"**": 1}],
    ),
    (  # no string is an integer
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/none"},
            "$defs": {"none": {"type": "integer"}},
        },
        [{}],
        [{"a": 1}],
    ),
    (  # absent, or without the item
        {
            "type": "object",
            "properties": {"d": {"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}},
            "not": {"required": ["d"], "properties": {"d": DYNAMIC}},
        },
        [{}, {"d": []}, {"d": ["b", "c"]}],
        [{"d": ["a"]}, {"d": ["b", "a"]}],
    ),
    (
        {
            "properties": {
                "d": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
            },
            "oneOf": [{"required": ["d"], "properties": {"d": DYNAMIC}}, {"required": ["a"]}],
            "type": "object",
        },
        [{"d": ["a"]}, {"d": ["b", "a"]}, {"d": ["c", "b", "a"]}, {"a": 1}, {"d": ["b"], "a": 1}],
        [{}, {"d": ["b"]}, {"d": ["a"], "a": 1}],
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("schema", "valid", "invalid"), WRITTEN, ids=range(len(WRITTEN)))
def test_schemas_as_they_are_written(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    lowered = lower(schema)
    assert not lowered.errors
    for judged in (schema, lowered.schema):
        assert all(is_valid(judged, value) for value in valid)
        assert not any(is_valid(judged, value) for value in invalid)


def test_names_that_refer_to_the_schema_itself_are_an_error() -> None:
    names = {"anyOf": [{"$ref": "#/$defs/a"}, {"const": ""}]}
    schema = {"$defs": {"a": {"propertyNames": names, "minLength": 2}}, "$ref": "#/$defs/a"}
    assert [entry.keyword for entry in lower(schema).errors] == ["propertyNames"]


def test_what_hangs_on_many_keys_holds_without_them() -> None:
    names = "abcdefgh"
    hanging = {name: {"properties": {"z": {"maximum": at}}} for at, name in enumerate(names)}
    schema = {"type": "object", "dependentSchemas": hanging}
    lowered = lower(schema)
    assert {entry.keyword for entry in lowered.entries} == {"dependentSchemas"}
    assert not lowered.errors
    for name in names:
        for value in ({name: 0, "z": 0}, {name: 0, "z": 5}, {name: 0}, {"z": 4}, {"z": 9}):
            assert not is_valid(lowered.schema, value) or is_valid(schema, value)
        assert is_valid(lowered.schema, {name: 0, "z": 0})
    few = {"type": "object", "dependentSchemas": {name: hanging[name] for name in "abcd"}}
    assert not lower(few).entries


def test_what_holds_beside_keeps_nested_branches_apart() -> None:
    kinds = ["a", "b", "c"]
    branches = [
        {"properties": {"kind": {"enum": [kind]}, kind: {"type": "integer"}}} for kind in kinds
    ]
    schema = {
        "type": "object",
        "required": ["kind"],
        "oneOf": [
            {"required": ["other"], "properties": {"kind": {"const": "d"}}},
            {"oneOf": branches},
        ],
    }
    lowered = lower(schema)
    assert not lowered.entries
    assert "not" not in keywords(lowered.schema)
    values: list[Any] = [
        {"kind": kind, name: value} for kind in "abcd" for name in "abz" for value in (1, "x")
    ]
    for value in [*values, {}, {"kind": "d", "other": 1}, {"other": 1}, {"a": 1}]:
        assert is_valid(lowered.schema, value) == is_valid(schema, value), value


def test_the_same_part_is_read_anew_where_nothing_holds_beside() -> None:
    """Under "a" the branches are apart because of its neighbours, under "b" they are not."""
    either = {"oneOf": [{"properties": {"k": {"enum": [1]}}}, {"properties": {"k": {"enum": [2]}}}]}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "object", "required": ["k"], "allOf": [{"$ref": "#/$defs/e"}]},
            "b": {"$ref": "#/$defs/e"},
            "c": {"type": "object", "required": ["k"], "$ref": "#/$defs/e"},
        },
        "$defs": {"e": either},
    }
    lowered = lower(schema)
    for inner in ({}, {"k": 1}, {"k": 2}, {"k": 3}, {"z": 1}):
        for name in "abc":
            value = {name: inner}
            assert is_valid(lowered.schema, value) == is_valid(schema, value), value


def test_exclusions_that_are_far_too_long_are_written_in_fewer_ways() -> None:
    def branch(number: int) -> dict[str, Any]:
        names = [f"k{number}_{at}" for at in range(9)]
        inner = {name: {"enum": [[number, at] for at in range(8)]} for name in names}
        options = {"type": "object", "properties": inner}
        return {"properties": {"options": options, f"n{number}": {"minimum": number}}}

    branches = [{"$ref": f"#/$defs/b{number}"} for number in range(9)]
    schema = {
        "type": "object",
        "oneOf": branches,
        "$defs": {f"b{number}": branch(number) for number in range(9)},
    }
    lowered = lower(schema)
    assert not lowered.errors
    assert "more is excluded than it asks for" in [entry.reason for entry in lowered.entries]
    admitted = 0
    for number in range(9):
        wrong = {f"n{other}": -1 for other in range(9) if other != number}
        for value in (wrong, {**wrong, f"n{number}": 20}, {}, {f"n{number}": -1}):
            is_admitted = is_valid(lowered.schema, value)
            admitted += is_admitted
            assert not is_admitted or is_valid(schema, value), value
    assert admitted
