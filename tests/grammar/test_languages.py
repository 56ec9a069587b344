"""Patterns without others, against Python's ``re`` on all short texts."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.languages import are_apart, outside, to_whole, without_looks
from guided_spec.grammar.regex import readable
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES
from tests.tiers import examples

LETTERS = "ab1é\n"
TEXTS = ["".join(text) for size in range(5) for text in itertools.product(LETTERS, repeat=size)]
EOS = 256

ATOMS = st.sampled_from(
    ["a", "b", "1", "[ab]", "[^a]", ".", r"\d", r"\w", r"\W", r"[^\d]", r"\s", r"\b", r"\B"]
)
PIECES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
)
ANCHORED = st.tuples(st.sampled_from(["", "^"]), PIECES, st.sampled_from(["", "$", r"\Z"])).map(
    "".join
)
LOOKS = st.lists(
    st.tuples(st.sampled_from(["(?!", "(?="]), PIECES, st.sampled_from(["", "$"])).map(
        lambda part: f"{''.join(part)})"
    ),
    min_size=1,
    max_size=2,
).map("".join)


@settings(max_examples=examples(150), deadline=None)
@given(pattern=ANCHORED)
def test_outside_is_what_re_does_not_find(pattern: str) -> None:
    written = outside(pattern)
    if written is None:  # nothing is outside, or it would be very long
        return
    for text in TEXTS:
        is_out = re.search(written, text) is not None
        is_found = re.search(pattern, text) is not None
        # Before a last line break Python's $ matches. Before Python 3.14 the empty text has no \B.
        if not text or text.endswith("\n"):  # so less may be outside
            assert not (is_out and is_found), text
        else:
            assert is_out != is_found, text


@settings(max_examples=examples(150), deadline=None)
@given(looks=LOOKS, rest=PIECES, end=st.sampled_from(["", "$"]))
def test_lookahead_is_what_re_reads(looks: str, rest: str, end: str) -> None:
    pattern = f"^{looks}{rest}{end}"
    written = without_looks(pattern)
    if written is None:
        return
    for text in TEXTS:
        if not text and r"\B" in pattern:  # before Python 3.14 the empty text has no \B
            continue
        is_written = re.search(written, text) is not None
        is_found = re.search(pattern, text) is not None
        assert is_found or not is_written, text
        # \\d, \\w and \\s are ASCII in what is admitted, and $ is the very end.
        if text.isascii() and not text.endswith("\n"):
            assert is_written == is_found or "é" in text, text


@settings(max_examples=examples(150), deadline=None)
@given(looks=st.one_of(st.just(""), LOOKS), rest=PIECES, flags=st.sampled_from(["", "(?s)"]))
def test_whole_texts_are_what_fullmatch_reads(looks: str, rest: str, flags: str) -> None:
    pattern = f"{flags}{looks}{rest}"
    try:
        written = to_whole(pattern)
    except GrammarCompileError:
        return
    for text in TEXTS:
        is_found = re.fullmatch(pattern, text) is not None
        is_written = re.fullmatch(readable(written), text) is not None
        assert is_found or not is_written, text
        if text.isascii() and text and not text.endswith("\n"):  # as above
            assert is_written == is_found, text


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r"\w+\b-\b\w+", ["a-b", "a-b1"], ["a-", "-b", "a--b"]),
        (r"(?!ab\b)[a-z]{1,4}", ["abc", "b"], ["ab"]),
        (r".*\bon\b.*", ["on", "go on!", "on."], ["only", "upon"]),
    ],
)
def test_looks_in_a_regex_of_a_request(pattern: str, texts: list[str], others: list[str]) -> None:
    for backend in (LLGuidanceBackend(BYTES), XGrammarBackend(BYTES)):
        compiled = backend.compile(GrammarSpec.regex(pattern))
        for text in (*texts, *others):
            matcher = compiled.new_matcher()
            taken = all(map(matcher.accept_token, [*text.encode(), EOS]))
            assert taken == (text in texts), text


@settings(max_examples=examples(150), deadline=None)
@given(one=ANCHORED, other=ANCHORED)
def test_patterns_that_are_apart_match_no_text_together(one: str, other: str) -> None:
    is_shared = any(re.search(one, text) and re.search(other, text) for text in TEXTS)
    assert not (is_shared and are_apart(one, other))


def test_a_length_and_letters_keep_patterns_apart() -> None:
    assert are_apart(r"^[a-z\d][a-z\d.]{0,254}$", r"^exposdk:\d+$")
    assert are_apart("^a{3}$", "^a{4,6}$")
    assert not are_apart("^a{3,5}$", "^a{4,6}$")
    assert not are_apart("^a$", "^a\n?$")


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^(?!foo|bar).*", ["", "fo", "bazfoo"], ["foo", "bars"]),
        ("^(?!variables$).+$", ["variable", "variables2", "x"], ["", "variables"]),
        (r"^(?!@@)[\w@]+$", ["@a", "a@@"], ["@@", "@@a", ""]),
        (r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,}$", ["A1bc", "abC9x"], ["abcd", "ABCD", "A1b"]),
        (r"^(?![ \t\n]*\(default(.*)\))[\s\S]*", ["", "(default", "x (default)"], [" (default)"]),
    ],
)
def test_what_people_write(pattern: str, right: list[str], wrong: list[str]) -> None:
    written = without_looks(pattern)
    assert written is not None
    assert [text for text in right + wrong if re.search(written, text)] == right
    assert [text for text in right + wrong if re.search(pattern, text)] == right


@pytest.mark.parametrize(
    "pattern",
    [
        "(?!a)b",  # may stand anywhere
        "^a(?!b)",
        "^(?<!a)b",
        r"^(?!(a)\1)b",
        "(?m)^(?!a$)b",
        "^ab",
    ],
)
def test_other_lookahead_stays(pattern: str) -> None:
    assert without_looks(pattern) is None


def test_both_cases_are_left_out() -> None:
    written = outside("(?i)a")
    assert written is not None
    assert [text for text in ("", "b", "a", "xA") if re.search(written, text)] == ["", "b"]
    looked = without_looks("(?i)^(?!a)[ab]$")
    assert looked is not None
    assert [text for text in "aAbB" if re.search(looked, text)] == ["b", "B"]


def test_flags_that_find_more_are_not_negated() -> None:
    assert outside("(?m)^a$") is None
    assert outside(r"(a)\1") is None


SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string", "pattern": "^(?!foo|bar)[a-z]+$"}, ["fo", "baz"], ["foo", "bars"]),
    ({"type": "string", "not": {"pattern": r"\.\./"}}, ["", "a/b", ".."], ["../a", "a/../b"]),
    (
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "z$"}]},
        ["a", "z", "abc"],
        ["az", "", "x"],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^(?!x-).+$": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{}, {"a": 1}, {"x": 2}],
        [{"x-a": 1}, {"a": "b"}],
    ),
    (
        {"type": "object", "propertyNames": {"not": {"pattern": "^_"}}, "maxProperties": 1},
        [{}, {"a": None}],
        [{"_a": 1}],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS)
def test_in_schemas(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    spec = GrammarSpec.json_schema(schema, additional_properties="schema")
    compiled = LLGuidanceBackend(BYTES).compile(spec)
    for value in right + wrong:
        assert jsonschema.Draft202012Validator(schema).is_valid(value) == (value in right)
        assert takes(compiled, json.dumps(value).encode()) == (value in right), value


def takes(compiled: Any, text: bytes) -> bool:
    matcher = compiled.new_matcher()
    return all(map(matcher.accept_token, (*text, EOS)))
