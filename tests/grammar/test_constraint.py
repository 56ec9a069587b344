"""Constraints: the original moves on committed tokens only, the fork goes ahead and comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.constraint import Constraint, Fork
from tests.toys import EOS, ToyCompiled, ToyMatcher, hashed_rule, text_rule


def matchers(constraint: Constraint) -> tuple[ToyMatcher, ToyMatcher]:
    original, fork = constraint._original, constraint._fork.matcher
    assert isinstance(original, ToyMatcher)
    assert isinstance(fork, ToyMatcher)
    return original, fork


def legal_walk(rule_seed: int, picks: list[int]) -> list[int]:
    tokens: list[int] = []
    rule = hashed_rule(rule_seed)
    for pick in picks:
        options = sorted(rule(tuple(tokens)))
        tokens.append(options[pick % len(options)])
        if tokens[-1] == EOS:
            break
    return tokens


PICKS = st.lists(st.integers(0, 11), max_size=6)


@given(st.integers(0, 5), st.lists(st.tuples(PICKS, st.integers(0, 6), PICKS), max_size=4))
def test_drafts_never_move_the_original(
    seed: int, steps: list[tuple[list[int], int, list[int]]]
) -> None:
    rule = hashed_rule(seed)
    constraint = Constraint(ToyCompiled(rule))
    original, ahead = matchers(constraint)
    committed: list[int] = []
    for picks, agreed, others in steps:
        fork = constraint.fork()
        for pick in picks:
            if not ahead.is_terminated():
                fork.accept(sorted(ahead.legal())[pick % len(ahead.legal())])
        assert original.tokens == committed
        assert ahead.tokens == committed + fork.token_ids
        taken = fork.token_ids[:agreed]
        for pick in others:
            if EOS not in (*committed, *taken):
                options = sorted(rule((*committed, *taken)))
                taken.append(options[pick % len(options)])
        assert constraint.commit(taken) == taken
        committed += taken
        assert original.tokens == ahead.tokens == constraint.committed == committed
        assert constraint.is_terminated == (EOS in committed)
        if constraint.is_terminated:
            break


@given(st.integers(0, 5), PICKS)
def test_fork_takes_everything_back(seed: int, picks: list[int]) -> None:
    constraint = Constraint(ToyCompiled(hashed_rule(seed)))
    _, ahead = matchers(constraint)
    for token in legal_walk(seed, picks):
        assert constraint.fork() is constraint._fork
        assert ahead.tokens == []
        constraint._fork.accept(token)


def test_refused_tokens_change_nothing() -> None:
    fork = Fork(ToyCompiled(text_rule([b"ab"])).new_matcher())
    assert not fork.accept(1)
    assert fork.token_ids == []
    assert fork.accept(0)
    assert fork.accept(1)
    fork.rollback_to(1)
    fork.rollback_to(5)
    assert fork.token_ids == [0]


def test_tokens_after_the_end_are_dropped() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"a"])))
    assert constraint.commit([0, EOS, 3, 3]) == [0, EOS]
    assert constraint.is_terminated
    assert constraint.commit([3]) == []
    assert constraint.committed == [0, EOS]


def test_a_refused_commit_raises() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"abc"])))
    constraint.commit([0])
    with pytest.raises(GrammarStateError, match="token 3 at output position 2"):
        constraint.commit([1, 3])


def test_a_fork_that_disagrees_raises() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"ab"])))
    _, ahead = matchers(constraint)
    ahead.compiled = ToyCompiled(text_rule([b"cd"]))
    with pytest.raises(GrammarStateError, match="fork refused token 0"):
        constraint.commit([0])
