"""Structural tags of llguidance: the texts of xgrammar's, with rows that count for less."""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.rule_endings import RuleEndings
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher, legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tools.format import ToolRules, literal, read_choice, read_tools
from guided_spec.grammar.tools.formats import TOOL_FORMATS
from guided_spec.ops.mask_words import ids_of
from tests.grammar.tools.test_tool_formats import BACKENDS, EOS, KINDS, TOOLS, vocabulary

REFUSED = "use the backend xgrammar, which compiles it"
NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 6},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["text"],
    "additionalProperties": False,
}
NOTES = [{"type": "function", "function": {"name": "note", "parameters": NOTE}}]


@cache
def backend(kind: str) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary(kind))


def spec_of(
    name: str, kind: str, tools: list[Any], choice: str, *, parallel: bool = True
) -> GrammarSpec:
    shared = vocabulary(kind)
    stops = frozenset(n for n, token in shared.added_tokens if token in shared.stop_token_ids)
    wanted, left = read_choice(choice, read_tools(tools))
    content = TOOL_FORMATS[name].content(ToolRules(left, wanted, parallel, stops))
    return tagged(content)


def tagged(content: Any) -> GrammarSpec:
    return GrammarSpec.structural_tag({"type": "structural_tag", "format": content})


def legal(matcher: GrammarMatcher, compiled: CompiledGrammar, kind: str) -> set[int]:
    row = legal_row(matcher, vocabulary(kind).vocab_size)
    return {int(token) for token in ids_of(row)} - compiled.excluded


