from __future__ import annotations

import json
from typing import Any

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.lowered import close_objects
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts, walk
from tests.tiers import examples

BACKENDS = {name: BackendChoice(name, BYTES) for name in ("auto", "llguidance", "xgrammar")}
INTEGER = {"type": "integer"}
A, B = ({"type": "object", "properties": {name: INTEGER}} for name in "ab")
Validator = jsonschema.Draft202012Validator


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


CASES: tuple[tuple[Any, str, str], ...] = (
    (A, '{"a": 1}', '{"a": 1, "z": 1}'),
    (of(), "{}", '{"z": 1}'),
    ({**A, "required": ["a", "z"]}, '{"a": 1, "z": null}', '{"a": 1, "z": null, "y": 1}'),
    (of(x=A), '{"x": {"a": 1}}', '{"x": {"z": 1}}'),
    ({"type": "array", "items": A}, '[{"a": 1}]', '[{"z": 1}]'),
    ({"type": "array", "prefixItems": [A], "items": False}, '[{"a": 1}]', '[{"z": 1}]'),
    ({"type": "object", "additionalProperties": A}, '{"k": {"a": 1}}', '{"k": {"z": 1}}'),
    ({"anyOf": [A, B]}, '{"b": 1}', '{"a": 1, "b": 1}'),
    ({**of(k=INTEGER), "anyOf": [A, B]}, '{"k": 1, "b": 1}', '{"k": 1, "b": 1, "z": 1}'),
    ({**A, "anyOf": [{"required": ["a"]}, {"required": ["z"]}]}, '{"z": 1}', '{"a": 1, "y": 1}'),
    ({"allOf": [A, B]}, '{"a": 1, "b": 1}', '{"a": 1, "b": 1, "z": 1}'),
    (
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        '{"a": 1, "b": 1}',
        '{"a": 1, "b": 1, "z": 1}',
    ),
    ({**of(x={"$ref": "#"}), "required": []}, '{"x": {"x": {}}}', '{"x": {"z": {}}}'),
    (
        {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
        '{"b": 1}',
        '{"b": 1, "z": 1}',
    ),
)
OPEN: tuple[tuple[Any, str], ...] = (
    ({"type": "object"}, '{"z": 1}'),
    ({**A, "additionalProperties": True}, '{"a": 1, "z": 1}'),
    ({**A, "additionalProperties": INTEGER}, '{"a": 1, "z": 1}'),
    ({**A, "unevaluatedProperties": True}, '{"a": 1, "z": 1}'),
    ({"allOf": [{**A, "additionalProperties": True}, B]}, '{"a": 1, "b": 1, "z": 1}'),
    ({"type": "object", "not": {"required": ["y"]}}, '{"z": 1}'),
)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("schema", "inside", "outside"), CASES, ids=str)
def test_only_declared_keys(name: str, schema: Any, inside: str, outside: str) -> None:
    grammar = BACKENDS[name].compile(GrammarSpec.json_schema(schema))
    assert accepts(grammar, inside)
    assert not accepts(grammar, outside)


@pytest.mark.parametrize(("schema", "inside", "outside"), CASES, ids=str)
def test_the_schema_at_its_word(schema: Any, inside: str, outside: str) -> None:
    spec = GrammarSpec.json_schema(schema, additional_properties="schema")
    grammar = BACKENDS["auto"].compile(spec)
    assert accepts(grammar, inside)
    assert accepts(grammar, outside) is Validator(schema).is_valid(json.loads(outside))


@pytest.mark.parametrize("name", ["auto", "llguidance"])
@pytest.mark.parametrize(("schema", "text"), OPEN, ids=str)
def test_what_asks_for_further_keys_stays_open(name: str, schema: Any, text: str) -> None:
    assert accepts(BACKENDS[name].compile(GrammarSpec.json_schema(schema)), text)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_pydantic_model_gets_its_own_fields_only(name: str) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    class Open(pydantic.BaseModel, extra="allow"):
        age: int

    grammar = BACKENDS[name].compile(GrammarSpec.json_schema(Person))
    for seed in range(8):
        text = walk(grammar, seed)
        assert not text.finished or json.loads(text.data).keys() == {"name", "age"}
    if name != "xgrammar":
        assert accepts(BACKENDS[name].compile(GrammarSpec.json_schema(Open)), '{"age": 1, "x": 2}')


def test_parts_of_one_key_are_left_as_they_are() -> None:
    """Each closed around its own keys, they would admit none."""
    schema = {"allOf": [of(x=A), of(x=B)]}
    closed = close_objects(schema)
    assert closed.open_at == ("",)
    value = {"x": {"a": 1, "b": 1}}
    assert Validator(closed.schema).is_valid(value)
    assert not Validator(closed.schema).is_valid({**value, "z": 1})
    assert accepts(BACKENDS["auto"].compile(GrammarSpec.json_schema(schema)), json.dumps(value))


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="additional_properties='open': must be one of closed"):
        GrammarSpec.json_schema({}, additional_properties="open")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="additional_properties='schema': only json_schema"):
        GrammarSpec("regex", "a", additional_properties="schema")


KEYS = st.sampled_from("abc")


def object_schemas(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain = st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(KEYS, parts, max_size=2),
            "required": st.lists(KEYS, max_size=1),
            "additionalProperties": st.sampled_from([True, False, INTEGER]),
            "patternProperties": st.just({"^c": INTEGER}),
        },
    )
    several = st.lists(parts, min_size=1, max_size=2)
    joined = st.tuples(plain, st.sampled_from(["anyOf", "allOf"]), several)
    return plain | joined.map(lambda drawn: {**drawn[0], drawn[1]: drawn[2]})


PLAIN = st.sampled_from([INTEGER, {}, True, {"type": "object"}, A])
LEAVES = PLAIN | st.just({"$ref": "#/$defs/d"})
SCHEMAS = st.tuples(st.recursive(LEAVES, object_schemas, max_leaves=6), object_schemas(PLAIN))
VALUES = st.recursive(
    st.integers(0, 1), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=5
)


def whole(drawn: tuple[Any, Any]) -> dict[str, Any]:
    schema, definition = drawn
    base = schema if isinstance(schema, dict) else {}
    return {**base, "$defs": {"d": definition}}


@settings(max_examples=examples(300))
@given(SCHEMAS, VALUES)
def test_closed_schemas_admit_no_more(drawn: tuple[Any, Any], value: Any) -> None:
    schema = whole(drawn)
    closed = close_objects(lower(schema).schema).schema
    if Validator(closed).is_valid(value):
        assert Validator(schema).is_valid(value)


@settings(max_examples=examples(300))
@given(st.lists(object_schemas(st.just(INTEGER)), min_size=1, max_size=2), VALUES)
def test_what_is_declared_is_what_json_schema_evaluates(parts: list[Any], value: Any) -> None:
    """Without branches and nested objects: unevaluatedProperties says the same."""
    flat = [{k: v for k, v in part.items() if k not in ("anyOf", "allOf")} for part in parts]
    schema = {"allOf": flat}
    required = {name for part in flat for name in part.get("required", ())}
    says = any("additionalProperties" in part for part in flat)
    declares = any("properties" in part or "patternProperties" in part for part in flat)
    more = {"properties": dict.fromkeys(required, True), "unevaluatedProperties": False}
    wanted = {**schema, **(more if declares and not says else {})}
    closed = close_objects(schema).schema
    assert Validator(closed).is_valid(value) is Validator(wanted).is_valid(value)
