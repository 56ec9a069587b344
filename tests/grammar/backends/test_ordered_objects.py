"""Objects of very many keys have the texts that llguidance gives them, at far lower a cost."""

from __future__ import annotations

import json
import random
from itertools import combinations
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
from guided_spec.grammar.backends import json_rules
from guided_spec.grammar.backends.auto import AutoBackend, BackendChoice
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.llguidance_schema import prepare_for_llguidance
from guided_spec.grammar.backends.ordered_objects import LARGE, OrderedObjects, ordered_object_rules
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


def with_rules(
    schema: Any, most_optional: int, most_together: int, *, prepare: bool = True
) -> CompiledGrammar | None:
    """The grammar of a schema in which few keys make an object large; None without any such."""
    prepared = prepare_for_llguidance(lower_checked(schema, "schema")) if prepare else schema
    objects = OrderedObjects(most_optional, most_together)
    rules = ordered_object_rules(prepared, FIXED, objects=objects)
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


# Parts beside a large object, with definitions that parts share and that refer to each other.
SHARED = {
    "type": "object",
    "properties": {
        "large": {"type": "object", "properties": dict.fromkeys("abc", INTEGER)},
        "one": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        "other": {"$ref": "#/$defs/tree"},
        "name/~": {"$ref": "#/$defs/a~1~0"},
    },
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"in": {"$ref": "#/$defs/tree"}, "id": {"$ref": "#/$defs/a~1~0"}},
            "additionalProperties": False,
        },
        "a/~": {"type": "string"},
    },
}


def test_parts_that_stay_schemas_have_the_definitions_that_they_need() -> None:
    prepared = prepare_for_llguidance(lower_checked(SHARED, "schema"))
    rules = ordered_object_rules(prepared, FIXED, objects=OrderedObjects(2, 2))
    assert rules is not None
    written = [json.loads(line.partition("%json ")[2]) for line in rules.lines if "%json" in line]
    # Those of JSON schema's own words, as a dictionary that is written at once would be.
    needed = {frozenset(part["$defs"]) for part in written if "$defs" in part}
    for part in written:
        for name, definition in part.get("$defs", {}).items():
            assert definition == prepared["$defs"][name]
    assert {len(names) for names in needed} == {1, 2}


def test_rules_that_get_too_long_are_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_for_llguidance(lower_checked(SHARED, "schema"))
    assert ordered_object_rules(prepared, FIXED, objects=OrderedObjects(2, 2)) is not None
    monkeypatch.setattr(json_rules, "LONGEST", 100)
    monkeypatch.setattr(json_rules.Writer, "new_name", lambda *_: pytest.fail("went on"))
    assert ordered_object_rules(prepared, FIXED, objects=OrderedObjects(2, 2)) is None


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


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"type": "object", "patternProperties": {"^a": inner}},
        lambda inner: {"type": "object", "additionalProperties": inner},
        lambda inner: {"type": "object", "properties": {"a": inner}, "additionalProperties": False},
        lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
        lambda inner: {"anyOf": [{"type": "string"}, {"type": "array", "items": inner}]},
        lambda inner: {"type": "array", "prefixItems": [inner], "minItems": 1},
        lambda inner: {"type": "object", "patternProperties": {"^a": inner, "^b": INTEGER}},
        lambda inner: {"type": "object", "properties": {"a": inner, "b": False}},
    ],
)
def test_a_large_object_in_others(around: Any) -> None:
    """Each of these has rules of its own, though it is small."""
    schema = around(large(LARGE + 1, additionalProperties=False))
    name = f"{next(iter(large(LARGE + 1)['properties']))}"
    for order in ("schema", "any"):
        spec = GrammarSpec.json_schema(schema, key_order=order)
        grammar = AutoBackend(BYTES).compile(spec)
        for inner in ({}, {name: 1}, {name: "x"}, {"x": 1}):
            for value in ({"a": inner}, [inner], inner, {"a": inner, "b": 1}):
                text = json.dumps(value, ensure_ascii=False)
                is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
                assert not accepts(grammar, text) or is_valid
        best = {"a": {name: 1}} if "object" in str(schema.get("type")) else [{name: 1}]
        assert accepts(grammar, json.dumps(best, ensure_ascii=False))


def has_counts(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from("abcd"), unique=True),
    st.lists(st.sampled_from("abc"), max_size=2, unique=True),
    st.integers(0, 4),
    st.none() | st.integers(0, 4),
    st.sampled_from([False, INTEGER]),
    st.sampled_from([{}, {"^[xy][a-z]*$": INTEGER}, {"^[xy]$": INTEGER}]),
)
def test_keys_are_counted(  # noqa: PLR0913 - the parts of a schema
    names: list[str],
    required: list[str],
    low: int,
    high: int | None,
    extra: Any,
    patterns: dict[str, Any],
) -> None:
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, INTEGER),
        "required": required,
        "minProperties": low,
        "additionalProperties": extra,
        **({} if high is None else {"maxProperties": high}),
        **({"patternProperties": patterns} if patterns else {}),
    }
    listed = [*names, *(name for name in required if name not in names)]
    grammar = with_rules(schema, 99, 1, prepare=False)
    if grammar is None:
        return
    further = [[], ["x"], ["x", "y"], ["z", "xx", "y"], ["y", "x", "z", "w"]]
    for found in (combo for size in range(5) for combo in combinations(listed, size)):
        for more in further:
            value = dict.fromkeys([*found, *more], 1)
            admitted = accepts(grammar, json.dumps(value))
            assert not admitted or has_counts(schema, value), (schema, value)
            if extra is not False or "^[xy][a-z]*$" in patterns or not more:
                assert admitted == has_counts(schema, value), (schema, value)
    for written in (walk(grammar, seed) for seed in range(3)):
        assert not written.finished or has_counts(schema, json.loads(written.text))


