"""A fork is where its tokens lead, whatever was asked of it before."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher, legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.parts import new_parts
from guided_spec.grammar.text.row_filter import Probe, RowFilter
from guided_spec.grammar.text.state import TextState, new_text
from guided_spec.masks.constraint import Constraint, Fork
from tests.masks.walks import BYTES, EOS

SIZE = BYTES.vocab_size
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec.json_schema(SCHEMA),
    GrammarSpec.json_object(),
    GrammarSpec.regex("[ab]{1,9}(c|dd)?"),
]
BUDGETS = [None, 4, 9, 15, 40]
ENDINGS = EndingsCache(BYTES)


@cache
def grammar_of(at: int, budget: int | None) -> CompiledGrammar:
    compiled = XGrammarBackend(BYTES).compile(SPECS[at])
    if budget is None:
        return compiled
    return ENDINGS.bound(compiled, max(budget, (9, 9, 2)[at]), is_required=True)


row_of = partial(legal_row, vocab_size=SIZE)


def legal(row: NDArray[np.int32]) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:SIZE]).tolist()


class Move(NamedTuple):
    """pick: which legal token, or how many are kept; above all legal ones, any token."""

    kind: Literal["accept", "roll back", "look ahead", "fork", "commit", "advance"]
    pick: int


def replayed(grammar: CompiledGrammar, tokens: list[int]) -> GrammarMatcher:
    """A new matcher behind ``tokens``."""
    matcher = grammar.new_matcher()
    assert all(map(matcher.accept_token, tokens))
    return matcher


# Mostly forwards, and mostly by tokens that leave much to come.
KINDS = [*["accept"] * 6, "roll back", "look ahead", "fork", "commit", "advance"]
MOVES = st.lists(st.builds(Move, st.sampled_from(KINDS), st.integers(0, 300)), max_size=40)


@given(st.integers(0, len(SPECS) - 1), st.sampled_from(BUDGETS), MOVES)
def test_a_fork_is_where_its_tokens_lead(at: int, budget: int | None, moves: list[Move]) -> None:
    """Whatever is asked in between: its rows, its end, and what it refuses."""
    grammar = grammar_of(at, budget)
    fork, committed = Fork(new_text(grammar)), list[int]()
    for kind, pick in moves:
        text = fork.text
        if kind == "accept" and not text.is_terminated():
            options = legal(row_of(replayed(grammar, [*committed, *fork.token_ids])))
            token = [*options, *range(SIZE)][pick % (len(options) + SIZE)]
            assert text.accept_token(token) == (token in options)
        elif kind == "roll back":
            fork.rollback_to(pick % (fork.depth + 1))
        elif kind == "advance":
            wanted = fork.token_ids[: pick % (fork.depth + 1)]
            if EOS not in wanted:
                options = legal(row_of(replayed(grammar, [*committed, *wanted])))
                wanted.append(options[pick % len(options)])
            assert fork.advance(wanted) == len(wanted)
            assert fork.token_ids == wanted
        elif kind == "commit" and not text.is_terminated():
            committed += fork.token_ids
            fork.commit()
        elif kind == "look ahead" and not text.is_terminated():
            look_ahead(text.without_budget(), pick)
        elif kind == "fork":
            fork = Fork(text.fork(), fork.start)
        matcher = replayed(grammar, [*committed, *fork.token_ids])
        assert fork.text.token_ids == [*committed, *fork.token_ids]
        assert fork.text.is_terminated() == matcher.is_terminated()
        if not matcher.is_terminated():
            assert np.array_equal(row_of(fork.text), row_of(matcher))


def look_ahead(probe: Probe, pick: int) -> None:
    """Go a few tokens on without the budget, and back."""
    count = 0
    while count < pick % 6 and not probe.is_terminated():
        options = legal(row_of(probe))
        assert probe.accept_token(options[pick % len(options)])
        count += 1
    probe.rollback(count)


def test_a_filter_is_not_asked_where_it_forbids_nothing() -> None:
    """The property above would hold without that, too."""
    parts, asked = new_parts(grammar_of(0, 40)), list[str]()
    filters: Any = (*(Asked(asked, one) for one in parts.filters),)
    assert parts.limit is not None
    text = TextState.begin(parts._replace(filters=filters, limit=Asked(asked, parts.limit)))
    asked.clear()
    assert all(map(text.accept_token, b'{"n": '))
    text.rollback(4)
    assert text.accept_token(ord("n"))
    row_of(text)
    assert asked == []
    assert all(map(text.accept_token, b'": ' + b"1" * 30))
    assert "after" in asked


class Asked:
    """A filter that notes what it is asked."""

    def __init__(self, asked: list[str], inner: RowFilter) -> None:
        self._asked, self._inner = asked, inner

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("budget", [9, 10, 13])
def test_near_the_budget_s_end_its_rows_are_cut(budget: int) -> None:
    """The library's matcher alone would write digits for ever."""
    grammar = grammar_of(0, budget)
    text = Constraint(grammar).fork().text
    assert all(map(text.accept_token, b'{"n": '))
    while not text.is_terminated():
        assert text.accept_token(legal(row_of(text))[0])
    assert len(text.token_ids) <= budget
    assert text.steered
