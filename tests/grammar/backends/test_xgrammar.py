from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xgrammar

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import ids_of
from tests.masks.walks import BYTES, accepts

BACKEND = XGrammarBackend(BYTES, compile_threads=1)
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": OBJECT},
        "end": "</f>",
    },
}


@pytest.mark.parametrize(
    ("spec", "text", "other"),
    [
        (GrammarSpec.json_schema(OBJECT), '{"a": 1}', '{"a":1}'),
        (GrammarSpec.json_schema(OBJECT, any_whitespace=True), '{ "a" :\n1}', '{"a": "1"}'),
        (GrammarSpec.json_schema("true"), "[1, 2]", "[1,2]"),
        (GrammarSpec.json_object(), '{"a": {"b": []}}', "[]"),
        (GrammarSpec.json_object(any_whitespace=True), '{"a":1}', "1"),
        (GrammarSpec.regex("a.c"), "abc", "a\nc"),
        (GrammarSpec.regex(""), "", "a"),
        (GrammarSpec.choice(["yes", "no"]), "no", "yesno"),
        (GrammarSpec.ebnf('root ::= "a" root "b" | ""'), "aabb", "aab"),
        (GrammarSpec.ebnf('top ::= "x" | "y"', root="top"), "y", "z"),
        (GrammarSpec.lark('start: "a" "b"+'), "abb", "a"),
        (GrammarSpec.structural_tag(TAG), '<f>{"a": 1}</f>', "<f>{}</f>"),
    ],
)
def test_each_kind(spec: GrammarSpec, text: str, other: str) -> None:
    grammar = BACKEND.compile(spec)
    assert accepts(grammar, text)
    assert not accepts(grammar, other)


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        ('root ::= "a" . "b"', ["axb", "a\nb", "aéb"], ["ab", "axxb"]),
        ('root ::= .* "|" ".#"', ["|.#", "ab|.#"], ["|x#"]),
        ('root ::= ("a" | ) "b"', ["ab", "b"], ["a", "aab"]),
        ('root ::= ( | "x") "y"', ["xy", "y"], ["x"]),
        ('root ::= "a" | | "b"', ["a", "", "b"], ["ab"]),
        ('root ::= "a" |', ["a", ""], ["aa"]),
        ('root ::= ws "a"\nws ::= | " " | "\\n" [ \\t]{0,20}', ["a", " a", "\n\ta"], ["  a"]),
        ('root ::= "a" e # x ::= |\n\ne ::= # nothing\nf ::= "|)"', ["a"], ["b", "a|)"]),
        ('root ::= a.b ")" [|)(.]\na.b ::= "("', ["()|", "()."], ["()x"]),
        ('root::="a" b\nb::=|"c"', ["a", "ac"], ["c"]),
        ('root ::= Regex("(|a)b") "."', ["b.", "ab."], ["bx"]),
    ],
)
def test_ebnf_as_llama_cpp_writes_it(source: str, texts: list[str], others: list[str]) -> None:
    grammar = BACKEND.compile(GrammarSpec.ebnf(source))
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


def test_an_error_in_ebnf_names_the_user_s_own_line() -> None:
    with pytest.raises(GrammarCompileError, match="line 2"):
        BACKEND.compile(GrammarSpec.ebnf('root ::= ("a" | ) .\nx ::= "a" )'))


