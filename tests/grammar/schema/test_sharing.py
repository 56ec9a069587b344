"""References with neighbours as definitions of their own: the meaning stays, by jsonschema."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend, LLGuidanceSource
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.sharing import joins_itself, share_joined
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts
from tests.tiers import examples

REFERENCES = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#"}]
NEIGHBOURS: list[Any] = [
    *({"required": ["x"]}, {"properties": {"x": {"type": "integer"}}}, {"maxProperties": 1}),
    *({"properties": {"y": REFERENCES[0]}}, {"type": ["object", "null"]}, {"minimum": 3}),
]
JOINED = st.builds(
    lambda reference, neighbour, inside: {"allOf": [reference, neighbour, *inside]},
    st.sampled_from(REFERENCES[:2]),
    st.sampled_from(NEIGHBOURS),
    st.lists(st.sampled_from([*REFERENCES[:2], *NEIGHBOURS]), max_size=1),
)
PART = st.one_of(JOINED, st.sampled_from([*REFERENCES[:2], *NEIGHBOURS]))
DEFINITION = st.builds(
    lambda x, y, names: {
        "type": "object",
        "properties": {"x": x, "y": y},
        "required": names,
    },
    st.one_of(PART, st.just({"type": "integer"})),
    PART,
    st.lists(st.sampled_from(["x", "y"]), max_size=1),
)
LEAVES: list[Any] = [{}, {"x": 1}, {"x": "a"}, {"y": {}}, None, 4, 2]
VALUES: list[Any] = [
    *LEAVES,
    *({key: leaf} for key, leaf in itertools.product("xy", LEAVES)),
    *({"x": one, "y": other} for one, other in itertools.product(LEAVES[:5], repeat=2)),
    *({"y": {"y": {"y": leaf}}} for leaf in LEAVES),
]


def valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@settings(max_examples=examples(120), deadline=None)
@given(
    st.one_of(JOINED, st.lists(JOINED, min_size=1, max_size=2).map(lambda found: {"anyOf": found})),
    DEFINITION,
    DEFINITION,
)
def test_the_meaning_stays(root: Any, first: Any, second: Any) -> None:
    lowered = lower({**root, "$defs": {"a": first, "b": second}}, additional="schema")
    shared = share_joined(lowered.schema)
    if shared is None:
        return
    for value in VALUES:
        assert valid(shared, value) == valid(lowered.schema, value), (value, shared)


@pytest.mark.every_case
@pytest.mark.parametrize("extra", [False, True, {"type": "null"}])
@pytest.mark.parametrize(
    "beside", [{"$ref": "#/$defs/node"}, {"type": "object"}, {"required": ["x"]}]
)
def test_a_listed_key_that_matches_a_pattern(beside: Any, extra: Any) -> None:
    """llguidance would join the two references, and find no end."""
    node = {
        "type": "object",
        "properties": {"require": {"$ref": "#/$defs/either"}, "d1": beside, "Z": {"const": 1}},
        "patternProperties": {"^[a-z0-9]+$": {"$ref": "#/$defs/either"}, "^[A-Y]$": {"const": 2}},
        "additionalProperties": extra,
    }
    either = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "string"}]}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node, "either": either}}
    lowered = lower(schema, additional="schema").schema
    shared = share_joined(lowered)
    leaves: list[Any] = ["a", 1, 2, None, {}, {"d1": {}}, {"x": {"Z": 1}}, {"x": {"Z": 2}}]
    names = ["require", "d1", "Z", "x", "Y", "_", "require\n", "\u0663"]
    values = [dict([pair]) for pair in itertools.product(names, leaves)]
    for value in values:
        is_valid = valid(schema, value)
        assert valid(lowered, value) == is_valid
        assert not valid(shared, value) or is_valid
        assert not set(value) <= {*names[:6]} or valid(shared, value) == is_valid
    grammar = LLGuidanceBackend(BYTES).compile(
        GrammarSpec.json_schema(schema, additional_properties="schema")
    )
    for value in values:
        admitted = accepts(grammar, json.dumps(value, ensure_ascii=False))
        assert not admitted or valid(schema, value)
        assert not set(value) <= {*names[:6]} or admitted == valid(schema, value), value


@pytest.mark.parametrize("alternatives", ["together", "apart"])
def test_a_whole_without_values_has_none(alternatives: Any) -> None:
    schema = {"enum": [], "$ref": "#", "$defs": {}}
    assert share_joined(schema, alternatives) == {"enum": [], "$defs": {}}
    with pytest.raises(GrammarCompileError):
        LLGuidanceBackend(BYTES).compile(GrammarSpec.json_schema(schema))


def test_nothing_to_join_is_nothing() -> None:
    assert share_joined({"type": "object"}) is None
    reference = {"$ref": "#/$defs/a"}
    plain = {**reference, "$defs": {"a": {"type": "array", "items": reference}}}
    assert share_joined(plain) is None


@pytest.mark.parametrize(
    ("part", "does"),
    [
        ({"items": {"$ref": "#/$defs/a"}}, False),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, False),
        ({"allOf": [{"$ref": "#/$defs/b"}, {"minItems": 1}]}, False),
        ({"items": {"allOf": [{"$ref": "#/$defs/a"}, {"minItems": 1}]}}, True),
        ({"items": {"$ref": "#/$defs/c", "minItems": 1}}, True),
        ({"properties": {"x": {"$ref": "#/$defs/a"}}, "patternProperties": {"^y": {}}}, False),
        ({"properties": {"x": {"$ref": "#/$defs/a"}}, "patternProperties": {"^x": {}}}, True),
        ({"properties": {"x": {}}, "patternProperties": {"x": {"$ref": "#/$defs/a"}}}, True),
    ],
)
def test_what_is_joined_with_itself_is_seen(part: dict[str, Any], does: bool) -> None:  # noqa: FBT001
    definitions = {"a": part, "b": {"type": "array"}, "c": {"items": {"$ref": "#/$defs/a"}}}
    assert joins_itself({"$ref": "#/$defs/a", "$defs": definitions}) is does


def test_the_form_that_is_taken_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/node"}},
        "patternProperties": {"^[a-z]$": {"$ref": "#/$defs/node"}},
        "additionalProperties": False,
    }
    texts: list[str] = []
    new = LLGuidanceSource.new

    def counted(source: LLGuidanceSource) -> Any:
        texts.append(source.text)
        return new(source)

    monkeypatch.setattr(LLGuidanceSource, "new", counted)
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert accepts(LLGuidanceBackend(BYTES).compile(GrammarSpec.json_schema(schema)), '{"x": {}}')
    assert len(set(texts)) == 1


# Resources that hold each other, told apart by a key, as FHIR's: none of them says that it is an
# object, so that each alternative stands beside a type.
RESOURCES: dict[str, Any] = {
    "oneOf": [{"$ref": "#/definitions/Patient"}, {"$ref": "#/definitions/Group"}],
    "definitions": {
        kind: {
            "properties": {
                "resourceType": {"const": kind},
                "name": {"type": "string"},
                "contained": {"type": "array", "items": {"$ref": "#/definitions/Any"}},
            },
            "required": ["resourceType"],
            "additionalProperties": False,
        }
        for kind in ("Patient", "Group")
    }
    | {"Any": {"oneOf": [{"$ref": "#/definitions/Patient"}, {"$ref": "#/definitions/Group"}]}},
}


@pytest.mark.parametrize("mode", ["closed", "schema"])
def test_resources_that_hold_each_other_compile(mode: Any) -> None:
    spec = GrammarSpec.json_schema(RESOURCES, additional_properties=mode)
    grammar = LLGuidanceBackend(BYTES).compile(spec)
    patient: Any = {"resourceType": "Patient", "name": "a"}
    group: Any = {"resourceType": "Group", "contained": [patient, {"resourceType": "Group"}]}
    for value in (patient, group, {**group, "contained": [group]}):
        assert accepts(grammar, json.dumps(value)), value
    for value in ({}, {"resourceType": "x"}, {**group, "contained": [{}]}, [patient], 1):
        assert not accepts(grammar, json.dumps(value)), value
