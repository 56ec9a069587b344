"""Objects of very many keys have the texts that llguidance gives them, at far lower a cost."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schemas.judge import random_text
from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.auto import AutoBackend, BackendChoice
from guided_spec.grammar.backends.large_objects import LARGE, LargeObjects, large_object_rules
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.llguidance_schema import prepare_for_llguidance
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.schema.prepare import lower_checked
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.unique_keys import with_unique_keys
from tests.grammar.schema.test_key_order import OBJECTS, SCALARS, instances, orders, twice
from tests.masks.walks import BYTES, accepts, walk
from tests.tiers import examples

FIXED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
INTEGER = {"type": "integer"}
# Names that begin alike, with escapes in places where they part.
NAMES = [
    "a",
    "ab",
    "abc",
    "abd",
    "b",
    'q"',
    'q"r',
    "q\n",
    "q\nr",
    "q\\",
    "é",
    "éa",
    "",
    "\x7f",
    "x",
]


def with_rules(schema: Any, most_optional: int, most_together: int) -> CompiledGrammar | None:
    """The grammar of a schema in which few keys make an object large; None without any such."""
    prepared = prepare_for_llguidance(lower_checked(schema, "schema"))
    objects = LargeObjects(most_optional, most_together)
    rules = large_object_rules(prepared, FIXED, objects=objects)
    if rules is None:
        return None
    text = "\n".join(['%llguidance {"no_forcing": true}', f"start: {rules.top}", *rules.lines])
    grammar: Any = LLGuidanceBackend(BYTES).compile(GrammarSpec.lark(text))
    return with_unique_keys(grammar, prepared, BYTES)


def in_own_form(schema: Any) -> CompiledGrammar:
    spec = GrammarSpec.json_schema(schema, any_whitespace=False, additional_properties="schema")
    return LLGuidanceBackend(BYTES).compile(spec)


def compared(schema: Any, most_optional: int, together: int) -> tuple[CompiledGrammar, ...]:
    """Both grammars; none where either is refused or there is nothing to compare."""
    try:
        ruled, own = with_rules(schema, most_optional, together), in_own_form(schema)
    except (UnsatisfiableGrammarError, UnsupportedSchemaError, GrammarCompileError):
        return ()
    return () if ruled is None else (ruled, own)


@settings(max_examples=examples(60))
@given(st.data(), st.integers(0, 3), st.integers(1, 3))
def test_rules_hold_what_the_schema_holds(
    data: st.DataObject, most_optional: int, together: int
) -> None:
    schema = data.draw(OBJECTS)
    grammars = compared(schema, most_optional, together)
    for value in data.draw(st.lists(instances(schema) | SCALARS, max_size=3)) if grammars else ():
        for other in orders(value):
            text = json.dumps(other, ensure_ascii=False)
            ruled, own = (accepts(grammar, text) for grammar in grammars)
            assert ruled == own, (schema, text)


@st.composite
def many_keys(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=2, unique=True))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw(st.sampled_from([INTEGER, True, False])) for name in names},
        "required": draw(st.lists(st.sampled_from(names), max_size=3, unique=True)),
        "additionalProperties": draw(st.sampled_from([False, INTEGER])),
    }
    if draw(st.booleans()):
        schema["patternProperties"] = {draw(st.sampled_from(["^x", "b$", "^a.?$"])): INTEGER}
    if draw(st.booleans()):
        schema["minProperties"] = 1
    return schema


@settings(max_examples=examples(60))
@given(many_keys(), st.integers(1, 3), st.integers(0, 2**32))
def test_names_are_told_apart_wherever_they_part(
    schema: dict[str, Any], together: int, seed: int
) -> None:
    grammars = compared(schema, 0, together)
    dice = random.Random(seed)
    for number in range(16 if grammars else 0):
        listed = [name for name in schema["properties"] if dice.random() < 0.5]
        listed += schema["required"] if number % 2 else []
        found = [name for name in schema["properties"] if name in listed]
        found += dice.sample(["z", "abe", 'q"s', "q\\\\", "xx", "ac"], dice.randint(0, 2))
        if number % 5 == 0:
            dice.shuffle(found)
        value = dict.fromkeys(found, 1)
        text = json.dumps(value, ensure_ascii=False)
        ruled, own = (accepts(grammar, text) for grammar in grammars)
        is_narrow = "patternProperties" in schema and schema["additionalProperties"] is not False
        assert ruled == own or (own and is_narrow and "\\" in text), (schema, text)
        assert not ruled or jsonschema.Draft202012Validator(schema).is_valid(value)
        if found:
            assert not accepts(grammars[0], twice(value, dice.choice(found)))
    for grammar in grammars[:1]:
        for number in range(3):
            found_text = walk(grammar, seed + number)
            if found_text.finished:
                jsonschema.validate(json.loads(found_text.text), schema)


def large(count: int, **more: Any) -> dict[str, Any]:
    dice = random.Random(count)
    words = ["max", "single", "zero", "ptr", "as", "into", "clone", "let", "manual", "é", "map"]
    names = {"_".join(dice.choices(words, k=dice.randint(1, 4))) + str(i) for i in range(count)}
    return {"type": "object", "properties": dict.fromkeys(sorted(names), INTEGER), **more}


@pytest.mark.parametrize("any_whitespace", [False, True])
@pytest.mark.parametrize("key_order", ["schema", "any"])
def test_thousands_of_optional_keys_compile(key_order: Any, *, any_whitespace: bool) -> None:
    schema = large(2_000, additionalProperties={"type": "boolean"})
    names = list(schema["properties"])
    schema = {"type": "array", "items": schema | {"required": [names[900]]}}
    spec = GrammarSpec.json_schema(schema, any_whitespace=any_whitespace, key_order=key_order)
    grammar = AutoBackend(BYTES).compile(spec)
    some = {names[5]: 1, names[900]: 2, names[1_990]: 3, "max": True}
    for valid in ([some], [some, {names[900]: 1}], []):
        assert accepts(grammar, json.dumps(valid, ensure_ascii=False))
        spaced = json.dumps(valid, ensure_ascii=False, indent=1, separators=(" ,", " : "))
        assert not valid or accepts(grammar, spaced) is any_whitespace
    backwards = {names[900]: 2, names[5]: 1}
    for invalid in ({}, {names[5]: 1}, some | {"max": 1}, some | {names[0]: True}, backwards):
        assert not accepts(grammar, json.dumps([invalid], ensure_ascii=False))
    assert not accepts(grammar, f"[{twice(some, names[900])}]")
    assert not accepts(grammar, f"[{twice(some, 'max')}]")
    text = json.dumps([some], ensure_ascii=False)
    assert not accepts(grammar, text.replace(f'"{names[5]}', f'" {names[5]}'))
    for seed in range(3):
        written = random_text(grammar, BYTES, seed)
        assert written is None or jsonschema.Draft202012Validator(schema).is_valid(
            json.loads(written)
        )


def test_the_objects_whose_order_stays_are_named() -> None:
    spec = GrammarSpec.json_schema(large(LARGE + 1), key_order="any")
    grammar: Any = AutoBackend(BYTES).compile(spec)
    assert [note.reason for note in grammar.notes] == ["an object lists more than 63 keys"]


@pytest.mark.parametrize(
    ("content", "is_valid"), [('{"%s": 1, "%s": 2}', True), ('{"%s": 1, "x": 2}', False)]
)
def test_a_large_object_in_a_tag(content: str, *, is_valid: bool) -> None:
    schema = large(1_500, additionalProperties=False)
    names = list(schema["properties"])
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "go "},
                {"type": "json_schema", "json_schema": schema},
            ],
        },
    }
    grammar = AutoBackend(BYTES).compile(GrammarSpec.structural_tag(tag))
    keys = tuple(names[index] for index in (3, 1_200)[: content.count("%s")])
    assert accepts(grammar, "go " + content % keys) is is_valid


def test_an_object_that_has_no_rules_is_refused_where_it_is_too_large() -> None:
    patterns = [{"patternProperties": {f"^{letter}": INTEGER}} for letter in "ab"]
    schema = {"allOf": [large(1_001), *patterns]}
    with pytest.raises(UnsupportedSchemaError, match=r"more than 1,000 of them are optional"):
        BackendChoice("auto", BYTES).compile(GrammarSpec.json_schema(schema))


def test_xgrammar_alone_refuses_what_it_compiles_for_seconds() -> None:
    schema = large(501, additionalProperties=False)
    with pytest.raises(UnsupportedSchemaError, match="more than 500 of them are optional"):
        BackendChoice("xgrammar", BYTES).compile(GrammarSpec.json_schema(schema))
    grammar: Any = BackendChoice("auto", BYTES).compile(GrammarSpec.json_schema(schema))
    assert grammar.backend == "llguidance"
