from __future__ import annotations

import copy
import json
import operator
import re
from collections.abc import Sequence
from decimal import Decimal, localcontext
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.schema.dialect import for_python
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.rewrite import find_unenforced, normalize
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts, walk
from tests.strategies import schemas

BACKEND = XGrammarBackend(BYTES, compile_threads=1)
DATA = Path(__file__).parent.parent.parent / "data"
SUITE = sorted((DATA / "json_schema_test_suite").glob("*.json"))
INTEGER = {"type": "integer"}
STRING = {"type": "string"}


def check_walks(schema: Any, seeds: range) -> int:
    """Walk ``schema``'s grammar; every finished text must be valid. Returns how many finished."""
    grammar = BACKEND.compile(GrammarSpec.json_schema(schema))
    validator = jsonschema.Draft202012Validator(for_python(schema))
    finished = 0
    for seed in seeds:
        text = walk(grammar, seed)
        if text.finished:
            finished += 1
            validator.validate(json.loads(text.text))
    return finished


@given(schemas(), st.integers(0, 2**32))
def test_every_text_of_a_drawn_schema_is_valid(schema: dict[str, Any], seed: int) -> None:
    assert not [entry for entry in find_unenforced(schema) if entry.level == "error"]
    check_walks(schema, range(seed, seed + 3))


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_every_text_of_the_test_suite_is_valid(path: Path) -> None:
    for group in json.loads(path.read_text()):
        try:
            check_walks(group["schema"], range(5))
        except GrammarCompileError:
            continue


def test_function_calls_pass_whole_and_admit_their_reference() -> None:
    lines = (DATA / "bfcl" / "schemas.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert not find_unenforced(row["schema"])
        assert check_walks(row["schema"], range(1)) == 1
        grammar = BACKEND.compile(GrammarSpec.json_schema(row["schema"], any_whitespace=True))
        assert accepts(grammar, json.dumps(row["reference"], ensure_ascii=False)), row["id"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"enum": [1, "x", None]}, "maxItems": 3},
        {"anyOf": [INTEGER, {"type": "boolean"}]},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 100},
        {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 100},
    ],
)
def test_every_plain_valid_value_is_accepted(schema: dict[str, Any]) -> None:
    grammar = BACKEND.compile(GrammarSpec.json_schema(schema))

    @given(from_schema(schema))
    def check(value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False)
        if text.isprintable() and "\\" not in text and ".0" not in text:
            assert accepts(grammar, text), text

    check()


UNENFORCEABLE = [
    ({"not": {"multipleOf": 2}}, "", "not"),
    ({"properties": {"a/b": {"not": {"multipleOf": 2}}}}, "/properties/a~1b", "not"),
    (
        {"$defs": {"x": {"not": {"pattern": "(?m)a|b"}}}, "items": {"$ref": "#/$defs/x"}},
        "/$defs/x",
        "not",
    ),
    (
        {"type": "array", "uniqueItems": True, "items": {"pattern": "^a?$"}, "minItems": 3},
        "",
        "uniqueItems",
    ),
    ({"type": "number", "multipleOf": 0.1}, "", "multipleOf"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1}, "", "multipleOf"),
    ({"type": "integer", "minimum": 2**63}, "", "minimum"),
    ({"type": "integer", "maximum": -(2**63) - 1}, "", "maximum"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "", "maxLength"),
    ({"type": "string", "pattern": "^b(?=a)"}, "", "pattern"),
    ({"$ref": "other.json"}, "", "$ref"),
    ({"$ref": "#/$defs/gone"}, "", "$ref"),
    ({"$dynamicRef": "#x"}, "", "$dynamicRef"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "", "pattern"),
    ({"anyOf": [{"patternProperties": {}}], "patternProperties": {"a": {}}}, "", "anyOf"),
    ({"minimum": 3, "minLength": 2}, "", "type"),
    ({"type": "object", "minProperties": 2}, "", "minProperties"),
    ({"patternProperties": {"a": {}, "b": {}}}, "", "patternProperties"),
    ({"properties": {"a": {}}, "patternProperties": {"a": {}}}, "", "patternProperties"),
    ({"properties": {"a": {}}, "propertyNames": {"maxLength": 3}}, "", "patternProperties"),
    ({"const": 2**60}, "", "const"),
]


