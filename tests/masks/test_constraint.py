"""Constraints: the original moves on committed tokens only, the fork goes ahead and comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.text.state import new_text
from guided_spec.masks.constraint import Constraint, Fork
from guided_spec.ops.mask_words import num_mask_words
from tests.toys import EOS, VOCAB_SIZE, ToyCompiled, ToyMatcher, hashed_rule, text_rule


def matchers(constraint: Constraint) -> tuple[ToyMatcher, ToyMatcher]:
    original, fork = constraint._original.own_matcher, constraint._fork.text.own_matcher
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
                fork.text.accept_token(sorted(ahead.legal())[pick % len(ahead.legal())])
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
        constraint._fork.text.accept_token(token)


def test_refused_tokens_change_nothing() -> None:
    fork = Fork(new_text(ToyCompiled(text_rule([b"ab"]))))
    assert not fork.text.accept_token(1)
    assert fork.token_ids == []
    assert fork.text.accept_token(0)
    assert fork.text.accept_token(1)
    fork.rollback_to(1)
    fork.rollback_to(5)
    assert fork.token_ids == [0]


def test_tokens_after_the_end_are_dropped() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"a"])))
    assert constraint.commit([0, EOS, 3, 3]) == [0, EOS]
    assert constraint.is_terminated
    assert constraint.commit([3]) == []
    assert constraint.committed == [0, EOS]


@given(st.integers(0, 5), PICKS, PICKS, st.booleans())
def test_tokens_that_are_taken_back_were_never_there(
    seed: int,
    kept: list[int],
    picks: list[int],
    is_late: bool,  # noqa: FBT001
) -> None:
    """Whether the matchers have read them or not."""
    tokens = legal_walk(seed, [*kept, *picks])
    count = max(len(tokens) - len(kept), 0)
    constraint = Constraint(ToyCompiled(hashed_rule(seed)), [EOS])
    for token in tokens:
        (constraint.commit_ahead if is_late else constraint.commit)([token])
    constraint.take_back(count)
    assert constraint.committed == tokens[: len(tokens) - count]
    assert constraint.catch_up() is None
    original, ahead = matchers(constraint)
    assert original.tokens == ahead.tokens == constraint.committed
    assert constraint.is_terminated == (EOS in constraint.committed)


def test_a_refused_commit_raises() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"abc"])))
    constraint.commit([0])
    with pytest.raises(GrammarStateError, match="token 3 at output position 2"):
        constraint.commit([1, 3])


TEXT = b'abcd{}":'  # no token occurs twice: one that is forgotten is missed at once
WALK = [*range(8), EOS]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=8), st.data())
def test_matchers_that_forget_are_rebuilt(
    steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whichever forgets, and whenever: behind every commit both stand at the committed text."""
    constraint = Constraint(ToyCompiled(text_rule([TEXT])))
    expected = 0
    for drafted, length in steps:
        done = len(constraint.committed)
        broken = data.draw(st.sampled_from(["none", "original", "fork", "both"]))
        lost = 0
        for name, matcher in zip(("original", "fork"), matchers(constraint), strict=True):
            if broken in (name, "both") and done:
                lost += 1
                del matcher.tokens[data.draw(st.integers(0, done - 1)) :]
        fork = constraint.fork()
        for token in WALK[done : done + drafted]:
            fork.text.accept_token(token)
        taken = WALK[done : done + length]
        assert constraint.commit(taken) == taken
        expected += bool(lost and taken)
        assert constraint.resyncs == expected
        original, ahead = matchers(constraint)
        assert original.tokens == ahead.tokens == constraint.committed == WALK[: done + length]
        if constraint.is_terminated:
            break