def is_told(token: int, before: list[int]) -> bool:
    """Whether both backends are known to say the same of a token here.

    In free text xgrammar takes bytes that are no UTF-8. llguidance's JSON strings hold neither DEL
    nor the escapes ``\\/`` and ``\\u``, and its integers may be ``-0``.
    """
    last = chr(before[-1]) if before and before[-1] < EOS else ""
    return not 127 <= token < EOS and last + chr(token) not in ("\\/", "\\u", "-0")


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=25, phases=[Phase.generate], derandomize=True, deadline=None)
@given(
    tools=TOOLS,
    choice=st.sampled_from(["auto", "required", "none", "get"]),
    kind=st.sampled_from(KINDS),
    parallel=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_rows_are_those_of_xgrammar(
    name: str, tools: Any, choice: str, kind: str, parallel: Any, seed: int
) -> None:
    spec, dice = spec_of(name, kind, tools, choice, parallel=parallel), random.Random(seed)
    try:
        other = backend(kind).compile(spec)
    except GrammarCompileError as error:
        if REFUSED not in str(error):  # but, say, that it does not compile
            raise
        return
    compiled, token_ids = BACKENDS[kind].compile(spec), list[int]()
    matchers = compiled.new_matcher(), other.new_matcher()
    for _ in range(200):
        rows = legal(matchers[0], compiled, kind), legal(matchers[1], other, kind)
        left, right = ({t for t in row if is_told(t, token_ids)} for row in rows)
        assert left == right, vocabulary(kind).decode(token_ids)
        both = left or rows[0] & rows[1]  # a mark that is spelled
        token = dice.choice(preferred(both, len(token_ids), dice))
        assert all(matcher.accept_token(token) for matcher in matchers)
        token_ids.append(token)
        assert matchers[0].is_terminated() == matchers[1].is_terminated()
        if matchers[0].is_terminated():
            break


def preferred(row: Collection[int], length: int, dice: random.Random) -> list[int]:
    if length > 80 and EOS in row:
        return [EOS]
    likely = sorted(t for t in row if t > EOS or t in frozenset(b'",:]}{[<0123456789 \n'))
    return likely if likely and dice.random() < 0.6 else sorted(row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm_4_5", "mistral", "llama3"])
def test_the_formats_that_are_asked_for_most_are_written(name: str, kind: str) -> None:
    assert backend(kind).compile(spec_of(name, kind, NOTES, "auto")).backend == "llguidance"


@pytest.mark.parametrize(
    "content",
    [
        {
            "type": "sequence",
            "elements": [
                {"type": "regex", "pattern": "[ -~]*"},
                {"type": "json_schema", "json_schema": {"type": "object"}},
            ],
        },
        {
            "type": "sequence",
            "elements": [
                {"type": "json_schema", "json_schema": {"type": "integer"}},
                literal("0 apples"),
            ],
        },
        {
            "type": "or",
            "elements": [
                {"type": "sequence", "elements": [literal("<a"), {"type": "json_schema", **word}]}
                for word in ({"json_schema": {"type": "number"}}, {"json_schema": {"enum": [7]}})
            ]
            + [literal("<a1>")],
        },
        {"type": "grammar", "grammar": 'root ::= "a"'},
        {"type": "json_schema", "json_schema": {"type": "object"}, "style": "qwen_xml"},
    ],
    ids=["pattern", "number", "beginnings", "grammar", "style"],
)
def test_what_longest_lexemes_would_cut_is_xgrammars(content: Any) -> None:
    with pytest.raises(GrammarCompileError, match=REFUSED):
        backend("bytes").compile(tagged(content))
    assert BACKENDS["bytes"].compile(tagged(content)).backend == "xgrammar"


@pytest.mark.parametrize(("most", "name"), [(8, "xgrammar"), (200, "llguidance")])
def test_counts_choose_the_backend(most: int, name: str) -> None:
    text = {"type": "string", "maxLength": most}
    schema = {"type": "object", "properties": {"t": text}, "required": ["t"]}
    tools = [{"type": "function", "function": {"name": "get", "parameters": schema}}]
    auto = AutoBackend(vocabulary("tokens"))
    compiled = auto.compile(spec_of("hermes", "tokens", tools, "required"))
    assert compiled.backend == name
    # Next to what llguidance does not write, the other one counts.
    known = {"type": "json_schema", "json_schema": schema}
    other = {"type": "grammar", "grammar": 'root ::= "a"'}
    both = tagged({"type": "sequence", "elements": [known, other]})
    assert auto.compile(both).backend == "xgrammar"


def test_what_xgrammar_refuses_is_asked_of_the_other() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^20"}
    content = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(UnsupportedSchemaError):
        BACKENDS["bytes"].compile(tagged(content))
    auto = AutoBackend(vocabulary("bytes"))
    compiled = auto.compile(tagged(content))
    assert compiled.backend == "llguidance"
    for text, is_valid in (('"2024-02-29"', True), ('"1999-01-01"', False), ('"20"', False)):
        matcher = compiled.new_matcher()
        assert all(map(matcher.accept_token, (*text.encode(), EOS))) == is_valid, text
    never = {"type": "array", "items": {"type": "object"}, "uniqueItems": True, "minItems": 2}
    with pytest.raises(UnsupportedSchemaError, match="uniqueItems"):
        auto.compile(tagged({"type": "json_schema", "json_schema": never}))


@pytest.mark.parametrize("kind", ["tokens", "call", "some"])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm_4_5"])
@pytest.mark.parametrize("seed", range(6))
def test_texts_end_within_their_budget(name: str, kind: str, seed: int) -> None:
    dice, endings = random.Random(seed), EndingsCache(vocabulary(kind))
    compiled = backend(kind).compile(spec_of(name, kind, NOTES, "required"))
    own = endings.of(compiled)
    assert isinstance(own, RuleEndings)
    most = own.cost(own.start) + seed * 7
    bound, token_ids = endings.bound(compiled, most, is_required=True), list[int]()
    matcher = bound.new_matcher()
    while not matcher.is_terminated():
        token_ids.append(dice.choice(sorted(legal(matcher, bound, kind))))
        assert matcher.accept_token(token_ids[-1])
    assert len(token_ids) <= most


def test_nothing_ends_a_text_where_a_mark_may_stand() -> None:
    shared = vocabulary("call")
    content = {
        "type": "tag",
        "begin": "<tool_call>",
        "content": literal("x"),
        "end": "</tool_call>",
    }
    compiled = backend("call").compile(tagged(content))
    matcher = compiled.new_matcher()
    names = dict(shared.added_tokens)
    for token in (names["<tool_call>"], ord("x"), names["</tool_call>"]):
        assert legal(matcher, compiled, "call") == {token}
        assert matcher.accept_token(token)
    assert legal(matcher, compiled, "call") == set(shared.stop_token_ids)


def test_a_tag_is_built_again_from_its_recipe() -> None:
    spec = spec_of("qwen3_coder", "tokens", NOTES, "auto")
    compiled: Any = backend("tokens").compile(spec)
    recipe = compiled.recipe()
    assert recipe is not None
    again: Any = backend("tokens").rebuild(spec, recipe)
    endings = EndingsCache(vocabulary("tokens"))
    costs = {endings.of(one).cost(endings.of(one).start) for one in (compiled, again)}
    assert len(costs) == 1
    assert compiled.source.text == again.source.text
    assert compiled.excluded == again.excluded
