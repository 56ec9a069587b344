"""Forced text: found whole, bounded, written in the tokenizer's tokens, and undone afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from guided_spec.config import EngineConfig
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import CanonicalTokens, Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers.grammar_forced import LONGEST_TEXT, ForcedSearch, GrammarForced
from tests.masks.walks import BYTES
from tests.toys import EOS, TEXTS, VOCABULARY, Rule, ToyCompiled, text_rule, toy_batch, toy_context

KEYS = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "b": {"type": "boolean"}},
    "required": ["name", "b"],
    "additionalProperties": False,
}
CONTEXT = toy_context()


def toy_ids(text: bytes) -> list[int]:
    return [TEXTS.index(bytes([byte])) for byte in text]


@pytest.mark.parametrize(
    ("texts", "forced", "ends"),
    [
        ([b'{"ab":1}', b'{"ab":0}'], b'{"ab":', False),  # a key
        ([b"abc", b"abd"], b"ab", False),  # a choice
        ([b'"abcd"'], b'"abcd"', True),  # one text, and nothing behind it
        ([b"a", b"ab"], b"a", False),  # may end there
        ([b"a", b"b"], b"", False),
    ],
)
def test_forced_text(texts: list[bytes], forced: bytes, *, ends: bool) -> None:
    matcher = ToyCompiled(text_rule(texts)).new_matcher()
    found = ForcedSearch(VOCABULARY).find(matcher)
    assert found == (forced, (EOS,) if ends else ())
    assert matcher.tokens == []


@pytest.mark.parametrize(
    ("spec", "forced"),
    [
        (GrammarSpec.json_schema(KEYS), b'{"name": "'),
        (GrammarSpec.choice(["north-east", "north-west"]), b"north-"),
        (GrammarSpec.json_schema({"const": "fixed"}), b'"fixed"'),
        (GrammarSpec.regex("a[0-9]"), b"a"),
    ],
)
def test_forced_text_of_real_grammars(spec: GrammarSpec, forced: bytes) -> None:
    matcher = XGrammarBackend(BYTES).compile(spec).new_matcher()
    search = ForcedSearch(BYTES)
    assert search.find(matcher).text == forced
    assert search.find(matcher).text == forced  # left where it was
    assert all(matcher.accept_token(byte) for byte in forced)


def endless(prefix: tuple[int, ...]) -> frozenset[int]:
    del prefix
    return frozenset({0})


def test_endless_grammars_are_bounded() -> None:
    found = ForcedSearch(VOCABULARY).find(ToyCompiled(endless).new_matcher())
    assert found == (b"a" * LONGEST_TEXT, ())
    drafted, _ = propose(endless, max_forced_tokens=5)
    assert drafted == [0] * 5
    compiled = XGrammarBackend(BYTES).compile(GrammarSpec.ebnf('root ::= "a" root | "a"'))
    assert ForcedSearch(BYTES).find(compiled.new_matcher()).text == b"a"


def propose(
    rule: Rule, *, style: Rule | None = None, max_forced_tokens: int = 16, committed: bytes = b""
) -> tuple[list[int], list[int]]:
    """The tokens drafted for one request, and which of them count as forced."""
    constraint = Constraint(ToyCompiled(rule, style=style))
    constraint.commit(toy_ids(committed))
    batch = toy_batch([[0], [0]], [constraint, None], k=20)
    config = EngineConfig(max_forced_tokens=max_forced_tokens)
    proposer = GrammarForced(toy_context(config=config))
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    pause = proposer.interrupts(batch, lookahead)
    assert pause is not None
    has_more = pause(0)
    draft = proposer.begin(batch, lookahead).finish()
    assert has_more == bool(lookahead.drafted[0])
    assert draft.num_tokens.tolist() == [len(lookahead.drafted[0]), 0]
    return lookahead.drafted[0], lookahead.forced[0]


def test_forced_drafts() -> None:
    rule = text_rule([b'{"ab":1}', b'{"ab":0}'])
    assert propose(rule) == (toy_ids(b'{"ab":'), [0, 1, 2, 3, 4, 5])
    assert propose(rule, committed=b'{"ab":1') == ([5, EOS], [0, 1])
    assert propose(rule, max_forced_tokens=2)[0] == toy_ids(b'{"')
    assert propose(rule, max_forced_tokens=0)[0] == []


def test_text_that_is_forced_where_a_text_begins() -> None:
    """The first request has its prompt alone, the second one has begun; the third is free."""
    rule = text_rule([b'{"ab":1}', b'{"ab":0}'])
    constraints = [Constraint(ToyCompiled(rule)) for _ in range(2)]
    constraints[1].commit(toy_ids(b"{"))
    contexts = [[0], [0, *toy_ids(b"{")], [0]]
    batch = toy_batch(contexts, [*constraints, None], k=20)
    proposer = GrammarForced(toy_context(argument="start"))
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    assert proposer.interrupts(batch, lookahead) is None
    draft = proposer.begin(batch, lookahead).finish()
    assert lookahead.drafted == [toy_ids(b'{"ab":'), [], []]
    assert draft.num_tokens.tolist() == [6, 0, 0]
    later = toy_batch(contexts[1:], [constraints[1], None], k=20)
    lookahead = Lookahead.fork(later.constraints, later.mask_rows, later.limits)
    assert proposer.begin(later, lookahead).finish().token_ids.shape == (2, 0)
    assert lookahead.num_rows == [0, 0]  # no mask was filled for it


def test_the_style_tells_where_the_grammar_leaves_whitespace_free() -> None:
    free = text_rule([b"a:b1", b"a,b1", b"a:c1"])
    style = text_rule([b"a:b1"])
    assert propose(free)[0] == toy_ids(b"a")
    assert propose(free, style=style)[0] == [*toy_ids(b"a:b1"), EOS]
    assert propose(free, style=style, committed=b"a")[0] == [*toy_ids(b":b1"), EOS]
    # The text left the style: from there on the grammar alone speaks.
    assert propose(free, style=style, committed=b"a,")[0] == [*toy_ids(b"b1"), EOS]


MERGES = (b"a", b"b", b"c", b" ", b"ab", b"abc", b" ab", b'"', b"\n", b"c\n")
MERGED = Vocabulary((*MERGES, b""), (len(MERGES),), len(MERGES) + 1)


def longest_first(text: str) -> list[int]:
    data, tokens = text.encode(), []
    while data:
        longest = max((t for t in MERGES if data.startswith(t)), key=len)
        tokens.append(MERGES.index(longest))
        data = data[len(longest) :]
    return tokens


@pytest.mark.parametrize(
    "encode", [longest_first, lambda text: longest_first(" " + text)], ids=["plain", "prefix_space"]
)
@pytest.mark.parametrize("text", [b"ab", b"abc", b"abcab", b"cab", b" abc", b'"a"', b""])
def test_tokens_are_the_tokenizers_own(encode: Callable[[str], list[int]], text: bytes) -> None:
    tokens = CanonicalTokens(encode, MERGED.token_bytes).split(text)
    assert b"".join(MERGED.token_bytes[token] for token in tokens) == text
    assert tokens == longest_first(text.decode())


def test_characters_cut_in_two_are_left_for_later() -> None:
    tokens = CanonicalTokens(lambda text: list(text.encode()), BYTES.token_bytes)
    assert tokens.split("aé".encode()[:2]) == [97]


def test_text_that_cannot_be_encoded_is_not_drafted() -> None:
    tokens = CanonicalTokens(lambda text: [len(MERGES)] * len(text), MERGED.token_bytes)
    assert tokens.split(b"ab") == []