@pytest.mark.parametrize(("schema", "pointer", "keyword"), UNENFORCEABLE)
def test_what_would_be_ignored_is_reported(schema: Any, pointer: str, keyword: str) -> None:
    errors = [entry for entry in find_unenforced(schema) if entry.level == "error"]
    found = [(entry.pointer, entry.keyword) for entry in errors]
    assert (pointer, keyword) in found
    assert all(entry.reason and entry.fix for entry in errors)
    with pytest.raises(UnsupportedSchemaError, match=re.escape(keyword)):
        BACKEND.compile(GrammarSpec.json_schema(schema))


ENFORCED = [
    {"type": "string", "enum": ["a", "b"], "title": "T", "default": "a", "examples": ["a"]},
    {"enum": [1, "a"], "type": "string"},
    {"enum": ["a", "abc"], "minLength": 2},
    {"const": "a", "type": "string", "$comment": "c"},
    {"$ref": "#/$defs/x", "description": "d", "$defs": {"x": INTEGER}},
    {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INTEGER}},
    {"$ref": "#/$defs/x~1y%20z", "$defs": {"x/y z": INTEGER}},
    {"allOf": [{"$ref": "#/$defs/x"}], "description": "d", "$defs": {"x": INTEGER}},
    {"allOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"},
    {"allOf": [{"minimum": 3}, {"minimum": 5}], "type": "integer"},
    {
        "allOf": [
            {"properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3}, "b": STRING}},
        ]
    },
    {"anyOf": [{"properties": {"a": INTEGER}}], "additionalProperties": False},
    {"not": {"type": "string"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "properties": {"a": INTEGER}, "if": {"required": ["a"]}, "else": False},
    {"enum": [{"a": [1, {}], "b": []}, [], [[1]]]},
    {"type": "string", "anyOf": [{"minLength": 3}, {"const": "a"}]},
    {"type": ["string", "null"], "anyOf": [STRING, {"type": "null"}, INTEGER]},
    {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    {"oneOf": [INTEGER, STRING, {"type": "null"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]}
            for kind in ("x", "y")
        ]
    },
    {"type": "object", "required": ["z"]},
    {"type": "object", "required": ["z"], "additionalProperties": INTEGER},
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING},
    {"type": "object", "propertyNames": {"maxLength": 2}, "minProperties": 1},
    {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/x"},
        "additionalProperties": INTEGER,
        "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"enum": ["a", "b"], "title": "T"}},
    },
    {"type": "object", "properties": {"a": False, "b": True}, "minProperties": 1},
    {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
    {"type": "array", "prefixItems": [INTEGER, True], "maxItems": 1},
    {"type": "array", "prefixItems": [INTEGER], "minItems": 3, "items": STRING},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "array", "uniqueItems": True},
    {"type": "string", "minLength": 2},
    {"type": "string", "pattern": "^[a-z]{2,3}$", "minLength": 1, "maxLength": 3},
    {"type": "string", "format": "email", "maxLength": 5},
    {"type": "string", "format": "json-pointer"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "made-up"},
    {"type": "integer", "minimum": 1.5, "maximum": 7.2},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 400},
    {"type": "integer", "multipleOf": 1.5},
    {"type": "array", "items": {"$ref": "#"}},
    {"minimum": 5},
    {"x-vendor": 1, "type": "null", "$schema": "https://json-schema.org/draft/2020-12/schema"},
    {},
]


