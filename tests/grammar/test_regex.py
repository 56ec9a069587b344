from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.rule_endings import RuleEndings
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.regex import readable, to_fullmatch, to_search
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts, walk
from tests.strategies import regexes, regexes_of_two_letters
from tests.tiers import examples

BACKEND = XGrammarBackend(BYTES, compile_threads=1)
BACKENDS: dict[str, GrammarBackend] = {"xgrammar": BACKEND, "llguidance": LLGuidanceBackend(BYTES)}
# Around every change of length in UTF-8, and around the surrogates.
EDGES = (1, 0x5E, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF)
CODES = st.sampled_from(EDGES) | st.sampled_from([code + 1 for code in EDGES[:-1]])


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


SHORT = ["".join(text) for size in range(7) for text in itertools.product("ab", repeat=size)]


def in_tag(pattern: str) -> GrammarSpec:
    begin = {"type": "const_string", "value": "c"}
    parts = [begin, {"type": "regex", "pattern": pattern}]
    return GrammarSpec.structural_tag(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    )


def in_string(pattern: str) -> GrammarSpec:
    return GrammarSpec.json_schema({"type": "string", "pattern": f"^(?:{pattern})$"})


def in_key(pattern: str) -> GrammarSpec:
    keys = {f"^(?:{pattern})$": {"const": 1}}
    return GrammarSpec.json_schema({"patternProperties": keys, "minProperties": 1})


PLACES = {
    "text": (GrammarSpec.regex, "{}"),
    "string": (in_string, '"{}"'),
    "key": (in_key, '{{"{}": 1}}'),
    "tag": (in_tag, "c{}"),
}


def differing(backend: GrammarBackend, place: str, pattern: str) -> list[str]:
    """Of all texts of up to six letters a and b, those that the grammar or ``re`` takes alone."""
    spec, around = PLACES[place]
    grammar = backend.compile(spec(pattern))
    return [
        text
        for text in SHORT
        if accepts(grammar, around.format(text)) != bool(re.fullmatch(pattern, text))
    ]


@pytest.mark.parametrize(
    ("name", "place"),
    [*(("xgrammar", place) for place in PLACES), ("llguidance", "text"), ("llguidance", "string")],
)
@given(pattern=regexes_of_two_letters())
@example(pattern="a|a{1,2}")
@example(pattern="b*a{2,130}")
@example(pattern="a{1,130}|b{1,130}")
@example(pattern="(a|a{1,2}){129}|b")
def test_a_grammar_holds_what_re_matches(name: str, place: str, pattern: str) -> None:
    assert differing(BACKENDS[name], place, pattern) == []


@pytest.mark.slow
@settings(max_examples=examples(1000))
@given(pattern=regexes_of_two_letters(), place=st.sampled_from(sorted(PLACES)))
def test_many_grammars_hold_what_re_matches(pattern: str, place: str) -> None:
    assert differing(BACKEND, place, pattern) == []


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
        ("(-[a-z]{1,3})+", "-a-abc", "-a-abcd"),
        ("(-[a-z]{1,3}){1,}b?", "-a-abc-z", "-a-abcd-z"),
        ("(-[a-z]{0,3}){2,}", "-a-abc-", "-a-ab-abcd"),
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
        (r"a\0", r"nothing but U\+0000"),
        ("a\ud800", "halves of surrogate pairs"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("(?>a*)b", "atomic"),
        ("a*+", "possessive"),
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
def test_classes_in_json_hold_what_needs_an_escape_as_one(value: Any) -> None:
    grammar = BACKEND.compile(GrammarSpec.json_schema({"type": "string", "pattern": "^(?s:.*)$"}))
    assert accepts(grammar, json.dumps(value, ensure_ascii=False))
    assert (
        not accepts(grammar, f'"{value}"') or json.dumps(value, ensure_ascii=False)[1:-1] == value
    )


@pytest.mark.parametrize("value", ["a", 'a"b', "\\", "\n", "é🎉"])
def test_plain_classes_leave_out_what_needs_an_escape(value: Any) -> None:
    plain = re.compile(readable(to_fullmatch("(?s:.*)", context="json_plain")))
    is_plain = json.dumps(value, ensure_ascii=False)[1:-1] == value
    assert (plain.fullmatch(value) is not None) == is_plain


def padded(code: int, size: int) -> bytes:
    """``code`` in ``size`` bytes as UTF-8 would have it, were it not overlong or no character."""
    if size == 1:
        return bytes([code & 0xFF])
    rest = [0x80 | (code >> 6 * place) & 0x3F for place in reversed(range(size - 1))]
    return bytes([(0xFF00 >> size) & 0xFF | (code >> 6 * (size - 1)) & (0x7F >> size), *rest])


ILL_FORMED = sorted(
    {
        padded(code, size)
        for edge in (0, *EDGES, 0xD800, 0xDFFF, 0x110000, 0x1FFFFF)
        for code in (edge, edge + 1)
        for size in (1, 2, 3, 4)
    }
)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("repeat", ["", "+", "{1,3}"])
@pytest.mark.parametrize("negation", ["", "^"])
@settings(max_examples=examples(12))
@given(ends=st.tuples(CODES, CODES), around=st.sampled_from(["", "a"]))
def test_bytes_are_utf8_that_python_matches(
    name: str, repeat: str, negation: str, ends: tuple[int, int], around: str
) -> None:
    low, high = sorted(ends)
    members = f"{re.escape(chr(low))}-{re.escape(chr(high))}"
    pattern = f"{around}[{negation}{members}]{repeat}{around}"
    try:
        grammar = BACKENDS[name].compile(GrammarSpec.regex(pattern))
    except GrammarCompileError:
        held = (0, low - 1, high + 1, 0x10FFFF) if negation else (low, high, low, high)
        ranges = [one for one in (held[:2], held[2:]) if one[0] <= one[1]]
        assert all(last == 0 or 0xD800 <= first <= last <= 0xDFFF for first, last in ranges)
        return
    for data in ILL_FORMED:
        text = around.encode() + data + around.encode()
        try:
            expected = re.fullmatch(pattern, text.decode()) is not None and 0 not in data
        except UnicodeDecodeError:
            expected = False
        assert accepts(grammar, text) == expected, (pattern, data)


@pytest.mark.parametrize("name", BACKENDS)
@given(pattern=regexes(), seed=st.integers(0, 2**32))
def test_every_finished_text_is_utf8(name: str, pattern: str, seed: int) -> None:
    """From bytes, so that nothing but the grammar makes characters of them."""
    text = walk(BACKENDS[name].compile(GrammarSpec.regex(pattern)), seed)
    assert not text.finished or re.fullmatch(pattern, text.data.decode("utf-8", "strict"))


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("((a*)*)*b", "aab", "aa"),
        ("(a?b?)*", "abba", "c"),
        ("(a|b*)+c", "abc", "ab"),
        ("((a+)*|(b{0,2}){3,})*", "abbbbbb", "abc"),
        ("(?:a{2,3})*", "aaaaa", "a"),
        ("(?:(?:ab)?(?s:.*))*", "\n", None),
        ("(|)*", "", "a"),
        ("(a{0}|b)+", "bb", "a"),
        ("(?:x(?:a*)*){2}", "xaax", "x"),
    ],
)
def test_loops_of_what_can_be_empty(pattern: str, matching: str, other: str | None) -> None:
    """Written without such loops, which make the backend slower with each character."""
    grammar = compiled(pattern)
    assert accepts(grammar, matching)
    assert other is None or not accepts(grammar, other)
    assert isinstance(EndingsCache(BYTES).of(grammar), RuleEndings)


