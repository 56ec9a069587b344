"""No array of unique items holds two equal ones; every other text of the grammar is admitted."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.guarded import check_grammar_backend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.document import DocumentCompiler
from guided_spec.grammar.protocol import CompiledGrammar, legal_row
from guided_spec.grammar.recipe import ItemRule, RecipeGrammar
from guided_spec.grammar.schema.joining import canonical
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.item_state import START, ItemState, advance
from guided_spec.grammar.text.markers import AfterGrammar, Marker
from guided_spec.grammar.text.state import new_text
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import bits_of, ids_of
from tests.grammar.text.test_unique_keys import (
    BACKENDS,
    EOS,
    VOCABULARY,
    backend,
    check_row,
    choose,
    decode,
    legal,
)
from tests.masks.walks import BYTES, accepts, walk
from tests.masks.walks import EOS as END
from tests.tiers import examples

ANY: dict[str, Any] = {}
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
WORDS = ["a", "ab", "b", "x", "x1", "US"]


def unique(items: Any = ANY, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


def an_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {"properties": properties, "additionalProperties": False}
    return {"type": "object", **closed, "required": [*properties], **more}


PAIR = an_object({"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, required=["a"])
SCHEMAS: dict[str, Any] = {
    "any": unique(),
    "strings": unique(STRING),
    "listed": unique({"enum": WORDS}, minItems=3),
    "pattern": unique({"type": "string", "pattern": "^[ab]{1,2}$"}),
    "begun": unique({"type": "string", "pattern": "^(ab|a[xy]z|b)$"}),
    "short": unique({"type": "string", "maxLength": 1}),
    "integers": unique({"type": "integer", "minimum": 0, "maximum": 11}, minItems=2),
    "numbers": unique(NUMBER, minItems=3),
    "bounded": unique({"type": "number", "minimum": 0, "maximum": 1}, minItems=2),
    "above": unique({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "mixed": unique({"type": ["boolean", "null", "integer"]}),
    "pairs": unique(PAIR),
    "named": unique(an_object({"name": STRING, "level": {"enum": [1, 2]}}), minItems=2),
    "maps": unique({"type": "object", "additionalProperties": {"type": "boolean"}}),
    "few maps": unique(
        {
            "type": "object",
            "patternProperties": {"^[ab]$": {"type": "boolean"}},
            "additionalProperties": False,
        }
    ),
    "inner": unique(unique({"enum": [*"abcde"]}, minItems=1)),
    "arrays": unique({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}),
    "tuple": {
        "type": "array",
        "prefixItems": [{"enum": ["a", "b"]}, {"enum": ["x", "b", "c"]}, INTEGER],
        "items": False,
        "uniqueItems": True,
    },
    "placed": an_object({"u": unique({"enum": WORDS}), "v": {"type": "array", "items": INTEGER}}),
    "below": {
        "type": "object",
        "patternProperties": {"^[ab]$": unique(INTEGER)},
        "additionalProperties": False,
    },
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": an_object(
                {"k": {"type": "boolean"}, "c": unique({"$ref": "#/$defs/node"})}, required=["k"]
            )
        },
    },
}


def compiled(name: str, schema: Any, **options: Any) -> CompiledGrammar:
    try:
        return backend(name).compile(GrammarSpec.json_schema(schema, **options))
    except UnsupportedSchemaError as error:
        if "uniqueItems" in str(error):
            raise
        pytest.skip("the backend refuses the schema")


def random_texts(
    grammar: CompiledGrammar, seed: int | str, count: int, most: int = 60, checked: int = 2
) -> Iterator[str]:
    """Whole texts of random walks; all rows of the first ones are checked.

    llguidance's own row may hold a token that it refuses, once others were taken back.
    """
    dice = random.Random(seed)
    for at in range(count):
        matcher, text = new_text(grammar), list[int]()
        while not matcher.is_terminated() and len(text) < most:
            options = check_row(matcher) if at < checked else legal(matcher)
            assert options, decode(text)
            text.append(choose(options, dice))
            if not matcher.accept_token(text[-1]):
                inner = grammar.inner if isinstance(grammar, UniqueKeysGrammar) else grammar
                assert not all(map(new_text(inner).accept_token, text)), decode(text)
                text.pop()
                continue
            if dice.random() < 0.1:
                fork, back = matcher.fork(), dice.randrange(len(text)) + 1
                fork.rollback(back)
                assert all(map(fork.accept_token, text[-back:]))
                is_compared = at < checked and not matcher.is_terminated()
                assert not is_compared or legal(fork) == legal(matcher)
                matcher = fork
        if matcher.is_terminated():
            yield decode(text)


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_text_is_valid_and_none_is_stuck(name: str, schema: str, order: str) -> None:
    grammar = compiled(name, SCHEMAS[schema], key_order=order)
    validator = jsonschema.Draft202012Validator(SCHEMAS[schema])
    assert isinstance(grammar, UniqueKeysGrammar)
    for text in random_texts(grammar, f"{name} {schema}", 12):
        assert validator.is_valid(json.loads(text)), text


SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 10, 0.5, 1.0, "", "a", "ab", "b"])
ITEMS = st.recursive(
    st.one_of(
        st.lists(SCALARS, min_size=1, max_size=6, unique_by=repr).map(lambda v: {"enum": v}),
        st.sampled_from([True, STRING, INTEGER, NUMBER, {"type": ["boolean", "null"]}]),
        st.sampled_from(["^[ab]{1,2}$", "^a*$", "^(a|ab|abb)$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}
        ),
        st.tuples(st.integers(-2, 2), st.integers(0, 12)).map(
            lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
        ),
    ),
    lambda inner: (
        st.builds(unique, inner, minItems=st.integers(0, 2), maxItems=st.integers(2, 4))
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(an_object)
        | st.lists(inner, min_size=2, max_size=2).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("name", BACKENDS)
@given(items=ITEMS, low=st.integers(0, 3), seed=st.integers(0, 2**32))
@settings(max_examples=examples(200))
def test_drawn_schemas(name: str, items: Any, low: int, seed: int) -> None:
    schema = unique(items, minItems=low)
    try:
        grammar = backend(name).compile(GrammarSpec.json_schema(schema))
    except GrammarCompileError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for text in random_texts(grammar, seed, 3, 40, checked=2 * (name == "xgrammar")):
        assert validator.is_valid(json.loads(text)), text


FINITE: dict[str, tuple[Any, list[Any]]] = {
    "words": ({"enum": [*WORDS[:5]]}, WORDS[:5]),
    "mixed": ({"enum": [1, True, "1", None, 0]}, [1, True, "1", None, 0]),
    "pattern": ({"type": "string", "pattern": "^[ab]{1,2}$"}, ["a", "b", "aa", "ab", "ba", "bb"]),
    "integers": ({"type": "integer", "minimum": 8, "maximum": 12}, [8, 9, 10, 11, 12]),
    "pairs": (
        PAIR,
        [{"a": a, **more} for a in (1, 2) for more in ({}, {"b": True}, {"b": False})],
    ),
    "inner": (
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        [[], [1], [2], [1, 1], [1, 2], [2, 1], [2, 2]],
    ),
}


@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("name", BACKENDS)
def test_admitted_is_what_is_valid(name: str, kind: str) -> None:
    items, values = FINITE[kind]
    grammar = compiled(name, unique(items, minItems=1, maxItems=3))
    valid = {
        json.dumps([*chosen])
        for size in (1, 2, 3)
        for chosen in itertools.permutations(values, size)
    }
    found = set(every_text(grammar.new_matcher()))
    assert found == valid


def every_text(matcher: Any) -> Iterator[str]:
    """All texts of single bytes."""
    text: list[int] = []

    def visit() -> Iterator[str]:
        tokens = legal(matcher)
        assert tokens, decode(text)
        for token in tokens:
            if token == EOS:
                yield decode(text)
            elif token < 256:
                assert matcher.accept_token(token)
                text.append(token)
                yield from visit()
                text.pop()
                matcher.rollback(1)

    yield from visit()


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("[1, 1.0]", False),
        ("[1, 1e0]", False),
        ("[10, 1E1]", False),
        ("[0, -0]", False),
        ("[0.1, 0.10]", False),
        ("[0.3, 0.29999999999999998]", False),
        ("[1, 11]", True),
        ("[1, true, 0, false, null]", True),
        ('["1", 1, "true", true]', True),
        ('["a", "b", "a"]', False),
        ('["a", "A"]', True),
        ("[[1], [1.0]]", False),
        ("[[1, 2], [2, 1]]", True),
        ("[[], {}]", True),
        ("[{}, {}]", False),
        ('[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', False),
        ('[{"a": 1, "b": 2}, {"b": 1, "a": 2}]', True),
        ('[{"a": [true]}, {"a": [1]}]', True),
        ('[{"a": 1}, {"a": 1, "b": 1}]', True),
    ],
)
def test_equal_is_what_json_schema_calls_so(text: str, is_taken: bool) -> None:  # noqa: FBT001
    assert jsonschema.Draft202012Validator(unique()).is_valid(json.loads(text)) is is_taken
    for name in BACKENDS:
        grammar = compiled(name, unique())
        assert all(map(grammar.inner.new_matcher().accept_token, text.encode()))  # type: ignore[attr-defined]
        matcher = grammar.new_matcher()
        assert all(map(matcher.accept_token, [*text.encode(), EOS])) is is_taken


VALUES = st.recursive(
    SCALARS | st.sampled_from([10**17, 1e17, -1, "é", "\ud83d", "😀", '"\\']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\n", max_size=1), inner),
    max_leaves=8,
)
EVERYWHERE = (ItemRule(), ItemRule(is_unique=True, other=1, items=1))


@given(VALUES, st.integers(0, 2**32))
def test_equal_items_are_found_however_they_are_spelled(value: Any, seed: int) -> None:
    dice = random.Random(seed)

    def spell(part: Any) -> str:
        match part:
            case bool() | None:
                return json.dumps(part)
            case str():
                return json.dumps(part, ensure_ascii=dice.random() < 0.5 or not is_whole(part))
            case int() if abs(part) < 1000:
                return dice.choice([str(part), f"{part}.0", f"{part}e0", f"{part}0E-1"])
            case list():
                return f"[{', '.join(map(spell, part))}]"
            case dict():
                pairs = [f"{spell(key)}:{spell(inner)}" for key, inner in part.items()]
                dice.shuffle(pairs)
                return f"{{{','.join(pairs)}}}"
        return json.dumps(part)

    text = spell(value)
    whole = advance(EVERYWHERE, START, text.encode("utf-8"))
    assert (whole is None) is repeats(value)
    now: ItemState | None = START
    for byte in text.encode("utf-8"):
        now = None if now is None else advance(EVERYWHERE, now, bytes([byte]))
    assert now == whole


def is_whole(text: str) -> bool:
    return text.isprintable() and not any("\ud800" <= char <= "\udfff" for char in text)


def repeats(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(repeats, value.values()))
    if not isinstance(value, list):
        return False
    is_unique = jsonschema.Draft202012Validator({"uniqueItems": True}).is_valid(value)
    return not is_unique or any(map(repeats, value))


@pytest.mark.parametrize("name", BACKENDS)
def test_after_the_last_value_no_comma_follows(name: str) -> None:
    matcher = compiled(name, unique({"enum": [*WORDS[:5]]})).new_matcher()
    assert all(map(matcher.accept_token, b'["x", "a", "ab"'))
    assert matcher.accept_token(ord(","))
    assert all(map(matcher.accept_token, b' "x'))
    assert {VOCABULARY.token_bytes[token][:1] for token in legal(matcher)} == {b"1"}
    assert all(map(matcher.accept_token, b'1", "b"'))
    assert {VOCABULARY.token_bytes[token] for token in legal(matcher)} == {b"]"}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_digit_that_leaves_no_number_is_not_begun_with(name: str) -> None:
    matcher = compiled(name, SCHEMAS["integers"]).new_matcher()
    assert all(map(matcher.accept_token, b"[1, 10, 11, 3, "))
    assert not matcher.accept_token(ord("1"))
    assert matcher.accept_token(ord("0"))


@pytest.mark.parametrize("schema", ["strings", "listed", "integers", "numbers", "named", "inner"])
@pytest.mark.parametrize("name", BACKENDS)
def test_texts_end_within_a_budget(name: str, schema: str) -> None:
    grammar, endings = compiled(name, SCHEMAS[schema]), EndingsCache(VOCABULARY)
    validator = jsonschema.Draft202012Validator(SCHEMAS[schema])
    least = endings.of(grammar).cost(endings.of(grammar).start)
    for seed in range(4):
        dice = random.Random(seed)
        budget = least + dice.randrange(24)
        matcher, text = endings.bound(grammar, budget, is_required=True).new_matcher(), list[int]()
        while not matcher.is_terminated():
            options = legal(matcher)
            assert options, decode(text)
            text.append(dice.choice([token for token in options if token != EOS] or options))
            assert matcher.accept_token(text[-1])
        assert len(text) <= budget
        assert validator.is_valid(json.loads(decode(text))), decode(text)


@pytest.mark.parametrize("schema", ["any", "listed", "pairs", "placed"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_protocol_is_kept(name: str, schema: str) -> None:
    spec = GrammarSpec.json_schema(SCHEMAS[schema], any_whitespace=True)
    texts = check_grammar_backend(backend(name), spec, num_texts=4, max_tokens=40)
    assert all(
        map(jsonschema.Draft202012Validator(SCHEMAS[schema]).is_valid, map(json.loads, texts))
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_recipe_tells_what_is_unique(name: str) -> None:
    grammar, own = compiled(name, SCHEMAS["placed"]), backend(name)
    assert isinstance(grammar, RecipeGrammar)
    assert isinstance(own, DocumentCompiler)
    recipe = pickle.loads(pickle.dumps(grammar.recipe()))
    again = own.rebuild(GrammarSpec.json_schema(SCHEMAS["placed"]), recipe)
    assert isinstance(again, UniqueKeysGrammar)
    assert again.items == lower(SCHEMAS["placed"], additional="closed").items
    assert accepts_all(again, '{"u": ["a", "b"], "v": [1, 1]}')
    assert not accepts_all(again, '{"u": ["a", "a"')


def accepts_all(grammar: CompiledGrammar, text: str) -> bool:
    return all(map(grammar.new_matcher().accept_token, text.encode()))


@pytest.mark.parametrize("name", BACKENDS)
def test_only_arrays_that_ask_for_it_have_unique_items(name: str) -> None:
    grammar = compiled(name, SCHEMAS["placed"])
    assert accepts_all(grammar, '{"u": ["a", "b"], "v": [1, 1]}')
    assert not accepts_all(grammar, '{"u": ["a", "a"')
    grammar = compiled(name, SCHEMAS["recursive"])
    leaf = '{"k": true, "c": []}'
    assert accepts_all(grammar, f'{{"k": true, "c": [{leaf}, {{"k": true, "c": [{leaf}]}}]}}')
    assert not accepts_all(grammar, f'{{"k": true, "c": [{leaf}, {leaf}')
    assert not accepts_all(grammar, f'{{"k": true, "c": [{{"k": true, "c": [{leaf}, {leaf}')


@pytest.mark.parametrize("name", BACKENDS)
def test_where_nothing_is_open_nothing_is_filtered(name: str) -> None:
    spec = GrammarSpec.json_schema(an_object({"s": STRING, "u": unique(STRING), "t": STRING}))
    matcher = new_text(BackendChoice(name, BYTES).compile(spec))
    was_restricted = []
    text = b'{"s": "some text", "u": ["a"], "t": "more"}'
    for byte in text:
        assert matcher.accept_token(byte)
        was_restricted.append(matcher.is_restricted)
    inside = text.index(b"["), text.index(b"]")
    assert all(was_restricted[slice(*inside)])
    assert not any(was_restricted[text.index(b"some") : text.index(b"some") + 9])
    assert not any(was_restricted[text.index(b"more") :])


def test_one_token_may_hold_two_items() -> None:
    tokens = VOCABULARY.key_tokens
    assert [VOCABULARY.token_bytes[token] for token in tokens.nested] == [b'[{"a": 1}, {"a": 1']
    extra = (b"[1,1", b"[[],[]", b"[],", b"[1],2,[3]", b'["]",')
    vocabulary = Vocabulary((*BYTES.token_bytes[:256], *extra, b""), (261,), 262)
    assert vocabulary.key_tokens.nested.tolist() == [256, 257, 260]
    schema = an_object({"u": unique({"type": ["array", "integer"]})})
    for name in BACKENDS:
        matcher = BackendChoice(name, vocabulary).compile(GrammarSpec.json_schema(schema))
        text = new_text(matcher)
        assert all(map(text.accept_token, b'{"u": '))
        row = legal_row(text, 262)
        assert bits_of(row, np.array([91, 256, 257])).tolist() == [True, False, False]
        assert not text.accept_token(256)


def test_after_a_marker() -> None:
    inner = compiled("xgrammar", SCHEMAS["listed"])
    grammar = AfterGrammar(inner, Marker(tuple(b"::"), VOCABULARY, list))
    matcher = grammar.new_matcher()
    assert all(map(matcher.accept_token, b'["a","a"]::["a", "a'))
    assert not matcher.accept_token(ord('"'))
    assert matcher.accept_token(ord("b"))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (unique({"anyOf": [{"const": "a"}, {"$ref": "#/$defs/n"}]}, minItems=3), "item 3 may have"),
        (
            {**unique(minItems=2), "prefixItems": [{"enum": ["a", "b"]}, {"const": "a"}]},
            "item 2 may have no value left",
        ),
        ({"anyOf": [unique(INTEGER), {"enum": [[1, 1]]}]}, "has equal items"),
        (unique({"type": "number", "minimum": 1e-30}), "too many digits"),
        (unique({"enum": [1, 2, 3, 4, 1.23456789012345]}), "too many digits"),
        (
            {"allOf": [{"$ref": "#/$defs/m"}, {"multipleOf": 2}, {"multipleOf": 3}]},
            "joined schemas",
        ),
        (
            {"allOf": [{"$ref": "#/$defs/m"}, {"items": {"enum": ["a", 1]}, "minItems": 3}]},
            "item 2 may have no value left",
        ),
    ],
    ids=str,
)
def test_what_may_come_to_a_dead_end_is_refused(schema: Any, reason: str) -> None:
    definitions = {"n": {"type": "boolean", "title": "x"}, "m": unique(STRING, minItems=2)}
    definitions["n"] = {"const": "b"}
    found = lower({**schema, "$defs": definitions})
    assert [entry.keyword for entry in found.errors] == ["uniqueItems"]
    assert reason in found.errors[0].reason


LISTED = {"enum": ["a", "b", "c"]}
JOINED: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {"allOf": [{"$ref": "#/$defs/m"}, {"items": LISTED, "maxItems": 3}]},
        [["a", "b"], ["c", "b", "a"]],
        [["a"], ["a", "a"], ["a", "d"], ["a", "b", "c", "a"]],
    ),
    (
        {"$ref": "#/$defs/m", "items": {"minLength": 2}},
        [["aa", "bb"], ["aa", "bb", "cc"]],
        [["aa", "aa"], ["aa", "b"], ["aa"]],
    ),
    (
        {
            "type": "array",
            "uniqueItems": True,
            "anyOf": [
                {"items": LISTED, "minItems": 2},
                {"prefixItems": [{"const": 1}, INTEGER], "minItems": 2, "items": False},
            ],
        },
        [["a", "b"], [1, 2], [1, 0]],
        [["a", "a"], [1, 1], [1], ["a"], [1, 2, 3]],
    ),
    (
        {
            "allOf": [
                {"type": "array", "prefixItems": [STRING, LISTED], "uniqueItems": True},
                {"prefixItems": [LISTED], "items": STRING, "minItems": 3},
            ]
        },
        [["a", "b", "x"], ["b", "a", "x", "y"]],
        [["a", "a", "x"], ["a", "b", "a"], ["x", "a", "y"], ["a", "b"]],
    ),
    (
        {
            "allOf": [
                {"anyOf": [{"type": "string"}, {"type": "array", "items": LISTED}]},
                {"anyOf": [{"$ref": "#/$defs/m"}, {"type": "null"}]},
            ]
        },
        [["a", "b"]],
        [["a", "a"], "a", None, ["a", "d"]],
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("schema", "valid", "invalid"), JOINED, ids=range(len(JOINED)))
def test_the_items_of_joined_arrays_are_unique(
    schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    schema = {**schema, "$defs": {"m": unique(STRING, minItems=2)}}
    grammar = BackendChoice("auto", BYTES).compile(GrammarSpec.json_schema(schema))
    assert all(accepts(grammar, json.dumps(value)) for value in valid)
    assert not any(accepts(grammar, json.dumps(value)) for value in invalid)
    for seed in range(6):
        written = walk(grammar, seed)
        if written.finished:
            jsonschema.validate(json.loads(written.text), schema)


def test_alternatives_of_one_place_share_what_one_asks_for() -> None:
    schema = {"anyOf": [unique(INTEGER), {"type": "array", "items": STRING}]}
    (note,) = lower(schema).entries
    assert (note.level, note.keyword, note.pointer) == ("note", "uniqueItems", "/anyOf/0")
    grammar = compiled("xgrammar", schema)
    assert not accepts_all(grammar, '["a", "a"')
    assert not lower({"anyOf": [unique(INTEGER), STRING]}).entries


@pytest.mark.parametrize("name", BACKENDS)
def test_a_branch_that_has_run_out_is_not_free_for_another_one_s_sake(name: str) -> None:
    branches = [unique(STRING, minItems=1), {"type": "array", "items": {"enum": [True]}}]
    matcher = compiled(name, {"anyOf": branches}).new_matcher()
    assert all(map(matcher.accept_token, b"[true"))
    assert {VOCABULARY.token_bytes[token] for token in legal(matcher)} == {b"]"}


def test_too_few_values_leave_no_array() -> None:
    with pytest.raises(GrammarCompileError, match="no value"):
        compiled("auto", unique({"enum": WORDS}, minItems=7))
    matcher = compiled("auto", unique({"enum": WORDS}, minItems=6)).new_matcher()
    assert all(map(matcher.accept_token, b'["US", "x1", "x", "b", "ab", "a'))
    assert {VOCABULARY.token_bytes[token][:1] for token in legal(matcher)} == {b'"'}


@pytest.mark.parametrize("unsupported", ["error", "rewrite"])
def test_tags_have_no_filter(unsupported: Any) -> None:
    content = {"type": "json_schema", "json_schema": unique(STRING)}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": tag})
    spec = replace(spec, unsupported=unsupported)
    if unsupported == "error":
        with pytest.raises(UnsupportedSchemaError, match="uniqueItems"):
            backend("xgrammar").compile(spec)
        return
    grammar = backend("xgrammar").compile(spec)
    assert accepts_all(grammar, '<a>["a"]</a>')
    assert not accepts_all(grammar, '<a>["a",')


def test_values_are_compared_as_json_does() -> None:
    assert canonical([1, {"a": True}]) == canonical([1.0, {"a": True}])
    assert canonical([True]) != canonical([1])
    assert canonical(["true"]) != canonical([True])


@pytest.mark.parametrize(
    "items",
    [
        {"enum": [None, {"b": None}]},
        {"enum": [0, {"a": 0}, 1.0, [2, {"c": [3]}]]},
        {"anyOf": [{"const": {"b": ""}}, {"type": "boolean"}]},
        {"const": []},
        {"type": "array", "items": {"type": "string"}, "maxItems": 0},
        {"anyOf": [{"const": [[1], {"d": 2}]}, {"const": [[1], {"d": 3}]}, {"const": []}]},
    ],
)
@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_listed_values_with_parts_run_out(name: str, items: Any) -> None:
    """What is inside of a listed value is listed too, and an array may have to stay empty."""
    schema = {"type": "array", "items": items, "uniqueItems": True}
    grammar = BackendChoice(name, BYTES).compile(GrammarSpec.json_schema(schema))
    for seed in range(30):
        dice, text, written = random.Random(seed), grammar.new_matcher(), bytearray()
        while True:
            found = ids_of(legal_row(text, BYTES.vocab_size))
            assert found, written
            # To the most items there can be: an end only where nothing else may follow.
            token_id = dice.choice([one for one in found if one not in (END, ord("]"))] or found)
            assert text.accept_token(token_id)
            if token_id == END:
                break
            written.append(token_id)
        jsonschema.validate(json.loads(written), schema)


@pytest.mark.parametrize(
    ("items", "is_taken"),
    [
        (
            {
                "type": ["string", "object"],
                "anyOf": [{"enum": ["a", "b", {}]}, {"minProperties": 1}],
            },
            True,
        ),
        ({"allOf": [{"$ref": "#/$defs/short"}, {"type": "string"}]}, True),
        ({"allOf": [{"$ref": "#/$defs/short"}, {"enum": ["a"]}]}, False),
    ],
)
def test_values_of_joined_items_are_counted(items: Any, *, is_taken: bool) -> None:
    """Two different items are asked for: are there two that the item's schema surely has?"""
    schema = {
        "type": "array",
        "items": items,
        "minItems": 2,
        "uniqueItems": True,
        "$defs": {"short": {"type": ["string", "null"], "maxLength": 1}},
    }
    errors = [one for one in lower(schema).entries if one.level == "error"]
    assert (errors == []) == is_taken, errors
