from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    GrammarStateError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.llguidance_schema import prepare_for_llguidance
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.protocol import GrammarMatcher, legal_row
from guided_spec.grammar.schema.lowered import Lowered
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import probe
from guided_spec.grammar.vocabulary import Vocabulary
from tests.masks.walks import BYTES, accepts, walk
from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer

BACKEND = LLGuidanceBackend(BYTES)
INTEGER = {"type": "integer"}
STRING = {"type": "string"}
SCHEMAS: tuple[Any, ...] = (
    True,
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "required": ["a"]},
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "x"]},
    {
        "properties": {"a": INTEGER},
        "patternProperties": {"^a": {"minimum": 3}, "^b.*$": STRING},
        "type": "object",
    },
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "minProperties": 1},
    {"type": "string", "pattern": r"^\D$"},
    {"type": "string", "pattern": r"\W\S"},
    {"type": "string", "pattern": "a", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": '^"\\\\$'},
    {"allOf": [INTEGER, {"minimum": 3}, {"maximum": 90}, {"multipleOf": 2}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}},
            {"type": "object", "properties": {"a": {"minimum": 3}}, "required": ["a"]},
        ]
    },
    {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INTEGER}},
    {"type": "number", "multipleOf": 0.5, "minimum": 0},
    {"type": "number", "exclusiveMinimum": 0.1, "maximum": 2},
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
    {"type": "array", "prefixItems": [INTEGER], "additionalItems": False},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    {
        "anyOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}],
        "type": "object",
        "properties": {"c": STRING},
    },
    {"enum": ["a", 1, None, {"a": [1, 2]}, "é"]},
    {"type": ["string", "null"], "maxLength": 2},
    {"oneOf": [INTEGER, STRING]},
    {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    {"minimum": 5},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER, STRING],
        "additionalItems": False,
    },
)
PATTERNS = (
    *(
        "a.c",
        "",
        r"\d{3}-\d{4}",
        "a|bc*",
        r"[^\W\d]+",
        r"\S{1,5}@\S{1,5}",
        "^x$",
        "é+",
        r"[\]\-^a]+",
    ),
    *("a/b", "(?:a|b){2,5}", r"\w+(?: \w+)*", "(ab)?c??d+?"),
)
LARK = 'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"\n%ignore / +/'
OBJECT = {
    "type": "object",
    "properties": {"name": STRING, "age": INTEGER, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
}
SPECS = (
    GrammarSpec.json_schema(OBJECT),
    GrammarSpec.json_object(any_whitespace=True),
    GrammarSpec.regex(r"(?:the (?:cat|dog) is [a-z]+, ?)+"),
    GrammarSpec.choice(["name", "names", "kind of", "Ada"]),
    GrammarSpec.lark(LARK),
)
SECOND_STOP = 390  # padding to the tokenizer


def merges() -> Vocabulary:
    """Tokens of many bytes, an added token that is not special, padding, two stop tokens."""
    tokenizer = tiny_tokenizer()
    return Vocabulary.from_tokenizer(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id, SECOND_STOP])


MERGES = LLGuidanceBackend(merges())