@pytest.mark.parametrize("pattern", [r"(\w+ )*\w+", 'say "(a|b)+\\\\"', "", "é{2}|[^\\n]"])
def test_a_regex_is_one_automaton(pattern: str) -> None:
    """Of rules that repeat a group each row would look at the whole vocabulary."""
    grammar: Any = BACKEND.compile(GrammarSpec.regex(pattern))
    assert str(grammar.compiled.grammar).startswith('root ::= Regex("')


def test_a_warning_of_re_is_a_refusal_where_it_is_an_error() -> None:
    with pytest.raises(GrammarCompileError, match="nested set"):
        to_fullmatch("[[:alpha:]]")


ATOMS = ["a", "b", "[ab]", ".", "a*", "b?", "(?:ab)+", "^", "$", r"\A", r"\Z", "^a", "b$"]
ATOMS += ["(?:^a|b)", "(a|b$)", "(?:^|b)a", "a(?:$|b)", "(^a)?b"]
ALTERNATIVES = st.lists(
    st.lists(st.sampled_from(ATOMS), max_size=3).map("".join), min_size=1, max_size=3
)
WITH_C = ["".join(text) for size in range(5) for text in itertools.product("abc", repeat=size)]


@example(["^$", "^a"], "{}")
@example(["^a", "b$"], "({})")
@example(["^a$", "^b$"], "{}")
@given(ALTERNATIVES, st.sampled_from(["{}", "({})", "({})a", "({})$"]))
def test_anchors_bind_where_they_stand(alternatives: list[str], form: str) -> None:
    """Each alternative has its own, or the pattern is refused."""
    pattern = form.format("|".join(alternatives))
    try:
        written = re.compile(readable(to_search(pattern)))
    except GrammarCompileError:
        return
    for text in WITH_C:
        assert (re.search(pattern, text) is None) == (written.fullmatch(text) is None), text


@pytest.mark.parametrize(
    ("pattern", "values", "others"),
    [
        ("^$|^https://", ["", "https://", "https://a"], ["http://", "a https://"]),
        ("^ftp|gz$", ["ftp", "ftp.x", "a.gz", "gz"], ["gz.x", "xftp"]),
        ("^(a|b$)", ["a", "axx", "b"], ["bx", "xa"]),
        ("^a$|^b$", ["a", "b"], ["ab", "xb"]),
    ],
)
def test_a_schema_s_pattern_is_searched_for(
    pattern: str, values: list[str], others: list[str]
) -> None:
    spec = GrammarSpec.json_schema({"type": "string", "pattern": pattern})
    grammar = BackendChoice("auto", BYTES).compile(spec)
    assert [value for value in values if not accepts(grammar, json.dumps(value))] == []
    assert [value for value in others if accepts(grammar, json.dumps(value))] == []
