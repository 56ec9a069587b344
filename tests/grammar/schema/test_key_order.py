"""Under ``key_order="any"`` every order of keys is admitted, and nothing else is new."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schemas.corpus import Instance, SchemaCase
from benchmarks.schemas.judge import Judge, random_text
from guided_spec.errors import ConfigError, UnsatisfiableGrammarError, UnsupportedSchemaError
from guided_spec.grammar.backends.auto import AutoBackend, BackendChoice
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.rule_endings import RuleEndings
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from tests.grammar.schema.test_lower import SCHEMAS, VALUES
from tests.masks.walks import BYTES, accepts, walk
from tests.tiers import examples

BACKENDS = ["xgrammar", "llguidance"]

INTEGER = {"type": "integer"}
NAMES = st.sampled_from(["a", "b", "ab", 'q"', "é"])
SCALARS = st.sampled_from([0, 1, 7, "a", "ab", "", True, None])
LEAVES: st.SearchStrategy[Any] = st.sampled_from(
    [
        INTEGER,
        {"type": "string"},
        {"enum": [1, "a", None]},
        {"type": ["integer", "null"]},
        {"const": {"a": 1, "b": [{"b": 2, "a": 1}]}},
        {"enum": [{"a": 1, "b": 0}, 7]},
    ]
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    closed = st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(NAMES, inner, max_size=4),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": st.just(value=False) | st.booleans() | inner,
        }
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
        },
    )
    either = st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts})
    patterns = closed.map(lambda part: {**part, "patternProperties": {"^[xy]+$": INTEGER}})
    return closed | closed | arrays | either | patterns


OBJECTS = st.recursive(LEAVES, _objects, max_leaves=6)


def instances(schema: Any) -> st.SearchStrategy[Any]:
    """Values that are often valid under ``schema``, and all kinds of others."""
    if not isinstance(schema, dict):
        return SCALARS
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([instances(part) for part in schema["anyOf"]])
    if schema.get("type") == "array":
        listed = [instances(part) for part in schema.get("prefixItems", ())]
        return st.builds(
            lambda first, rest: [*first, *rest],
            st.tuples(*listed),
            st.lists(instances(schema["items"]), max_size=2),
        )
    if schema.get("type") != "object":
        return SCALARS
    keys = {name: instances(part) for name, part in schema["properties"].items()}
    extra = instances(schema["additionalProperties"])
    needed = {name: keys.get(name, extra) for name in schema["required"]}
    optional = {name: part for name, part in keys.items() if name not in needed}
    return st.fixed_dictionaries(
        needed, optional=optional | {"z": extra, "xy": st.integers(0, 9), "aa": extra}
    )


@cache
def backend(name: str) -> GrammarBackend:
    return BackendChoice(name, BYTES)


def compiled(name: str, schema: Any, *, any_whitespace: bool = False) -> CompiledGrammar | None:
    spec = GrammarSpec.json_schema(schema, key_order="any", any_whitespace=any_whitespace)
    try:
        return backend(name).compile(spec)
    except (UnsatisfiableGrammarError, UnsupportedSchemaError):
        return None


def orders(value: Any) -> Iterator[Any]:
    """The value with its keys in other orders: in all, for those outermost."""
    dice = random.Random(0)
    if not isinstance(value, dict):
        yield from (shuffled(value, dice) for _ in range(6))
        return
    for names in itertools.islice(itertools.permutations(value), 24):
        yield {name: shuffled(value[name], dice) for name in names}


def shuffled(value: Any, dice: random.Random) -> Any:
    if isinstance(value, list):
        return [shuffled(part, dice) for part in value]
    if not isinstance(value, dict):
        return value
    return {name: shuffled(value[name], dice) for name in dice.sample(list(value), len(value))}


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def notes(grammar: Any) -> list[str]:
    return [note.reason for note in grammar.notes]


def twice(value: dict[str, Any], name: str) -> str:
    """JSON with one key written a second time, at the end."""
    text = json.dumps(value, ensure_ascii=False).removesuffix("}")
    return f"{text}, {json.dumps({name: value[name]}, ensure_ascii=False)[1:]}"


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=examples(60))
@given(st.data())
def test_every_order_of_a_valid_value_is_admitted(name: str, data: st.DataObject) -> None:
    schema = data.draw(OBJECTS)
    grammar = compiled(name, schema)
    if grammar is None:
        return
    in_order = backend(name).compile(GrammarSpec.json_schema(schema))
    for value in data.draw(st.lists(instances(schema) | SCALARS, min_size=1, max_size=2)):
        texts = [json.dumps(other, ensure_ascii=False) for other in orders(value)]
        admitted = {accepts(grammar, text) for text in texts}
        assert len(admitted) == 1 or notes(grammar), (schema, value)
        if any(accepts(in_order, text) for text in texts):
            assert True in admitted
        assert not any(admitted) or is_valid(schema, value), (schema, value)
        if isinstance(value, dict) and isinstance(schema.get("properties"), dict):
            for key in value.keys() & schema["properties"].keys():
                assert not accepts(grammar, twice(value, key)), (schema, value, key)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=examples(60))
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=6), st.integers(0, 2**32))
def test_nothing_invalid_is_admitted(name: str, schema: Any, values: list[Any], seed: int) -> None:
    """Keywords in any combination."""
    grammar = compiled(name, schema)
    if grammar is None:
        return
    in_order = backend(name).compile(GrammarSpec.json_schema(schema))
    for text in (random_text(grammar, BYTES, number) for number in range(seed, seed + 2)):
        assert text is None or is_valid(schema, json.loads(text)), (schema, text)
    for value in [*values, {"a": 1}, {"b": 1, "a": "a"}, [1, "a"]]:
        admitted = accepts(grammar, json.dumps(value))
        assert not admitted or is_valid(schema, value), (schema, value)
        assert admitted or not accepts(in_order, json.dumps(value)), (schema, value)


NODE = {
    "type": "object",
    "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/node"}, "é\n": {"type": "null"}},
    "required": ["v"],
    "additionalProperties": False,
}
SHAPES: list[tuple[Any, list[Any], list[str]]] = [
    (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        [{"v": 1, "next": {"v": 2, "é\n": None, "next": {"v": 3}}, "é\n": None}],
        [
            '{"next": {}, "v": 1}',
            '{"v": 1, "next": {"v": 2, "v": 2}}',
            "{}",
            '{"v": 1, }',
            '{"v": 1',
        ],
    ),
    (
        {"anyOf": [{**NODE, "required": ["next"]}, {"const": [{"a": 1, "b": {"c": 2, "d": 3}}]}]}
        | {"$defs": {"node": NODE}},
        [[{"a": 1, "b": {"c": 2, "d": 3}}], {"v": 1, "next": {"v": 2}}, {"next": {"v": 2}}],
        ['{"v": 1}', '[{"b": {"d": 3, "c": 2}}]', '[{"a": 1, "b": {"c": 2, "d": 3}, "a": 1}]'],
    ),
    (
        {
            "type": "array",
            "prefixItems": [NODE | {"properties": {"v": INTEGER, "w": INTEGER}}, {"type": "null"}],
            "items": False,
            "minItems": 1,
        },
        [[{"v": 1, "w": 2}], [{"v": 1, "w": 2}, None]],
        ["[]", '[{"w": 1}]', '[{"v": 1, "x": 1}]', '[{"v": 1}, null, {"v": 1}]'],
    ),
    (
        {
            "type": "array",
            "items": NODE | {"properties": {"v": INTEGER, "w": INTEGER}},
            "minItems": 2,
            "maxItems": 3,
        },
        [[{"v": 1, "w": 2}] * 2, [{"v": 1}, {"v": 1}, {"v": 1, "w": 2}]],
        ["[]", '[{"v": 1}]', '[{"v": 1}, {"v": 1}, {"v": 1}, {"v": 1}]', '[{"v": 1}, {"w": 1}]'],
    ),
    (
        NODE | {"properties": dict.fromkeys("vabc", INTEGER), "maxProperties": 3},
        [{"v": 1, "a": 2}, {"v": 1, "a": 2, "c": 3}],
        ['{"a": 1, "b": 1, "c": 1, "v": 1}', '{"a": 1, "b": 2}', '{"v": 1, "v": 1}', "{}"],
    ),
    (
        NODE | {"properties": dict.fromkeys("vabc", INTEGER), "minProperties": 3},
        [{"v": 1, "a": 2, "b": 1}, {"v": 1, "a": 2, "c": 3, "b": 1}],
        ['{"a": 1, "b": 1, "c": 1}', '{"v": 1, "a": 2}', '{"a": 1, "v": 1, "v": 1}', "{}"],
    ),
]


@pytest.mark.parametrize("any_whitespace", [False, True], ids=["fixed", "any whitespace"])
@pytest.mark.parametrize(("schema", "valid", "invalid"), SHAPES, ids=range(len(SHAPES)))
@pytest.mark.parametrize("name", BACKENDS)
def test_objects_wherever_they_stand(
    name: str, schema: Any, valid: list[Any], invalid: list[str], *, any_whitespace: bool
) -> None:
    grammar = compiled(name, schema, any_whitespace=any_whitespace)
    assert grammar is not None
    assert not notes(grammar)
    for value in valid:
        for other in orders(value):
            assert accepts(grammar, json.dumps(other, ensure_ascii=False)), other
            spaced = json.dumps(other, ensure_ascii=False, indent=1, separators=(" ,", " : "))
            assert accepts(grammar, spaced) is any_whitespace
    assert not [text for text in invalid if accepts(grammar, text)]
    style = grammar.new_style_matcher()
    assert (style is not None) is any_whitespace


def test_further_keys_stand_anywhere() -> None:
    pytest.importorskip("llguidance")
    schema = {
        "properties": {"a": INTEGER, "xa": INTEGER},
        "patternProperties": {"^x": {"minimum": 5}},
        "additionalProperties": {"type": "boolean"},
        "required": ["a"],
    }
    grammar = compiled("llguidance", schema)
    assert grammar is not None
    value = {"a": 1, "xa": 7, "xb": 8, "c": True}
    assert all(accepts(grammar, json.dumps(other)) for other in orders(value))
    for wrong in ({**value, "xa": 3}, {**value, "xb": 3}, {**value, "c": 0}, {"xa": 7}):
        assert not any(accepts(grammar, json.dumps(other)) for other in orders(wrong))
    assert accepts(grammar, '"no object"')
    assert not accepts(grammar, twice(value, "a"))
    assert not accepts(grammar, '{"a": 1, "\\u0061": true}')


def test_one_key_is_asked_for() -> None:
    pytest.importorskip("llguidance")
    schema = {"allOf": [{"minProperties": 1}, {**closed(3), "required": []}]}
    grammar = compiled("llguidance", schema)
    assert grammar is not None
    assert not notes(grammar)
    assert not accepts(grammar, "{}")
    for value in ({"k2": 1}, {"k0": 1, "k2": 2}):
        assert all(accepts(grammar, json.dumps(other)) for other in orders(value))


def closed(num_keys: int) -> dict[str, Any]:
    names = [f"k{number}" for number in range(num_keys)]
    keys = dict.fromkeys(names, INTEGER)
    shape = {"type": "object", "additionalProperties": False}
    return {**shape, "properties": keys, "required": names[:2]}


@pytest.mark.parametrize(("name", "most"), [("xgrammar", 8), ("llguidance", 63)])
def test_objects_of_many_keys_stay_in_order(name: str, most: int) -> None:
    if name not in BACKENDS:
        pytest.skip("llguidance is not installed")
    for num_keys, reasons in ((most, []), (most + 1, [f"an object lists more than {most} keys"])):
        grammar = compiled(name, closed(num_keys))
        assert grammar is not None
        assert notes(grammar) == reasons
        value = dict.fromkeys(closed(num_keys)["properties"], 1)
        assert accepts(grammar, json.dumps(value))
        matcher = grammar.new_matcher()  # behind the last key nothing but the brace: no dead end
        assert all(map(matcher.accept_token, json.dumps(value).removesuffix("}").encode()))
        assert not matcher.accept_token(ord(","))
        back = json.dumps(dict.fromkeys(reversed(value), 1))
        assert accepts(grammar, back) is (not reasons)


def test_auto_takes_the_backend_that_frees_the_keys() -> None:
    pytest.importorskip("llguidance")
    auto = AutoBackend(BYTES)
    few, many, is_open = closed(8), closed(9), {"properties": {"a": INTEGER, "b": INTEGER}}
    for schema, name in ((few, "xgrammar"), (many, "llguidance"), (is_open, "llguidance")):
        grammar = auto.compile(GrammarSpec.json_schema(schema, key_order="any"))
        assert grammar.backend == name
        assert not grammar.notes


def test_the_benchmark_judges_values_in_their_own_order() -> None:
    value = {"k1": 1, "k2": 2, "k0": 3}
    instances = (Instance(value, valid=True), Instance({"k1": 1}, valid=False))
    case = SchemaCase("x", "y", closed(3), instances)

    def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}

    judge = Judge(backend("xgrammar"), tokenizer, 2, {})
    assert judge.judge(case).out_of_order == (0,)
    verdict = judge._replace(settings={"key_order": "any"}).judge(case)
    assert verdict.is_right
    assert verdict.texts


def test_texts_end_in_time_by_the_rules() -> None:
    grammar = compiled("xgrammar", closed(6))
    assert grammar is not None
    cache = EndingsCache(BYTES)
    endings = cache.of(grammar)
    assert isinstance(endings, RuleEndings)
    least = endings.cost(endings.start)
    assert least == len('{"k0": 0, "k1": 0}') + 1
    for budget in (least, least + 9, least + 40):
        for seed in range(4):
            text = walk(cache.bound(grammar, budget, is_required=True), seed, wander=budget)
            assert text.finished
            assert len(text.data) < budget
            assert is_valid(closed(6), json.loads(text.data))


def test_the_order_is_part_of_a_spec() -> None:
    free = GrammarSpec.json_schema(NODE, key_order="any")
    assert free != GrammarSpec.json_schema(NODE)
    assert hash(free) != hash(GrammarSpec.json_schema(NODE))
    with pytest.raises(ConfigError, match="key_order"):
        GrammarSpec.json_schema(NODE, key_order="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only json_schema"):
        replace(GrammarSpec.regex("a"), key_order="any")


def test_one_key_of_a_pattern_is_asked_for() -> None:
    pytest.importorskip("llguidance")
    keys = {"patternProperties": {"^x": closed(3)}, "additionalProperties": False}
    grammar = compiled("llguidance", {"type": "object", "minProperties": 1, **keys})
    assert grammar is not None
    assert not notes(grammar)
    assert not accepts(grammar, "{}")
    assert accepts(grammar, '{"xy": {"k2": 1, "k1": 2, "k0": 3}, "x": {"k1": 1, "k0": 2}}')
