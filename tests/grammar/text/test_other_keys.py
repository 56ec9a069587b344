"""Objects that ask for further keys: these come in, and none of them is a listed one."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.schema.keys import free_keys
from guided_spec.grammar.schema.prepare import prepare_schema
from guided_spec.grammar.schema.rewrite import find_unenforced
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar
from tests.masks.walks import BYTES, accepts, walk

BACKEND = XGrammarBackend(BYTES, compile_threads=1)
NAMES = st.text('abé^]-\\"\n\u2028😀', max_size=4)
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
VALUES = st.sampled_from([True, STRING, INTEGER, {"type": "array", "items": INTEGER}])


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    listed = {name: draw(st.sampled_from([INTEGER, STRING, {"type": "null"}])) for name in names}
    required = [name for name in names if draw(st.booleans())]
    found = {"type": "object", "properties": listed, "required": required}
    return {**found, "additionalProperties": draw(VALUES)}


def compiled(kind: str, schema: dict[str, Any]) -> CompiledGrammar:
    if kind == "json":
        return BACKEND.compile(GrammarSpec.json_schema(schema))
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return BACKEND.compile(GrammarSpec.structural_tag({"type": "structural_tag", "format": tag}))


def whole(kind: str, text: str) -> str:
    return text if kind == "json" else f"<a>{text}</a>"


@pytest.mark.parametrize("kind", ["json", "tag"])
@given(schema=objects(), seed=st.integers(0, 10**6))
def test_every_text_is_valid(kind: str, schema: dict[str, Any], seed: int) -> None:
    grammar = compiled(kind, schema)
    for at in range(seed, seed + 3):
        found = walk(grammar, at, wander=30)
        if found.finished:
            text = found.text.removeprefix("<a>").removesuffix("</a>")
            jsonschema.validate(json.loads(text), schema)


@given(
    schema=objects(), further=st.dictionaries(NAMES, st.just("x"), max_size=3), seed=st.integers()
)
def test_every_plain_instance_comes_in(
    schema: dict[str, Any], further: dict[str, str], seed: int
) -> None:
    schema = {**schema, "additionalProperties": STRING}
    values = {"integer": 3, "string": "s", "null": None}
    listed, needed = schema["properties"], schema["required"]
    dice = random.Random(seed)
    kept = [name for name in listed if name in needed or dice.random() < 0.5]
    value: dict[str, Any] = {name: values[listed[name]["type"]] for name in kept}
    value |= {key: text for key, text in further.items() if key not in listed and is_plain(key)}
    text = json.dumps(value, ensure_ascii=False)
    for kind in ("json", "tag"):
        assert accepts(compiled(kind, schema), whole(kind, text)), text


def is_plain(key: str) -> bool:
    return json.dumps(key, ensure_ascii=False) == f'"{key}"'


OPEN = {"type": "object", "properties": {"ab": INTEGER}, "additionalProperties": STRING}


@pytest.mark.parametrize("kind", ["json", "tag"])
@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("{}", True),
        ('{"a": "x", "": "y", "abc": "z"}', True),
        ('{"ab": 1, "b": "x"}', True),
        ('{"ab": "x"}', False),
        ('{"\\u0061b": "x"}', False),
        ('{"a\\u0062": "x"}', False),
        ('{"b": 1}', False),
        ('{"b": "x", "ab": 1}', False),
        ('{"ab": 1, "ab": "x"}', False),
    ],
)
def test_no_further_key_is_a_listed_one(kind: str, text: str, is_taken: object) -> None:
    assert accepts(compiled(kind, OPEN), whole(kind, text)) is is_taken


@pytest.mark.parametrize("name", ["a", "", "\\"])
def test_the_empty_key_is_a_further_one(name: str) -> None:
    """Where each listed key is a letter, no other beginning of one is a key."""
    grammar = compiled("json", {**OPEN, "properties": {name: INTEGER}})
    assert accepts(grammar, '{"": "x"}') is (name != "")
    assert accepts(grammar, '{"b": "x"}')


def test_no_key_is_there_twice() -> None:
    grammar = compiled("json", OPEN)
    assert isinstance(grammar, UniqueKeysGrammar)
    assert not grammar.run_out
    assert not free_keys(prepare_schema(OPEN)).run_out
    assert not accepts(grammar, '{"b": "x", "b": "y"}')


@pytest.mark.slow
def test_many_letters_are_told_apart_by_their_beginning() -> None:
    names = [f"{letter}_property_{number}" for letter in "abcefgh" for number in range(9)]
    schema = {**OPEN, "properties": dict.fromkeys([*names, "x" * 100_000, "d"], INTEGER)}
    grammar = compiled("json", schema)
    for key, is_taken in (("i", True), ("dd", True), (names[0], False), (names[0] + "0", False)):
        assert accepts(grammar, f'{{"{key}": "x"}}') is is_taken
        assert accepts(grammar, f'{{"{key}": 1}}') is (key in names)


@pytest.mark.parametrize(
    "more", [{"patternProperties": {"^x": STRING}}, {"maxProperties": 2, "required": ["ab"]}]
)
def test_objects_that_stay_closed_say_so(more: dict[str, Any]) -> None:
    schema = {**OPEN, "properties": {"ab": INTEGER, "ac": INTEGER}, **more}
    reasons = [entry.reason for entry in find_unenforced(schema)]
    assert "no keys are generated besides those listed" in reasons
    assert not accepts(compiled("json", schema), '{"ab": 1, "ac": 2, "b": "x"}')
