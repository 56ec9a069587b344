from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.xgrammar import XGrammarBackend
from tests.grammar.walks import BYTES, accepts, walk
from tests.strategies import regexes

BACKEND = XGrammarBackend(BYTES, compile_threads=1)


def compiled(pattern: str) -> CompiledGrammar:
    return BACKEND.compile(GrammarSpec.regex(pattern))


@given(regexes(), st.integers(0, 2**32))
def test_every_finished_text_matches(pattern: str, seed: int) -> None:
    grammar = compiled(pattern)
    for number in range(3):
        text = walk(grammar, seed + number)
        assert not text.finished or re.fullmatch(pattern, text.data.decode())


@given(regexes(), st.data())
def test_every_match_is_accepted(pattern: str, data: st.DataObject) -> None:
    grammar = compiled(re.sub("^", "(?a)", pattern))
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    if "\0" not in text and text.isprintable():
        assert accepts(grammar, text)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6))
def test_escaped_text_matches_itself_only(text: str) -> None:
    grammar = compiled(re.escape(text))
    assert accepts(grammar, text)
    assert not accepts(grammar, text + "x")
    assert walk(grammar, 0).data == text.encode()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6))
def test_a_json_pattern_escapes_what_json_must(text: str) -> None:
    schema = {"type": "string", "pattern": re.escape(text)}
    written = walk(BACKEND.compile(GrammarSpec.json_schema(schema)), 0)
    assert json.loads(written.data) == text


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (".", "a", "\n"),
        ("(?s:.)", "\n", ""),
        (r"\x41b", "Ab", "\u041b"),
        ("[]^]+", "^]", "a"),
        ("[^^]", "a", "^"),
        (r"[\w-]+", "a-b", "é"),
        (r"\W", "!", "é"),
        (r"(?a:\W)", "é", "a"),
        (r"[^\d]", "x", "٣"),
        ("a{2,}?", "aaa", "a"),
        ("(^a|^b)$", "b", "ab"),
        ("(?m:^a$)", "a", "a\n"),
        ("a{0}b", "b", "ab"),
        ("(|a)+", "aa", "b"),
        ("[a-z]{1,300}", "a" * 300, "a" * 301),
    ],
)
def test_python_reads_it_so(pattern: str, matching: str, other: str) -> None:
    grammar = compiled(pattern)
    assert re.fullmatch(pattern, matching)
    assert accepts(grammar, matching)
    assert not re.fullmatch(pattern, other) or not other.isascii()
    assert not accepts(grammar, other)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("a^b", "anchor"),
        ("(a$)+b", "anchor"),
        (r"\bword\b", "boundary"),
        ("a(?=b)", "lookahead"),
        ("(?<!a)b", "negative"),
        (r"(a)\1", "backreference"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("(?>a*)b", "atomic"),
        ("a*+", "possessive"),
        ("(?i)a", "flag"),
        (r"[^\s\S]", "class"),
        ("(", "unterminated"),
        (r"\p{Lu}", "bad escape"),
        ("\0", "class"),
    ],
)
def test_what_has_no_automaton_is_refused_by_name(pattern: str, name: str) -> None:
    with pytest.raises(GrammarCompileError, match=name):
        to_fullmatch(pattern)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(GrammarCompileError):
        to_fullmatch("(" * 5000 + ")" * 5000)


@pytest.mark.parametrize("value", ["a", 'a"b', "\\", "\n", "é🎉"])
def test_classes_in_json_leave_out_what_needs_an_escape(value: Any) -> None:
    grammar = BACKEND.compile(GrammarSpec.json_schema({"type": "string", "pattern": "^(?s:.*)$"}))
    assert accepts(grammar, json.dumps(value, ensure_ascii=False)) == (
        value.isprintable() and not set(value) & set('"\\')
    )