def admitted(matcher: GrammarMatcher) -> frozenset[int]:
    """The tokens of the mask row, filled between two rows that stay as they are."""
    bitmask = torch.full((3, -(-VOCAB_SIZE // 32)), -1, dtype=torch.int32)
    assert matcher.fill_next_token_bitmask(bitmask, 1)
    assert (bitmask[::2] == -1).all()
    bits = np.unpackbits(bitmask[1].numpy().view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return frozenset(np.flatnonzero(bits).tolist())


def stroll(matcher: GrammarMatcher, dice: random.Random, steps: int) -> list[int]:
    """Accept legal tokens at random; returns them."""
    token_ids: list[int] = []
    while len(token_ids) < steps and not matcher.is_terminated():
        token_ids.append(dice.choice(sorted(admitted(matcher))))
        assert matcher.accept_token(token_ids[-1])
    return token_ids


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
@pytest.mark.parametrize("any_whitespace", [False, True])
def test_every_finished_json_is_valid(schema: Any, any_whitespace: bool) -> None:  # noqa: FBT001
    spec = GrammarSpec.json_schema(schema, any_whitespace=any_whitespace)
    grammar = BACKEND.compile(spec)
    draft = jsonschema.Draft202012Validator
    validator = jsonschema.validators.validator_for(schema, default=draft)(schema)
    walks = [walk(grammar, seed) for seed in range(8)]
    finished = [json.loads(w.data) for w in walks if w.finished]
    assert finished or "pattern" in schema
    for value in finished:
        validator.validate(value)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_finished_text_matches_its_regex(pattern: str) -> None:
    grammar = BACKEND.compile(GrammarSpec.regex(pattern))
    texts = [w.text for w in (walk(grammar, seed) for seed in range(8)) if w.finished]
    assert texts
    assert all(re.fullmatch(pattern, text) for text in texts)


@pytest.mark.parametrize(
    ("spec", "text", "other"),
    [
        (GrammarSpec.json_schema(OBJECT), '{"name": "", "age": 1, "kind": "cat"}', "{}"),
        (GrammarSpec.json_schema(INTEGER, any_whitespace=True), "12", '"1"'),
        (GrammarSpec.json_schema("true"), "[1, 2]", "[1,2]"),
        (GrammarSpec.json_schema("true", any_whitespace=True), "[1 ,\n2]", "[1;2]"),
        (GrammarSpec.json_object(), '{"a": {"b": []}}', "[]"),
        (GrammarSpec.json_object(any_whitespace=True), '{"a":1}', "1"),
        (GrammarSpec.regex(""), "", "a"),
        (GrammarSpec.lark('start: "a" "b"+'), "abb", "a"),
        (GrammarSpec.json_schema({"pattern": "b", "type": "string"}), '"abc"', '"ac"'),
    ],
)
def test_each_kind(spec: GrammarSpec, text: str, other: str) -> None:
    grammar = BACKEND.compile(spec)
    assert grammar.backend == "llguidance"
    assert accepts(grammar, text)
    assert not accepts(grammar, other)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@given(seed=st.integers(0, 2**32))
def test_the_mask_is_what_is_accepted_and_a_refusal_changes_nothing(
    spec: GrammarSpec, seed: int
) -> None:
    grammar = MERGES.compile(spec)
    dice = random.Random(seed)
    matcher = grammar.new_matcher()
    stroll(matcher, dice, dice.randrange(20))
    if matcher.is_terminated():
        assert not any(matcher.accept_token(token) for token in range(VOCAB_SIZE))
        return
    legal = admitted(matcher)
    assert legal
    assert not legal & grammar.excluded
    for token in (*range(-2, VOCAB_SIZE + 2), 2**32 + min(legal)):
        one = matcher.fork() if token in legal else matcher
        assert one.accept_token(token) == (token in legal)
    assert admitted(matcher) == legal


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@given(seed=st.integers(0, 2**32))
def test_forks_are_independent_and_rollback_goes_back(spec: GrammarSpec, seed: int) -> None:
    grammar = MERGES.compile(spec)
    dice = random.Random(seed)
    matcher = grammar.new_matcher()
    start = stroll(matcher, dice, dice.randrange(12))
    fork = matcher.fork()
    ahead = stroll(fork, dice, dice.randrange(12))
    again = grammar.new_matcher()
    assert all(again.accept_token(token) for token in start)
    assert again.is_terminated() == matcher.is_terminated()
    if not matcher.is_terminated():
        assert admitted(again) == admitted(matcher)
    back = dice.randrange(len(start) + len(ahead) + 1)
    fork.rollback(back)
    both = [*start, *ahead]
    assert all(fork.accept_token(token) for token in both[len(both) - back :])
    fork.rollback(len(both))
    assert admitted(fork) == admitted(grammar.new_matcher())


def test_either_stop_token_ends_a_complete_text_only() -> None:
    eos = merges().stop_token_ids[0]
    for stop in (eos, SECOND_STOP):
        matcher = MERGES.compile(GrammarSpec.regex("1a?")).new_matcher()
        assert not matcher.accept_token(stop)
        assert matcher.accept_token(merges().token_bytes.index(b"1"))
        assert {eos, SECOND_STOP} < admitted(matcher)
        assert matcher.accept_token(stop)
        assert matcher.is_terminated()
        with pytest.raises(GrammarStateError):
            admitted(matcher)
        matcher.rollback(1)
        assert not matcher.is_terminated()
        assert {eos, SECOND_STOP} < admitted(matcher)
        with pytest.raises(ConfigError, match="num_tokens=2"):
            matcher.rollback(2)


def test_a_dead_end_is_an_empty_row_and_can_be_left() -> None:
    # A first byte 0xFF would be a special token to llguidance.
    vocabulary = Vocabulary((b"a", b"b", b"ac", b"", b"\xff"), (3,), 5)
    matcher = LLGuidanceBackend(vocabulary).compile(GrammarSpec.regex("ax|b")).new_matcher()
    rows = np.zeros((2, 1), dtype=np.int32)
    matcher.fill_next_token_bitmask(rows, 0)
    assert matcher.accept_token(0)
    matcher.fill_next_token_bitmask(rows, 1)
    assert rows.tolist() == [[0b11], [0]]
    assert not matcher.accept_token(3)
    matcher.rollback(1)
    assert matcher.accept_token(1)
    assert matcher.accept_token(3)


def test_the_style_matcher_fixes_the_whitespace() -> None:
    grammar = BACKEND.compile(GrammarSpec.json_schema(OBJECT, any_whitespace=True))
    style = grammar.new_style_matcher()
    assert style is not None
    text = b'{"name": "x", "age": 1, "kind": "dog"}'
    assert all(style.accept_token(byte) for byte in text)
    assert accepts(grammar, text)
    style.rollback(len(text) - len(b'{"name":'))
    assert not style.accept_token(ord('"'))
    for spec in (GrammarSpec.json_schema(OBJECT), GrammarSpec.regex("a")):
        assert BACKEND.compile(spec).new_style_matcher() is None


@pytest.mark.parametrize(
    ("spec", "error", "reason"),
    [
        (GrammarSpec.json_schema("{oops"), GrammarCompileError, "not JSON"),
        (GrammarSpec.json_schema("3"), GrammarCompileError, "not a JSON schema"),
        (GrammarSpec.json_schema({"pattern": "("}), GrammarCompileError, "pattern"),
        (GrammarSpec.json_schema({"type": "strin"}), GrammarCompileError, "/type"),
        (GrammarSpec.json_schema("false"), UnsatisfiableGrammarError, "no value"),
        (GrammarSpec.json_schema({"$ref": "#"}), UnsatisfiableGrammarError, "no text"),
        (
            GrammarSpec.json_schema({"items": {"not": {"multipleOf": 2}}}),
            UnsupportedSchemaError,
            "/items: not",
        ),
        (GrammarSpec.json_schema({"enum": ["\x01"]}), UnsupportedSchemaError, "control"),
        (GrammarSpec.json_schema({"enum": [2**60]}), UnsupportedSchemaError, "rounded"),
        (GrammarSpec.json_schema({"multipleOf": 0.1}), UnsupportedSchemaError, "step"),
        (GrammarSpec.json_schema({"pattern": "(?=a)"}), UnsupportedSchemaError, "lookahead"),
        (GrammarSpec.json_schema({"$ref": "#/x/y"}), UnsupportedSchemaError, "ref"),
        (
            GrammarSpec.json_schema(
                {
                    "x-guidance": {"lenient": True},
                    "patternProperties": dict.fromkeys("abcdefg", INTEGER),
                }
            ),
            UnsupportedSchemaError,
            "disjoint",
        ),
        (GrammarSpec.regex("(?=a)"), GrammarCompileError, "lookahead"),
        (GrammarSpec.lark("start: missing"), GrammarCompileError, "missing"),
        (GrammarSpec.lark('start: start "a"'), UnsatisfiableGrammarError, "lark"),
        (GrammarSpec.lark('start: "a" <[256]>'), GrammarCompileError, "<\\[256\\]>"),
        (GrammarSpec.ebnf('root ::= "a"'), GrammarCompileError, "use the backend xgrammar"),
        (GrammarSpec.structural_tag("{}"), GrammarCompileError, "use the backend xgrammar"),
        (GrammarSpec.regex("a").after("</think>"), GrammarCompileError, "GrammarPipeline"),
    ],
    ids=str,
)
def test_errors_say_what_is_wrong(spec: GrammarSpec, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        BACKEND.compile(spec)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("any_whitespace", [False, True])
def test_no_key_is_another_one_spelled_with_an_escape(any_whitespace: bool) -> None:  # noqa: FBT001
    """An extra key "\\u0061" would be a second "a", of any value."""
    for schema in (
        {"type": "object", "properties": {"a": INTEGER}},
        {"type": "object", "patternProperties": {"^a": INTEGER}},
        {"type": "object", "properties": {"a": False}},
    ):
        spec = GrammarSpec.json_schema(
            schema, any_whitespace=any_whitespace, additional_properties="schema"
        )
        grammar = BACKEND.compile(spec)
        assert accepts(grammar, '{"b": "x", "\\n": 1}')
        assert not accepts(grammar, '{"\\u0061": "x"}')
        assert not accepts(grammar, '{"a": "x"}')


def test_keys_behind_a_pattern_are_open() -> None:
    schema = {"type": "object", "patternProperties": {"^[a-c]+$": INTEGER, "^x-": STRING}}
    grammar = BACKEND.compile(GrammarSpec.json_schema(schema, additional_properties="schema"))
    assert accepts(grammar, '{"ab": 1, "x-a": "b", "d": null}')
    for text in ('{"ab": "x"}', '{"x-": 1}', '{"a\\n": "x"}'):
        assert not accepts(grammar, text)
    closed = {"type": "object", "patternProperties": {r"^\w+$": INTEGER}}
    grammar = BACKEND.compile(GrammarSpec.json_schema(closed))
    assert accepts(grammar, '{"ab": 1}')
    assert not accepts(grammar, '{"é": "x"}')  # Python's \\w has it


def test_compiles_and_matchers_run_side_by_side() -> None:
    schemas = [{"type": "array", "items": {"enum": [n, str(n)]}, "maxItems": 2} for n in range(16)]
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(BACKEND.compile, map(GrammarSpec.json_schema, schemas * 2)))
        texts = list(pool.map(lambda seed: walk(grammars[0], seed).text, range(32)))
    for number, grammar in enumerate(grammars):
        assert accepts(grammar, json.dumps([number % 16, str(number % 16)]))
    assert texts == [walk(grammars[0], seed).text for seed in range(32)]


def test_listed_arrays_are_judged_before_they_are_handed_over() -> None:
    schema = {"enum": [[1, 2], ["a"], [3], {"x": 1}], "type": "array", "items": INTEGER}
    prepared = prepare_for_llguidance(Lowered({**schema, "maxItems": 1}, ()))
    assert prepared == {"enum": [[3]]}
    grammar = BACKEND.compile(GrammarSpec.json_schema(schema))
    assert [accepts(grammar, text) for text in ("[1, 2]", '["a"]', "[3]")] == [True, False, True]
    referring = {"enum": [[1]], "items": {"$ref": "#/$defs/a"}}
    assert prepare_for_llguidance(Lowered(referring, ())) == referring


def test_alternatives_that_hold_together_are_joined_where_that_makes_fewer() -> None:
    """One of four keys, said four times, is 4 of 256 combinations."""
    names = "abcd"
    one = [
        {"type": "object", "required": [n], "properties": {o: False for o in names if o != n}}
        for n in names
    ]
    small = [{"type": "object", "properties": {"e": {"maximum": n}}} for n in (1, 2)]
    keys = {"type": "object", "properties": dict.fromkeys("abcde", INTEGER)}
    parts = [keys, *({"anyOf": one} for _ in names), {"anyOf": small}]
    prepared = prepare_for_llguidance(Lowered({"allOf": parts}, ()))
    assert [len(part.get("anyOf", ())) for part in prepared["allOf"]] == [0, 4, 2]
    grammar = BACKEND.compile(GrammarSpec.json_schema({"allOf": parts}))
    assert all(accepts(grammar, text) for text in ('{"a": 1}', '{"d": 1, "e": 2}'))
    for text in ("{}", '{"a": 1, "b": 1}', '{"d": 1, "e": 3}', '{"e": 1}'):
        assert not accepts(grammar, text)


def test_bytes_that_are_looked_at_ahead_do_not_end_a_text() -> None:
    """They fill the lexer that all matchers of the grammar share."""
    tokenizer = tiny_tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])
    schema = {"type": "string", "pattern": "^(a?){200}a{200}$"}
    grammar = LLGuidanceBackend(vocabulary).compile(GrammarSpec.json_schema(schema))
    for _ in range(2):
        matcher = grammar.new_matcher()
        for byte in b'"' + b"a" * 210 + b'"':
            assert legal_row(matcher, VOCAB_SIZE).any()
            probe(matcher.fork()).forced_bytes()
            assert matcher.accept_token(int(vocabulary.single_byte_ids[byte]))


def test_thousands_of_branches_are_followed() -> None:
    schema = {"anyOf": [{"const": {"a": number}} for number in range(5_000)]}
    grammar = LLGuidanceBackend(BYTES).compile(GrammarSpec.json_schema(schema))
    assert accepts(grammar, '{"a": 4999}')
    assert not accepts(grammar, '{"a": 5000}')


def test_branches_with_too_many_keys_in_all_are_refused() -> None:
    objects = [
        {"type": "object", "properties": {f"k{i}_{j}": {"type": "null"} for j in range(90)}}
        for i in range(60)
    ]
    with pytest.raises(UnsupportedSchemaError, match="can follow at one place"):
        LLGuidanceBackend(BYTES).compile(GrammarSpec.json_schema({"anyOf": objects}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "number", "minimum": -1.79769e308, "exclusiveMaximum": 1.79769e308},
    ],
)
def test_bounds_that_mean_no_limit_are_cut_with_a_note(schema: Any) -> None:
    document = SpecDocument(GrammarSpec.json_schema(schema))
    compiled = LLGuidanceBackend(BYTES).compile_document(document)
    for text, is_taken in (("9007199254740991", True), ("-12", True), ("9007199254740993", False)):
        matcher = compiled.new_matcher()
        assert all(map(matcher.accept_token, (*text.encode(), 256))) == is_taken, text
    reasons = [note.reason for note in LLGuidanceBackend(BYTES).entries(document)]
    assert "no numbers beyond 2**53 are written" in reasons
    with pytest.raises(UnsupportedSchemaError, match="beyond 2"):
        LLGuidanceBackend(BYTES).compile(
            GrammarSpec.json_schema({"type": "integer", "minimum": 2**60})
        )