@pytest.mark.parametrize(
    ("spec", "error", "reason"),
    [
        (GrammarSpec("choice", ""), GrammarCompileError, "not JSON"),
        (GrammarSpec.json_schema("{oops"), GrammarCompileError, "not JSON"),
        (GrammarSpec.json_schema("3"), GrammarCompileError, "not a JSON schema"),
        (
            GrammarSpec.json_schema({"properties": {"a": {"type": "strin"}}}),
            GrammarCompileError,
            "/properties/a/type",
        ),
        (GrammarSpec.json_schema({"pattern": "("}), GrammarCompileError, "pattern"),
        (
            GrammarSpec.json_schema({"not": {"multipleOf": 2}}),
            UnsupportedSchemaError,
            "not: .*anyOf",
        ),
        (GrammarSpec.json_schema("false"), UnsatisfiableGrammarError, "no value"),
        (GrammarSpec.json_schema({"$ref": "#"}), UnsatisfiableGrammarError, "no value"),
        (GrammarSpec.regex("(?=a)"), GrammarCompileError, "lookahead"),
        (GrammarSpec.choice(["a\0"]), GrammarCompileError, "nothing but U.0000"),
        (GrammarSpec.choice(["\ud800"]), GrammarCompileError, "nothing but U.0000"),
        (GrammarSpec.ebnf("root ::= x"), GrammarCompileError, "not defined"),
        (GrammarSpec.ebnf("root ::= root"), UnsatisfiableGrammarError, "ebnf"),
        (GrammarSpec.ebnf('root ::= "\ud800"'), GrammarCompileError, "surrogates"),
        (GrammarSpec.lark("start: missing"), GrammarCompileError, "missing"),
        (GrammarSpec.structural_tag({"a": 1}), GrammarCompileError, "structural_tag"),
        (GrammarSpec.structural_tag("["), GrammarCompileError, "not JSON"),
    ],
    ids=str,
)
def test_errors_say_what_is_wrong(spec: GrammarSpec, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        BACKEND.compile(spec)
    assert type(caught.value) is error
    assert ".cc:" not in str(caught.value)


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_structural_tags_are_checked_inside(kind: str) -> None:
    content: dict[str, Any] = {
        "type": kind,
        "json_schema": {"not": {"multipleOf": 2}},
        "pattern": "a(?=b)",
    }
    tag = {**TAG, "format": {**TAG["format"], "content": content}}  # type: ignore[dict-item]
    with pytest.raises(GrammarCompileError, match="not|lookahead"):
        BACKEND.compile(GrammarSpec.structural_tag(tag))


def test_a_vocabulary_without_the_needed_bytes_is_unsatisfiable() -> None:
    backend = XGrammarBackend(Vocabulary((b"a", b"b", b""), (2,), 3))
    assert backend.compile(GrammarSpec.regex("[ax]"))
    with pytest.raises(UnsatisfiableGrammarError):
        backend.compile(GrammarSpec.regex("[xy]"))


def test_the_mask_of_a_self_referring_root_is_not_too_strict() -> None:
    data = (*BYTES.token_bytes[:256], b"]]", b"bb", b"")
    backend = XGrammarBackend(Vocabulary(data, (258,), 259))
    for spec, start, token in (
        (GrammarSpec.json_schema({"type": "array", "items": {"$ref": "#"}}), b"[[", 256),
        (GrammarSpec.ebnf('root ::= "a" root "b" | ""'), b"aa", 257),
    ):
        matcher = backend.compile(spec).new_matcher()
        assert all(matcher.accept_token(byte) for byte in start)
        bitmask = np.zeros((1, 9), dtype=np.int32)
        matcher.fill_next_token_bitmask(bitmask)
        assert np.unpackbits(bitmask.view(np.uint8), bitorder="little")[token]
        assert matcher.accept_token(token)


def test_the_style_matcher_fixes_the_whitespace() -> None:
    style = BACKEND.compile(
        GrammarSpec.json_schema(OBJECT, any_whitespace=True)
    ).new_style_matcher()
    assert style is not None
    assert all(style.accept_token(byte) for byte in b'{"a":')
    assert not style.accept_token(ord("1"))
    assert style.accept_token(ord(" "))
    for spec in (GrammarSpec.json_schema(OBJECT), GrammarSpec.regex("a")):
        assert BACKEND.compile(spec).new_style_matcher() is None


def test_a_matcher_forks_rolls_back_and_terminates() -> None:
    matcher = BACKEND.compile(GrammarSpec.regex("ab?")).new_matcher()
    assert matcher.accept_token(ord("a"))
    fork = matcher.fork()
    assert fork.accept_token(ord("b"))
    assert fork.accept_token(256)
    assert fork.is_terminated()
    assert not matcher.is_terminated()
    fork.rollback(2)
    assert not fork.is_terminated()
    assert fork.accept_token(256)


def test_compiles_run_side_by_side() -> None:
    schemas = [{"type": "array", "items": {"enum": [n, str(n)]}, "maxItems": 2} for n in range(16)]
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(BACKEND.compile, map(GrammarSpec.json_schema, schemas * 2)))
    for number, grammar in enumerate(grammars):
        assert accepts(grammar, json.dumps([number % 16, str(number % 16)]))


@pytest.mark.parametrize(
    "schema", [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^.{0,3}$"}]
)
def test_only_the_shortest_spelling_in_utf8(schema: dict[str, Any]) -> None:
    """Overlong bytes would be several broken characters when they are decoded."""
    compiled = XGrammarBackend(BYTES).compile(GrammarSpec.json_schema(schema))
    for spelled in (b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80"):
        matcher = compiled.new_matcher()
        assert not all(matcher.accept_token(byte) for byte in b'"' + spelled)
    matcher = compiled.new_matcher()
    assert all(matcher.accept_token(byte) for byte in '"é東🙂"'.encode())


@pytest.mark.parametrize("word", ["error", "bbabb", "bbbbab", "abbab"])
def test_masks_have_every_token_that_goes_on(word: str) -> None:
    """Also those that hold another one, which is refused and stands before them in the alphabet."""
    parts = sorted(
        {word[at:end] for at in range(len(word)) for end in range(at + 1, len(word) + 1)}
    )
    for left_out in ("", *parts):
        texts = [part.encode() for part in parts if part != left_out or len(part) == 1]
        vocabulary = Vocabulary((*texts, b""), (len(texts),), len(texts) + 1)
        grammar = XGrammarBackend(vocabulary, compile_threads=1).compile(GrammarSpec.choice([word]))
        for length in range(len(word)):
            matcher = grammar.new_matcher()
            for letter in word[:length].encode():
                assert matcher.accept_token(texts.index(bytes([letter])))
            legal = ids_of(legal_row(matcher, vocabulary.vocab_size), vocabulary.vocab_size)
            going_on = [
                at for at, text in enumerate(texts) if word[length:].startswith(text.decode())
            ]
            assert legal == going_on


def test_short_calls_keep_the_interpreter_and_long_ones_do_not() -> None:
    assert BACKEND.vocabulary is BYTES  # made once: so calls are as it wants them
    core: Any = xgrammar.base
    methods = core._core.GrammarMatcher.__tvm_ffi_type_info__.methods
    releases = {method.name: method.func.release_gil for method in methods}
    assert not any(releases[name] for name in ("accept_token", "fork", "rollback"))
    assert releases["fill_next_token_bitmask"]