@pytest.mark.parametrize("schema", ENFORCED, ids=str)
def test_what_can_be_kept_is_kept(schema: Any) -> None:
    before = copy.deepcopy(schema)
    assert not [entry for entry in find_unenforced(schema) if entry.level == "error"]
    assert schema == before
    assert check_walks(schema, range(40)) > 20


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a"], "type": "integer"},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "number", "exclusiveMinimum": 3, "maximum": 3},
        {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 1, "items": False},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"anyOf": [False, {"enum": [1], "type": "null"}]},
        {"allOf": [INTEGER, STRING]},
        {"$ref": "#/$defs/no", "$defs": {"no": False}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {
            "anyOf": [
                {"$ref": "#"},
                {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
            ]
        },
    ],
    ids=str,
)
def test_what_nothing_satisfies_is_false(schema: Any) -> None:
    assert normalize(lower(schema, additional="closed")).schema is False
    with pytest.raises(UnsatisfiableGrammarError):
        BACKEND.compile(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "format": "made-up"}, "format"),
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"patternProperties": {"a": {}}}, "patternProperties"),
        ({"contains": INTEGER}, "contains"),
        (
            {"properties": {"a": INTEGER}, "type": "object", "additionalProperties": True},
            "additionalProperties",
        ),
        ({"type": "array", "prefixItems": [INTEGER]}, "prefixItems"),
        ({"minimum": 5}, "type"),
        ({"type": "integer", "maximum": 2**64 - 1}, "maximum"),
        ({"type": "integer", "minimum": -(2**70)}, "minimum"),
        ({"type": "string", "pattern": "^a$|^b"}, "pattern"),
    ],
)
def test_what_is_narrowed_is_noted(schema: Any, keyword: str) -> None:
    assert (keyword, "note") in [(entry.keyword, entry.level) for entry in find_unenforced(schema)]


@pytest.mark.parametrize(
    ("bounds", "values", "others"),
    [
        ({"minimum": -(2**63)}, [-(2**63), 2**63], [-(2**63) - 1]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [2**63 - 1], [2**63]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [-1, 2**64]),
        ({"exclusiveMinimum": -(2**70)}, [-(2**63), 5], [-(2**70)]),
        ({"minimum": 1, "maximum": 10**30}, [1, 10**18], [0, 10**31]),
    ],
)
@pytest.mark.parametrize("name", ["xgrammar", "auto"])
def test_integers_have_bounds_of_64_bits(
    name: str, bounds: dict[str, int], values: list[int], others: list[int]
) -> None:
    spec = GrammarSpec.json_schema({"type": "integer", **bounds})
    grammar = BackendChoice(name, BYTES).compile(spec)
    assert [value for value in values if not accepts(grammar, str(value))] == []
    assert [value for value in others if accepts(grammar, str(value))] == []


BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
CHOICES = {name: BackendChoice(name, BYTES) for name in ("xgrammar", "llguidance")}
SIZES = [0, 1e-9, 0.1, 5, 497.21666716, 644051.08, 2**33, 2**40, 2**52, 2**53, 2**64, 1e300]
CLOSE = ["0", "1e-25", "1e-17", "1e-12", "3e-7", "1e-6", "3e-6", "0.5", "1", "3000"]


@pytest.mark.parametrize("backend", CHOICES)
@given(
    st.sampled_from(BOUNDS),
    st.builds(operator.mul, st.sampled_from(SIZES), st.just(1) | st.floats(0.1, 1)),
    st.sampled_from([1, -1]),
    st.lists(st.integers(-9, 9), min_size=1, max_size=3),
)
def test_numbers_are_within_their_bounds_as_they_are_read(
    backend: str, name: str, size: float, sign: int, steps: list[int]
) -> None:
    schema = {"type": "number", name: sign * size}
    try:
        grammar = CHOICES[backend].compile(GrammarSpec.json_schema(schema))
    except UnsupportedSchemaError:
        assert backend == "llguidance"
        assert size >= 2**53
        return
    validator = jsonschema.Draft202012Validator(schema)
    with localcontext(prec=400):
        for step, close, decimals in product((0, *steps), CLOSE, (0, 6, 20, 26)):
            number = round(Decimal(sign * size) + step * Decimal(close), decimals)
            text = format(number, "f")
            assert not accepts(grammar, text) or validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("backend", CHOICES)