def test_a_matcher_that_refuses_once_is_rebuilt() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"ab"])))
    for matcher in matchers(constraint):
        broken = ToyCompiled(text_rule([b"ab"]))
        broken.refused = frozenset({0})
        matcher.compiled = broken
    assert constraint.commit([0]) == [0]
    assert constraint.resyncs == 1
    assert constraint.fork().text.accept_token(1)
    assert constraint.commit([1, EOS, 3]) == [1, EOS]
    assert constraint.resyncs == 1


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("which", [0, 1], ids=["original", "fork"])
def test_a_matcher_that_takes_the_text_for_complete_is_rebuilt(
    which: int, *, is_later: bool
) -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"ab", b"abc"])), [EOS])
    commit = constraint.commit_ahead if is_later else constraint.commit
    constraint.commit([0])
    matchers(constraint)[which].tokens = [0, 1, EOS]
    assert commit([1]) == [1]
    assert constraint.catch_up() is None
    assert constraint.resyncs == 1
    assert not constraint.is_terminated
    assert commit([2, EOS]) == [2, EOS]
    assert constraint.is_terminated


def test_a_rebuilt_matcher_that_refuses_raises() -> None:
    """The committed text and the grammar have parted: nothing is kept of the step."""
    constraint = Constraint(ToyCompiled(text_rule([b"abc"])))
    constraint.commit([0, 1])
    constraint.compiled = ToyCompiled(text_rule([b"adc"]))
    matchers(constraint)[0].tokens.clear()
    with pytest.raises(GrammarStateError, match="token 1 at output position 1, .*a new matcher"):
        constraint.commit([2])
    assert constraint.committed == [0, 1]
    assert constraint.resyncs == 0


def test_a_rebuilt_matcher_that_ends_too_early_raises() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"ab"])))
    constraint.committed = [0, 1, EOS, 1]
    with pytest.raises(GrammarStateError, match="token 1 at output position 3"):
        constraint.commit([1])


# --- matchers may read later ---


@given(st.integers(0, 5), st.lists(st.tuples(PICKS, st.integers(0, 6), PICKS), max_size=5))
def test_matchers_that_read_later_change_nothing(
    seed: int, steps: list[tuple[list[int], int, list[int]]]
) -> None:
    rule = hashed_rule(seed)
    later, at_once = (Constraint(ToyCompiled(rule), [EOS]) for _ in range(2))
    for picks, agreed, others in steps:
        fork = later.fork()
        assert matchers(later)[1].tokens == later.committed
        for pick in picks:
            if not fork.text.is_terminated():
                options = sorted(rule((*later.committed, *fork.token_ids)))
                fork.text.accept_token(options[pick % len(options)])
        taken = fork.token_ids[:agreed]
        for pick in others:
            options = sorted(rule((*later.committed, *taken))) if EOS not in taken else [3]
            taken.append(options[pick % len(options)])
        assert later.commit_ahead(taken) == at_once.commit(taken)
        assert later.committed == at_once.committed
        assert later.is_terminated == at_once.is_terminated
        both = matchers(later)
        if later.is_terminated:
            assert all(matcher.tokens == later.committed for matcher in both)
        if len(picks) % 2:  # else the next commit sees to it
            assert later.catch_up() is None
            assert all(matcher.tokens == later.committed for matcher in both)
        if later.is_terminated:
            break
    assert later.resyncs == 0


@pytest.mark.parametrize("which", [0, 1], ids=["original", "fork"])
@pytest.mark.parametrize("settles", [False, True])
def test_what_was_forgotten_is_found_later(which: int, *, settles: bool) -> None:
    constraint = Constraint(ToyCompiled(text_rule([TEXT])), [EOS])
    constraint.commit_ahead(WALK[:2])
    constraint.catch_up()
    matchers(constraint)[which].tokens.clear()
    assert constraint.commit_ahead(WALK[2:4]) == WALK[2:4]
    if settles:
        assert constraint.catch_up() is None
    assert constraint.commit(WALK[4:5]) == WALK[4:5]
    assert constraint.resyncs == 1
    assert all(matcher.tokens == WALK[:5] for matcher in matchers(constraint))


def refusing(which: int) -> Constraint:
    """One matcher, and whatever is made anew, refuses token 1 at position 1."""
    constraint = Constraint(ToyCompiled(text_rule([b"abc"])), [EOS])
    constraint.compiled = ToyCompiled(text_rule([b"adc"]))
    matchers(constraint)[which].compiled = constraint.compiled
    return constraint


