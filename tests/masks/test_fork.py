"""A fork whose library's matcher goes along alone is one that asks all those around it."""

from __future__ import annotations

from functools import cache, partial
from typing import Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher, legal_row
from guided_spec.grammar.spec import GrammarSpec
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

    kind: Literal["accept", "roll back", "ask", "begin", "commit", "advance"]
    pick: int


def replayed(grammar: CompiledGrammar, tokens: list[int]) -> GrammarMatcher:
    """A new matcher behind ``tokens``."""
    matcher = grammar.new_matcher()
    assert all(map(matcher.accept_token, tokens))
    return matcher


# Mostly forwards, and mostly by tokens that leave much to come.
KINDS = [*["accept"] * 6, "roll back", "ask", "begin", "commit", "advance"]
MOVES = st.lists(st.builds(Move, st.sampled_from(KINDS), st.integers(0, 300)), max_size=40)


@given(st.integers(0, len(SPECS) - 1), st.sampled_from(BUDGETS), MOVES)
def test_a_fork_is_where_its_tokens_lead(at: int, budget: int | None, moves: list[Move]) -> None:
    """Whatever is asked in between: its rows, its end, and what it refuses."""
    grammar = grammar_of(at, budget)
    fork, committed = Fork(grammar.new_matcher(), grammar.excluded), list[int]()
    fork.begin()
    for kind, pick in moves:
        if kind == "accept" and not fork.is_terminated:
            options = legal(row_of(replayed(grammar, [*committed, *fork.token_ids])))
            token = [*options, *range(SIZE)][pick % (len(options) + SIZE)]
            assert fork.accept(token) == (token in options)
        elif kind == "roll back":
            fork.rollback_to(pick % (len(fork.token_ids) + 1))
        elif kind == "advance":
            wanted = fork.token_ids[: pick % (len(fork.token_ids) + 1)]
            if EOS not in wanted:
                options = legal(row_of(replayed(grammar, [*committed, *wanted])))
                wanted.append(options[pick % len(options)])
            assert fork.advance(wanted) == len(wanted)
            assert fork.token_ids == wanted
        elif kind == "commit" and not fork.is_terminated:
            committed += fork.token_ids
            fork.commit()
        elif kind == "begin":
            fork.begin()
        matcher = replayed(grammar, [*committed, *fork.token_ids])
        assert fork.is_terminated == matcher.is_terminated()
        if not fork.is_terminated:
            assert np.array_equal(row_of(fork.row_source), row_of(matcher))
        if kind == "ask":
            assert fork.matcher.is_terminated() == matcher.is_terminated()
            assert fork.is_terminated or np.array_equal(row_of(fork.matcher), row_of(matcher))


def test_the_library_s_matcher_goes_alone() -> None:
    """The property above would hold without that, too."""
    grammar = grammar_of(0, 40)
    fork = Constraint(grammar).fork()
    around, asked = fork._matcher, list[int]()
    around.accept_token = asked.append  # type: ignore[method-assign, assignment]
    assert all(map(fork.accept, b'{"n": '))
    fork.rollback_to(3)
    assert fork.accept(ord('"'))
    assert asked == []
    assert fork.matcher is around
    assert bytes(fork.matcher._token_ids) == b'{"n"'  # type: ignore[attr-defined]


@pytest.mark.parametrize("budget", [9, 10, 13])
def test_near_the_budget_s_end_its_rows_are_cut(budget: int) -> None:
    """The library's matcher alone would write digits for ever."""
    grammar = grammar_of(0, budget)
    fork = Constraint(grammar).fork()
    assert all(map(fork.accept, b'{"n": '))
    while not fork.is_terminated:
        assert fork.accept(legal(row_of(fork.row_source))[0])
    assert len(fork.token_ids) <= budget
