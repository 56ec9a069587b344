"""No text holds a key twice in one object; every other text of the grammar is still admitted."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import UnsupportedSchemaError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.guarded import check_grammar_backend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend, GrammarMatcher
from guided_spec.grammar.schema.keys import free_keys
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.key_tokens import START, Keys, KeyState, advance
from guided_spec.grammar.text.markers import AfterGrammar, Marker
from guided_spec.grammar.text.state import TextState
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from tests.tiers import examples

BACKENDS = ["xgrammar", "llguidance"]

INTEGER = {"type": "integer"}


def of_patterns(*patterns: str, **more: Any) -> dict[str, Any]:
    keys = dict.fromkeys(patterns, INTEGER)
    return {"type": "object", "patternProperties": keys, "additionalProperties": False, **more}


SCHEMAS: dict[str, Any] = {
    "any": True,
    "map": {"type": "object", "additionalProperties": INTEGER},
    "endless": of_patterns("^[ab]+$"),
    "two": of_patterns("^x[ab]*$", "^y[ab]*$"),
    "few": of_patterns("^(a|b|ab)$"),
    "some": of_patterns("^[ab]{1,2}$", "^x[12]$"),
    "quoted": of_patterns('^[a\n"\\\\]{1,2}$'),
    "open": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "additionalProperties": True,
    },
    "beside": {"type": "object", "properties": {"ax": INTEGER}, **of_patterns("^a$")},
    "left over": {**of_patterns("^a.+$"), "additionalProperties": INTEGER},
    "not these": {
        **of_patterns(),
        "patternProperties": {"^a.+$": False},
        "additionalProperties": {},
    },
    "inside": {"type": "array", "items": of_patterns("^[A-Z]{2}$")},
    "nested": of_patterns("^b*$", properties={"a": {"additionalProperties": INTEGER}}),
    "names": {"propertyNames": {"maxLength": 1, "pattern": "^[ab]"}, "type": "object"},
}
# Tokens that end keys, spell them, begin others, hold two, and cut escapes and characters apart.
_TEXTS = r"""
"a" "a": a" ab aa "": "," ", {"a {"a": {"a":_1,_"b":_2 "a":_1,_"a":_2 ":_1,_"a ":_1,_"a":_
":_1,_"aa" 1,_ 1,_" },_" },_"a":_ }} _"a \ \u \u00 \u0061 \u0061" 61" 61 \" \"a" \n" n" "\n"
"\u0061" \ud83d \ude00 \ude00" 😀 😀" ":_{"a":_1},_"a" {},_ "x x1 x1" US U S" US":_ ,_"US"
[{"a":_1},_{"a":_1 "\n":_1,_"\n" ":_1,_ true false null :_1 :_
"""
TOKENS = (
    *(bytes([byte]) for byte in range(256)),
    *(text.replace("_", " ").encode() for text in _TEXTS.split()),
)
EOS = len(TOKENS)
VOCABULARY = Vocabulary((*TOKENS, b""), (EOS,), EOS + 1)
seeds = st.integers(0, 2**32)


@cache
def backend(name: str) -> GrammarBackend:
    return BackendChoice(name, VOCABULARY)


@cache
def compiled(name: str, schema: str, order: str = "schema") -> UniqueKeysGrammar[Any]:
    spec = GrammarSpec.json_schema(SCHEMAS[schema], key_order=order)  # type: ignore[arg-type]
    try:
        grammar = backend(name).compile(spec)
    except UnsupportedSchemaError:
        pytest.skip("the backend refuses the schema")
    if name == "xgrammar" and schema == "not these":
        pytest.skip("the backend closes the objects")
    assert isinstance(grammar, UniqueKeysGrammar)
    return grammar


def repeats(text: str) -> bool:
    """Whether a JSON text holds a key twice in one object."""
    found = []

    def take(pairs: list[tuple[str, Any]]) -> None:
        found.append(len({key for key, _ in pairs}) < len(pairs))

    json.loads(text, object_pairs_hook=take)
    return any(found)


def legal(matcher: GrammarMatcher) -> list[int]:
    row = np.zeros((1, -(-(EOS + 1) // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: EOS + 1]
    return [int(token) for token in np.flatnonzero(bits)]


def choose(options: list[int], dice: random.Random) -> int:
    """One of them: often the end, a long token or one that leads to further keys."""
    if EOS in options and dice.random() < 0.8:
        return EOS
    long = [token for token in options if token >= 256]
    short = [token for token in options if token < 256 and token in b'",:}]{ab1U']
    return dice.choice(dice.choice([long, short, options]) or options)


def decode(token_ids: list[int]) -> str:
    # xgrammar lets through three bytes that are half a character.
    return b"".join(VOCABULARY.token_bytes[token] for token in token_ids).decode(errors="replace")


def check_row(matcher: TextState) -> list[int]:
    """The legal tokens: those of the row, which are those that are accepted."""
    tokens, inner = legal(matcher), legal(matcher.without_budget().unfiltered)
    assert tokens, "a dead end"
    assert set(tokens) <= set(inner)
    assert matcher.is_restricted or tokens == inner
    fork = matcher.fork()
    for token in inner:
        is_taken = fork.accept_token(token)
        assert is_taken == (token in tokens), VOCABULARY.token_bytes[token]
        if is_taken:
            fork.rollback(1)
    return tokens


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", BACKENDS)
def test_the_row_is_what_is_accepted(name: str, schema: str, order: str) -> None:
    grammar, dice = compiled(name, schema, order), random.Random(f"{name} {schema} {order}")
    for _ in range(3):
        matcher, text = grammar.new_matcher(), list[int]()
        while not matcher.is_terminated() and len(text) < 50:
            text.append(choose(check_row(matcher), dice))
            assert matcher.accept_token(text[-1])
            if dice.random() < 0.1:
                fork, back = matcher.fork(), dice.randrange(len(text)) + 1
                fork.rollback(back)
                assert all(map(fork.accept_token, text[-back:]))
                matcher = fork
        assert not matcher.is_terminated() or not repeats(decode(text))
        assert not matcher.accept_token(-1)
        assert not matcher.accept_token(EOS + 1)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", BACKENDS)
def test_only_texts_with_a_key_twice_are_lost(name: str, schema: str) -> None:
    grammar, dice = compiled(name, schema), random.Random(f"{name} {schema}")
    for _ in range(25):
        inner, text = grammar.inner.new_matcher(), list[int]()
        while not inner.is_terminated() and len(text) < 50:
            text.append(choose(legal(inner), dice))
            assert inner.accept_token(text[-1])
        if inner.is_terminated():
            matcher = grammar.new_matcher()
            is_admitted = all(map(matcher.accept_token, text))
            assert grammar.new_matcher().without_budget().takes(text) is is_admitted
            assert is_admitted is not repeats(decode(text)), decode(text)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_last_key_has_no_comma_behind_it(name: str) -> None:
    matcher = compiled(name, "few").new_matcher()
    assert all(map(matcher.accept_token, b'{"b": 1, "a": 2'))
    assert matcher.accept_token(ord(","))  # "ab" is left
    assert all(map(matcher.accept_token, b' "a'))
    assert legal(matcher) == [ord("b")]
    assert all(map(matcher.accept_token, b'b": 3'))
    assert not matcher.accept_token(ord(","))
    assert matcher.accept_token(ord("}"))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_letter_that_leaves_no_key_is_not_begun_with(name: str) -> None:
    matcher = compiled(name, "some").new_matcher()
    keys = ("aa", "ab", "a", "x1", "x2")
    text = ", ".join(f'"{key}": 1' for key in keys)
    assert all(map(matcher.accept_token, f'{{{text}, "'.encode()))
    assert {VOCABULARY.token_bytes[token][:1] for token in legal(matcher)} == {b"b"}


@given(
    st.recursive(
        st.integers(0, 9) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(
                st.tuples(st.text('a"\\\n😀\ud83d\ude00', max_size=2), inner), max_size=4
            ).map(tuple)
        ),
        max_leaves=12,
    ),
    st.data(),
)
def test_repeated_keys_are_found_however_they_are_spelled(value: Any, data: st.DataObject) -> None:
    """Objects are tuples of pairs here; each character is written in one of its ways."""

    def spell(text: str) -> str:
        return "".join(data.draw(st.sampled_from([json.dumps(c)[1:-1], *_plain(c)])) for c in text)

    def dump(part: Any) -> str:
        if isinstance(part, tuple):
            return "{" + ", ".join(f'"{spell(k)}": {dump(v)}' for k, v in part) + "}"
        if isinstance(part, list):
            return "[" + ",".join(map(dump, part)) + "]"
        return f'"{spell(part)}"' if isinstance(part, str) else str(part)

    text = dump(value)
    whole = advance(START, text.encode())
    assert (whole is None) is repeats(text)
    place: KeyState | None = START
    for byte in text.encode():
        place = None if place is None else advance(place, bytes([byte]))
    assert place == whole
    assert whole in (None, START)


def _plain(char: str) -> list[str]:
    is_plain = char >= " " and char not in '"\\' and not "\ud800" <= char <= "\udfff"
    return [char] if is_plain else [f"\\u{ord(char):04X}"] if char < "\uffff" else []


@given(st.lists(st.binary(max_size=2), unique=True, max_size=300), st.binary(max_size=2))
@settings(max_examples=examples(30))
def test_keys_are_kept(added: list[bytes], asked: bytes) -> None:
    keys = Keys()
    for key in added:
        assert not keys.holds(key)
        keys = keys.with_key(key)
    assert all(map(keys.holds, added))
    assert keys.holds(asked) is (asked in added)
    assert sorted(keys.starting(asked)) == sorted(k for k in added if k.startswith(asked))


@pytest.mark.parametrize(
    ("schema", "are_there", "run_out"),
    [
        (False, False, False),
        (True, True, False),
        (INTEGER, False, False),
        ({"type": "array", "items": INTEGER}, False, False),
        ({"type": "array"}, True, False),
        ({"enum": [{"a": 1}]}, False, False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, True, False),
        ({"type": "object", "properties": {"a": INTEGER}}, True, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": of_patterns("^a+$")}}, True, False),
        (of_patterns("a(?:b|c{0,}){1,}"), True, False),
        (of_patterns("a{1,}|b"), True, True),
        (of_patterns("[a-z]{1,63}"), True, True),
        (of_patterns(r"\u{61}(?:\u{1}){0,}"), True, True),
        ({**of_patterns("[A-Z]{2}"), "additionalProperties": {}}, True, False),
        ({"patternProperties": {"a{0,}": False}}, True, False),
        ({"patternProperties": {"[a-z]{1,}": False}}, True, True),
    ],
)
def test_keys_that_may_run_out_are_known(schema: Any, are_there: bool, run_out: bool) -> None:  # noqa: FBT001
    assert free_keys(schema) == (are_there, run_out)


@pytest.mark.parametrize("name", BACKENDS)
def test_closed_objects_cost_nothing(name: str) -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}
    grammar = backend(name).compile(GrammarSpec.json_schema(schema))
    assert not isinstance(grammar, UniqueKeysGrammar)
    assert not isinstance(backend(name).compile(GrammarSpec.regex("a+")), UniqueKeysGrammar)
    whole = backend(name).compile(GrammarSpec.json_object())
    assert isinstance(whole, UniqueKeysGrammar)
    assert not whole.run_out


@pytest.mark.parametrize("schema", ["map", "some", "inside"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_protocol_is_kept(name: str, schema: str) -> None:
    compiled(name, schema)
    spec = GrammarSpec.json_schema(SCHEMAS[schema], any_whitespace=True)
    texts = check_grammar_backend(backend(name), spec, num_texts=4, max_tokens=40)
    assert not any(map(repeats, texts))


@pytest.mark.parametrize("schema", ["map", "few", "endless", "nested"])
@pytest.mark.parametrize("name", BACKENDS)
def test_texts_end_within_a_budget(name: str, schema: str) -> None:
    grammar: CompiledGrammar = compiled(name, schema)
    endings = EndingsCache(VOCABULARY)
    least = endings.of(grammar).cost(endings.of(grammar).start)
    for seed in range(4):
        dice = random.Random(seed)
        budget = least + dice.randrange(24)
        matcher = endings.bound(grammar, budget, is_required=True).new_matcher()
        text: list[int] = []
        while not matcher.is_terminated():
            options = legal(matcher)
            assert options, decode(text)
            text.append(dice.choice([t for t in options if t != EOS] or options))
            assert matcher.accept_token(text[-1])
        assert len(text) <= budget
        assert not repeats(decode(text))


def test_behind_a_marker() -> None:
    grammar = AfterGrammar(compiled("xgrammar", "few"), Marker(tuple(b"::"), VOCABULARY, list))
    matcher = grammar.new_matcher()
    assert all(map(matcher.accept_token, b'{"a":1,"a"::{"a": 1, "'))
    assert matcher.own_matcher is not None
    assert not matcher.accept_token(TOKENS.index(b'a"', 256))
    assert {VOCABULARY.token_bytes[token][:1] for token in legal(matcher)} == {b"a", b"b"}


def test_a_property_whose_array_says_nothing_of_its_items() -> None:
    """Its shortest value is asked for where keys might run out."""
    schema = {
        "patternProperties": {"^[a-c]$": {"type": "array", "minItems": 2}},
        "additionalProperties": False,
    }
    assert free_keys(schema).run_out
