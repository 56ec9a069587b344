"""A start's matcher, masks, forks and rollbacks are those of the whole text parsed from scratch."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec, Start
from guided_spec.grammar.text.markers import AfterGrammar
from guided_spec.grammar.text.state import TextState
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.bitmask import unpack_bitmask
from tests.grammar.completion.spelled import (
    EOS,
    HIDDEN,
    MARKERS,
    OTHER,
    SPELLED,
    admitted,
    boundary,
    legal,
    splits,
    token,
)
from tests.toys import CPU, ToyCompiled, text_rule

PATTERN = "(?:ab|ba|c){1,3}"
TEXTS = [b"ab", b"ba", b"abba", b"cab", b"c", b"bab"]
BACKENDS = ("toy", "xgrammar")
MARKER_TEXTS = ("ab", "aba", "c", "bcb", "a<s>b", "<s>", "aab", "aaa", "é")


@cache
def grammar(backend: str, marker: str, budget: int | None = None) -> AfterGrammar:
    inner: CompiledGrammar
    if backend == "toy":
        inner = ToyCompiled(text_rule(TEXTS, SPELLED), SPELLED)
        inner.excluded = frozenset({HIDDEN, OTHER})
    else:
        inner = XGrammarBackend(SPELLED, compile_threads=1).compile(GrammarSpec.regex(PATTERN))
    return AfterGrammar(inner, MARKERS.find(Start(marker)), budget)


def is_whole(data: bytes, backend: str) -> bool:
    if backend == "toy":
        return data in TEXTS
    return re.fullmatch(PATTERN, data.decode()) is not None


def expected(after: AfterGrammar, token_ids: list[int]) -> frozenset[int]:
    return legal(after.inner, after.marker, after.budget, token_ids)


def check(matcher: TextState, after: AfterGrammar, token_ids: list[int]) -> None:
    ended = bool(token_ids) and token_ids[-1] == EOS
    assert matcher.is_terminated() == ended
    if not ended:
        assert admitted(matcher) == expected(after, token_ids)


BUDGETS = st.none() | st.integers(0, 4)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(-1, EOS + 1)),
        st.tuples(st.just("legal"), st.integers(0, 99)),
        st.tuples(st.just("marker"), st.integers(0, 99)),
        st.tuples(st.just("rollback"), st.integers(0, 5)),
        st.tuples(st.just("fork"), st.integers(0, 1)),
    ),
    max_size=14,
)


@pytest.mark.parametrize("backend", BACKENDS)
@given(st.sampled_from(MARKER_TEXTS), BUDGETS, MOVES)
def test_any_moves(
    backend: str, text: str, budget: int | None, moves: list[tuple[str, int]]
) -> None:
    """Legal and illegal tokens, rollbacks and forks, in any order, over the boundary and back."""
    after = grammar(backend, text, budget)
    matcher = after.new_matcher()
    token_ids: list[int] = []
    left: list[tuple[TextState, list[int]]] = []
    for move, number in moves:
        assert isinstance(matcher, TextState)
        ended = matcher.is_terminated()
        if move == "rollback":
            count = min(number, len(token_ids))
            matcher.rollback(count)
            token_ids = token_ids[: len(token_ids) - count]
        elif move == "fork":
            other = matcher.fork()
            left.append((matcher if number else other, list(token_ids)))
            matcher = other if number else matcher
        elif not ended:
            options = sorted(expected(after, token_ids))
            wanted = [number] if move == "accept" else [options[number % len(options)]]
            if move == "marker" and boundary(after.marker, token_ids) is None:
                ways = list(splits(text.replace("<s>", "").encode())) or [[HIDDEN]]
                wanted = ways[number % len(ways)]
            token_ids = walk(matcher, after, token_ids, wanted)
        check(matcher, after, token_ids)
    for other, known in left:
        check(other, after, known)


def walk(
    matcher: TextState, after: AfterGrammar, token_ids: list[int], wanted: list[int]
) -> list[int]:
    """Accept what is legal of ``wanted``; the rest must be refused."""
    for token_id in wanted:
        if matcher.is_terminated() or (matcher.is_bound and not 0 <= token_id <= EOS):
            break  # no one asks a backend's matcher for these
        is_legal = token_id in expected(after, token_ids)
        assert matcher.accept_token(token_id) == is_legal
        if not is_legal:
            break
        token_ids = [*token_ids, token_id]
    return token_ids


@st.composite
def texts(draw: Any, backend: str) -> tuple[AfterGrammar, list[int]]:
    """Free tokens, a split marker, and a whole text of the grammar behind it."""
    text = draw(st.sampled_from(MARKER_TEXTS))
    after = grammar(backend, text, draw(st.none() | st.integers(0, 6)))
    token_ids: list[int] = []
    for token_id in draw(st.lists(st.integers(0, EOS - 1), max_size=6)):
        if token_id in expected(after, token_ids):
            token_ids.append(token_id)
    if "<s>" not in text:
        for token_id in draw(st.sampled_from(list(splits(text.encode())))):
            if token_id in expected(after, token_ids):
                token_ids.append(token_id)
    while boundary(after.marker, token_ids) is None:
        shown = MARKERS.find(Start(text)).spelling
        token_ids.append(shown[_state(after, token_ids)])
    while EOS not in token_ids:
        options = sorted(expected(after, token_ids))
        enough = EOS in options and len(token_ids) > 8
        token_ids.append(EOS if enough else draw(st.sampled_from(options)))
    return after, token_ids


def _state(after: AfterGrammar, token_ids: list[int]) -> int:
    state = 0
    for token_id in token_ids:
        state = after.marker.step(state, token_id) or 0
    return state


@pytest.mark.parametrize("backend", BACKENDS)
@given(st.data())
def test_blocks_of_any_size_anywhere(backend: str, data: st.DataObject) -> None:
    """The boundary at every offset of draft blocks; rows, refusals and commits as from scratch."""
    after, token_ids = data.draw(texts(backend))
    constraint = Constraint(after)
    done: list[int] = []
    while len(done) < len(token_ids):
        size = data.draw(st.integers(0, 6))
        draft = token_ids[len(done) : len(done) + size]
        wrong = data.draw(st.integers(0, 2 * size + 1))
        if wrong < len(draft):
            draft[wrong] = data.draw(st.integers(0, EOS))
        rows = MaskRows(1, 7, SPELLED.vocab_size, CPU)
        lookahead = Lookahead.fork([constraint], rows, [6])
        legal_part = lookahead.extend([draft])[0]
        assert legal_part == _legal_part(after, done, draft)
        bits = lookahead.finish(len(draft))
        assert bits is not None
        for depth in range(len(legal_part) + 1):
            here = [*done, *legal_part[:depth]]
            if EOS not in here:
                row = unpack_bitmask(bits[0, depth], SPELLED.vocab_size)
                assert frozenset(torch.nonzero(row)[:, 0].tolist()) == expected(after, here)
        agreed = 0
        while agreed < len(legal_part) and legal_part[agreed] == token_ids[len(done) + agreed]:
            agreed += 1
        taken = token_ids[len(done) : len(done) + data.draw(st.integers(0, agreed)) + 1]
        assert constraint.commit(taken) == taken
        done += taken
    assert constraint.is_terminated
    free = boundary(after.marker, token_ids)
    assert free is not None
    assert is_whole(b"".join(SPELLED.text_bytes[t] for t in token_ids[free:]), backend)


def _legal_part(after: AfterGrammar, done: list[int], draft: list[int]) -> list[int]:
    kept: list[int] = []
    for token_id in draft:
        if EOS in kept or token_id not in expected(after, [*done, *kept]):
            break
        kept.append(token_id)
    return kept


def test_rows_of_the_free_part_forbid_stop_tokens_only() -> None:
    after = grammar("xgrammar", "c")
    assert admitted(after.new_matcher()) == set(range(EOS)) - {token("cab")}
    assert after.excluded == frozenset()
    bitmask = np.full((1, 1), 7, dtype=np.int32)
    assert after.new_matcher().fill_next_token_bitmask(bitmask)
    assert bitmask[0, 0] == ~(1 << EOS) & ~(1 << token("cab"))


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_writes_the_marker_the_tokenizers_way(budget: int) -> None:
    matcher = grammar("toy", "aba", budget).new_matcher()
    for _ in range(budget):
        assert len(admitted(matcher)) > 9
        assert matcher.accept_token(OTHER)
    assert admitted(matcher) == {token("aba")}
    assert not matcher.accept_token(token("a"))
    assert matcher.accept_token(token("aba"))
    assert not matcher.accept_token(OTHER)
    assert matcher.accept_token(token("ab"))


def test_a_budget_completes_a_marker_that_was_begun() -> None:
    matcher = grammar("toy", "aba", 1).new_matcher()
    assert matcher.accept_token(token("ab"))
    assert admitted(matcher) == {token("a")}


def test_the_style_follows_the_text() -> None:
    backend = GrammarPipeline(XGrammarBackend(SPELLED), markers=MARKERS)
    assert backend.compile(GrammarSpec.regex("a").after("b")).new_style_matcher() is None
    rule, style = text_rule([b"ab", b"a b"], SPELLED), text_rule([b"a b"], SPELLED)
    after = AfterGrammar(ToyCompiled(rule, SPELLED, style), MARKERS.find(Start("c")))
    matcher = after.new_style_matcher()
    assert matcher is not None
    assert all(matcher.accept_token(token(text)) for text in ("b", "c", "a"))
    assert admitted(matcher) == {token(" ")}


def test_a_backend_compiles_both() -> None:
    backend = GrammarPipeline(XGrammarBackend(SPELLED), markers=MARKERS)
    spec = GrammarSpec.regex("[ab]")
    assert not isinstance(backend.compile(spec), AfterGrammar)
    assert isinstance(backend.compile(spec.after("ab")), AfterGrammar)
    for broken in (GrammarSpec.regex("[").after("a"), spec.after(), spec.after("</s>")):
        with pytest.raises(GrammarCompileError):
            backend.compile(broken)
    with pytest.raises(GrammarCompileError, match="start"):
        XGrammarBackend(SPELLED).compile(spec.after("a"))


def test_a_spec_with_a_start_is_a_spec() -> None:
    spec = GrammarSpec.regex("a")
    after = spec.after([1, 2], reasoning_budget=3)
    assert after.start == Start((1, 2), 3)
    assert hash(after) == hash(spec.after((1, 2), reasoning_budget=3))
    assert after != spec
    assert after.after().start == Start()


@pytest.mark.parametrize("marker", ["", [], (), 3, [1.5], [-1], ["a"], [True], b""])
def test_wrong_markers_are_named(marker: Any) -> None:
    with pytest.raises(ConfigError, match="marker="):
        GrammarSpec.regex("a").after(marker)


@pytest.mark.parametrize("symbol", ["a", [1]])
def test_a_marker_is_short(symbol: str | list[int]) -> None:
    spec = GrammarSpec.regex("a")
    assert spec.after(symbol * 128).start is not None
    with pytest.raises(ConfigError, match="^marker='129 letters or tokens': must have at most 128"):
        spec.after(symbol * 129)


@pytest.mark.parametrize("budget", [-1, 1.0, True, "9"])
def test_wrong_budgets_are_named(budget: Any) -> None:
    with pytest.raises(ConfigError, match="reasoning_budget="):
        GrammarSpec.regex("a").after("b", reasoning_budget=budget)