COUNTED: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {"properties": dict.fromkeys("abcdefghijklmnopqrstuvwxy", INTEGER), "minProperties": 3}
        | {"maxProperties": 5, "required": ["f"], "additionalProperties": False},
        [{"a": 1, "f": 1, "y": 1}, {"f": 1, "v": 1, "w": 1, "x": 1, "y": 1}],
        [{"f": 1, "a": 1}, {"a": 1, "b": 1, "c": 1}, dict.fromkeys("abcdef", 1), {}],
    ),
    (
        {"properties": {"a": INTEGER, "b": INTEGER}, "patternProperties": {"^x": {"type": "null"}}}
        | {"minProperties": 2, "maxProperties": 3},
        [{"a": 1, "b": 1}, {"b": 1, "x": None}, {"x": None, "x1": None, "x2": None}],
        [{"a": 1}, {"x": None}, {"a": 1, "b": 1, "x": None, "x1": None}, {"x": 1, "a": 1}],
    ),
    (
        {"patternProperties": {"^[a-z]{2,}$": INTEGER}, "minProperties": 2}
        | {"propertyNames": {"pattern": "^a", "maxLength": 9}},
        [{"ab": 1, "abc": 1}, {"az": 1, "ay": 1, "ax": 1}],
        [{"ab": 1}, {}, {"ab": 1, "bb": 1}],
    ),
    (
        {"properties": dict.fromkeys("abc", INTEGER), "additionalProperties": INTEGER}
        | {"minProperties": 4, "maxProperties": 4},
        [{"a": 1, "b": 1, "c": 1, "d": 1}, dict.fromkeys("wxyz", 1)],
        [dict.fromkeys("abc", 1), dict.fromkeys("abcde", 1)],
    ),
    (
        {"anyOf": [{"type": "null"}, {"minProperties": 2, "maxProperties": 3}]}
        | {"type": ["object", "null"], "additionalProperties": INTEGER},
        [None, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}],
        [{}, {"a": 1}, dict.fromkeys("abcd", 1), {"a": 1, "b": None}],
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("schema", "valid", "invalid"), COUNTED, ids=range(len(COUNTED)))
@pytest.mark.parametrize("key_order", ["schema", "any"])
def test_counts_beside_what_else_an_object_says(
    schema: Any, valid: list[Any], invalid: list[Any], key_order: Any
) -> None:
    schema = {"type": "object", **schema}
    spec = GrammarSpec.json_schema({"type": "array", "items": schema}, key_order=key_order)
    grammar = AutoBackend(BYTES).compile(spec)
    assert all(accepts(grammar, json.dumps([value])) for value in valid)
    assert not any(accepts(grammar, json.dumps([value])) for value in invalid)
    for value in valid:
        assert not value or not accepts(grammar, f"[{twice(value, next(iter(value)))}]")
    for seed in range(4):
        written = random_text(grammar, BYTES, seed)
        assert written is None or all(has_counts(schema, one) for one in json.loads(written))


@pytest.mark.parametrize("patterns", [{}, {"^x": INTEGER}])
def test_keys_that_may_repeat_are_not_counted_in_tags(patterns: Any) -> None:
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": INTEGER}
    content = {"type": "json_schema", "json_schema": schema | {"minProperties": 3}}
    tag = {"type": "structural_tag", "format": content}
    for name in ("auto", "llguidance", "xgrammar"):
        with pytest.raises(GrammarCompileError):
            BackendChoice(name, BYTES).compile(GrammarSpec.structural_tag(tag))


@pytest.mark.parametrize("name", ["auto", "xgrammar", "llguidance"])
def test_many_counted_keys_that_are_listed(name: str) -> None:
    names = [f"k{number}" for number in range(90)]
    schema: Any = {"type": "object", "properties": dict.fromkeys(names, INTEGER)}
    schema |= {"minProperties": 2, "maxProperties": 4, "additionalProperties": False}
    grammar = BackendChoice(name, BYTES).compile(GrammarSpec.json_schema(schema))
    dice = random.Random(0)
    for size in range(7):
        for _ in range(6):
            value = {names[at]: 1 for at in sorted(dice.sample(range(90), size))}
            assert accepts(grammar, json.dumps(value)) == has_counts(schema, value)
    ends = [names[-2:], names[-3:], names[-1:], names[-5:]]
    admitted = [accepts(grammar, json.dumps(dict.fromkeys(end, 1))) for end in ends]
    assert admitted == [True, True, False, False]
    for seed in range(4):
        assert has_counts(schema, json.loads(walk(grammar, seed).text))


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