def test_an_original_that_refuses_for_good_ends_the_next_commit() -> None:
    constraint = refusing(0)
    assert constraint.commit_ahead([0, 1]) == [0, 1]
    assert "token 1 at output position 1" in str(constraint.catch_up())
    for commit in (constraint.commit, constraint.commit_ahead):
        with pytest.raises(GrammarStateError, match="token 1 at output position 1"):
            commit([2])
    assert constraint.committed == [0, 1]


def test_matchers_are_not_asked_about_a_text_that_goes_on() -> None:
    constraint = Constraint(ToyCompiled(text_rule([TEXT])), [EOS])
    assert constraint.commit_ahead(WALK[:2]) == WALK[:2]
    assert all(not matcher.tokens for matcher in matchers(constraint))
    assert constraint.fork().token_ids == []
    assert [matcher.tokens for matcher in matchers(constraint)] == [[], WALK[:2]]
    assert constraint.catch_up() is None
    assert [matcher.tokens for matcher in matchers(constraint)] == [WALK[:2], WALK[:2]]


@pytest.mark.parametrize("ends", [None, [WALK[1]]], ids=["unknown", "known"])
def test_a_text_that_may_end_is_committed_at_once(ends: list[int] | None) -> None:
    constraint = Constraint(ToyCompiled(text_rule([TEXT])), ends)
    assert constraint.commit_ahead(WALK[:2]) == WALK[:2]
    assert all(matcher.tokens == WALK[:2] for matcher in matchers(constraint))


def test_a_fork_that_refuses_for_good_ends_the_next_commit() -> None:
    constraint = refusing(1)
    assert constraint.commit_ahead([0, 1]) == [0, 1]
    assert constraint.fork().token_ids == []  # as far as it went
    with pytest.raises(GrammarStateError, match="token 1 at output position 1"):
        constraint.commit_ahead([2])
    assert constraint.committed == [0, 1]


def row_of(fork: Fork) -> list[int]:
    row = torch.zeros((2, num_mask_words(VOCAB_SIZE)), dtype=torch.int32)
    fork.row_source.fill_next_token_bitmask(row, 1)
    assert not row[0].any()
    found: list[int] = row[1].tolist()
    return found


@given(st.integers(0, 5), PICKS, PICKS)
def test_a_row_that_was_prepared_is_the_matchers(
    seed: int, before: list[int], draft: list[int]
) -> None:
    plain, prepared = (Constraint(ToyCompiled(hashed_rule(seed))) for _ in range(2))
    tokens = [token for token in legal_walk(seed, before) if token != EOS]
    for constraint in (plain, prepared):
        constraint.commit_ahead(tokens)
    prepared.prepare(num_mask_words(VOCAB_SIZE))
    assert prepared.has_row
    assert not plain.has_row
    forks = [constraint.fork() for constraint in (plain, prepared)]
    assert row_of(forks[0]) == row_of(forks[1])
    for pick in draft:  # behind it the matcher is asked
        if forks[0].text.is_terminated():
            break
        _, ahead = matchers(plain)
        token = sorted(ahead.legal())[pick % len(ahead.legal())]
        assert [fork.text.accept_token(token) for fork in forks] == [True, True]
        if not forks[0].text.is_terminated():
            assert row_of(forks[0]) == row_of(forks[1])
    again = [constraint.fork() for constraint in (plain, prepared)]
    assert row_of(again[0]) == row_of(again[1])
    if forks[0].token_ids:
        for constraint in (plain, prepared):
            constraint.commit(forks[0].token_ids[:1])
        assert not prepared.has_row


@given(st.integers(0, 5), PICKS, st.integers(0, 6), PICKS)
def test_it_restarts_from_its_tokens(
    seed: int, picks: list[int], length: int, draft: list[int]
) -> None:
    """Wherever a step that raised left it."""
    tokens = [token for token in legal_walk(seed, picks) if token != EOS]
    constraint = Constraint(ToyCompiled(hashed_rule(seed)))
    constraint.commit_ahead(tokens)
    for pick in draft:
        constraint.fork().text.accept_token(pick)
    constraint.restart(length)
    original, ahead = matchers(constraint)
    assert constraint.committed == original.tokens == ahead.tokens == tokens[:length]
    assert constraint.commit(tokens[length:]) == tokens[length:]
