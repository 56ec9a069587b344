"""Patterns of keys that overlap: what is lowered admits what the schema does, by jsonschema."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.schema.joining import holds
from guided_spec.grammar.schema.key_patterns import split_patterns
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.spec import GrammarSpec
from tests.grammar.test_languages import EOS
from tests.masks.walks import BYTES
from tests.tiers import examples

KEYS = ["", "a", "b", "ab", "ba", "abb", "1", "é"]
VALUES = [1, 4, 9, "x", None]
OBJECTS: list[dict[str, Any]] = [
    {},
    *({key: value} for key in KEYS for value in VALUES),
    *(dict(pair) for pair in itertools.product([("a", 4), ("ab", 9)], [("b", "x"), ("1", 4)])),
]
PATTERNS = st.sampled_from(["^a", "b$", "a", "^ab*$", "^.$", r"^\w+$", r"\d", "^(?!a)", r"\bb"])
PARTS = st.sampled_from(
    [True, False, {"type": "integer"}, {"minimum": 3}, {"type": "integer", "maximum": 5}]
)
EXTRAS = st.sampled_from([None, True, False, {"type": "string"}])
SOME_NAMES: list[Any] = [
    *(
        {"pattern": "b"},
        {"maxLength": 1},
        {"pattern": "^[ab]*$"},
        {"pattern": "^a", "minLength": 2},
    ),
    *({"not": {"enum": ["a", "1"]}}, {"anyOf": [{"pattern": "^b"}, {"enum": ["", "a"]}]}),
    *(
        {"allOf": [{"pattern": "^a"}, {"not": {"pattern": "bb"}}]},
        {"pattern": "b", "not": {"const": "b"}},
    ),
    *({"enum": ["a", "b", 1], "pattern": "a"}, {"pattern": "^a$", "enum": ["b"]}),
]
NAMES = st.sampled_from([None, *SOME_NAMES])


def valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@settings(max_examples=examples(120), deadline=None)
@given(
    patterns=st.dictionaries(PATTERNS, PARTS, min_size=1, max_size=3),
    properties=st.dictionaries(st.sampled_from(KEYS[:5]), PARTS, max_size=2),
    extra=EXTRAS,
    names=NAMES,
    is_closed=st.booleans(),
)
@example(
    patterns={"^(?!a)": True}, properties={}, extra=None, names={"pattern": "^a"}, is_closed=True
)
def test_lowered_objects_are_those_of_the_schema(
    patterns: Any, properties: Any, extra: Any, names: Any, is_closed: Any
) -> None:
    schema: dict[str, Any] = {"type": "object", "patternProperties": patterns}
    schema |= {"properties": properties} if properties else {}
    schema |= {} if extra is None else {"additionalProperties": extra}
    schema |= {} if names is None else {"propertyNames": names}
    found = lower(schema, additional="closed" if is_closed else "schema")
    if any(entry.level == "error" for entry in found.entries):
        return
    for value in OBJECTS:
        is_admitted = valid(found.schema, value)
        assert valid(schema, value) or not is_admitted, (value, found.schema)
        # Classes are ASCII in what is admitted, and closed objects have no other keys.
        if not is_closed and all(map(str.isascii, value)):
            assert is_admitted == valid(schema, value), (value, found.schema)


@settings(max_examples=examples(120), deadline=None)
@given(names=st.sampled_from(SOME_NAMES), extra=EXTRAS, is_closed=st.booleans())
def test_names_of_any_keywords(names: Any, extra: Any, is_closed: Any) -> None:
    schema = {"type": "object", "propertyNames": names}
    schema |= {} if extra is None else {"additionalProperties": extra}
    found = lower(schema, additional="closed" if is_closed else "schema")
    assert [entry for entry in found.entries if entry.level == "error"] == []
    for value in OBJECTS:
        if all(map(str.isascii, value)):
            assert valid(found.schema, value) == valid(schema, value), (value, found.schema)


@settings(max_examples=examples(60), deadline=None)
@given(patterns=st.dictionaries(PATTERNS, st.integers(), min_size=2, max_size=3))
def test_no_key_is_in_two_parts(patterns: dict[str, int]) -> None:
    parts = split_patterns(patterns, [])
    if parts is None:
        return
    for key in KEYS:
        assert sum(holds(pattern, key) for pattern in parts.schemas) <= 1, key


@pytest.mark.parametrize("mode", ["closed", "schema"])
def test_both_schemas_hold_for_a_key_of_both(mode: Any) -> None:
    patterns = {"^a": {"type": "integer", "minimum": 3}, "b$": {"type": "integer", "maximum": 5}}
    spec = GrammarSpec.json_schema(
        {"type": "object", "patternProperties": patterns}, additional_properties=mode
    )
    compiled = LLGuidanceBackend(BYTES).compile(spec)
    taken = {"ab": 4, "ax": 9, "xb": 2}
    for key, number in (*taken.items(), ("ab", 2), ("ab", 9), ("xb", 7)):
        matcher = compiled.new_matcher()
        text = json.dumps({key: number}).encode()
        is_taken = all(map(matcher.accept_token, [*text, EOS]))
        assert is_taken == (taken.get(key) == number), (key, number)