def test_numbers_go_on_at_their_bounds(backend: str) -> None:
    def takes(text: str, **bounds: float) -> bool:
        schema = {"type": "number", **bounds}
        return accepts(CHOICES[backend].compile(GrammarSpec.json_schema(schema)), text)

    assert takes("0.1", minimum=0.1)
    assert takes("0.1", maximum=0.1)
    assert takes("5.000001", exclusiveMinimum=5)
    assert takes("0", maximum=2**64)
    assert takes("-1.5", minimum=-1e300, maximum=0)
    assert not takes("0", exclusiveMinimum=0, exclusiveMaximum=1)
    assert not takes("1099511627776.000001", exclusiveMinimum=2**40)
    assert takes("1099511627776.02", exclusiveMinimum=2**40)


def test_what_narrowing_has_emptied_is_unsupported_not_unsatisfiable() -> None:
    schema = {
        "type": "object",
        "required": ["a"],
        "anyOf": [{"properties": {"a": INTEGER}}],
        "unevaluatedProperties": False,
    }
    with pytest.raises(UnsupportedSchemaError, match="unevaluatedProperties"):
        BACKEND.compile(GrammarSpec.json_schema(schema))


def test_deep_schemas_end_in_an_error_not_a_crash() -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"items": schema}
    assert "nested too deeply" in str(find_unenforced(schema))


NODE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "size": {"type": "integer"},
                "first": {"allOf": [{"$ref": "#/$defs/node"}, {"required": ["name"]}]},
                "second": {"$ref": "#/$defs/node", "properties": {"size": {"minimum": 3}}},
            },
            "anyOf": [{"required": ["name"]}, {"required": ["size"]}],
        }
    },
}


def nested(keys: Sequence[str], inside: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(keys):
        inside = {"name": "a", "size": 5, key: inside}
    return inside


@pytest.mark.parametrize("depth", [1, 3, 12, 30])
def test_schemas_that_are_joined_again_and_again_hold_at_every_depth(depth: int) -> None:
    """They refer to themselves beside others; written out, they would double at each level."""
    grammar = BACKEND.compile(GrammarSpec.json_schema(NODE))
    validator = jsonschema.Draft202012Validator(NODE)
    for last in ("first", "second"):
        for inside in ({"name": "b"}, {"size": 4}, {"size": 2}, {"name": "b", "size": 2}, {}):
            keys = [("first", "second")[at % 2] for at in range(depth - 1)] + [last]
            value = nested(keys, inside)
            text = json.dumps(value, ensure_ascii=False)
            assert accepts(grammar, text) == validator.is_valid(value), (last, inside)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1, 2], "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#"}}},
        {"minLength": 2, "$ref": "#/$defs/x", "$defs": {"x": {"maxLength": 5, "$ref": "#"}}},
    ],
)
def test_schemas_that_only_refer_to_themselves_have_no_value(schema: Any) -> None:
    with pytest.raises(UnsatisfiableGrammarError):
        BACKEND.compile(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {  # alternatives that are references, beside others
            "anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}],
            "allOf": [{"anyOf": [{"$ref": "#/$defs/b"}, {"minimum": 3}]}],
            "$defs": {
                "a": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}},
                    "required": ["x"],
                },
                "b": {"type": "object", "properties": {"y": {"type": "string"}}, "required": ["y"]},
            },
        },
        {  # values that references judge
            "enum": ["a", "bb", 1, None, {"x": 1}],
            "anyOf": [{"$ref": "#/$defs/short"}, {"$ref": "#/$defs/object"}],
            "$defs": {
                "short": {"type": ["string", "null"], "maxLength": 1},
                "object": {"type": "object", "required": ["x"]},
            },
        },
    ],
)
def test_references_beside_alternatives_and_values(schema: Any) -> None:
    grammar = BACKEND.compile(GrammarSpec.json_schema(schema, additional_properties="schema"))
    validator = jsonschema.Draft202012Validator(schema)
    values = [
        "a",
        "bb",
        1,
        3,
        5,
        None,
        True,
        {},
        {"x": 1},
        {"y": "b"},
        {"x": 1, "y": "b"},
        {"x": "a"},
    ]
    for value in values:
        assert accepts(grammar, json.dumps(value)) == validator.is_valid(value), value
