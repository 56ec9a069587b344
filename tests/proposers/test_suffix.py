"""Suffix decoding: what is drafted, what is remembered, and what is forgotten."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.core import DecodeBatch, FinishedText, Proposer
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers import build_proposer
from guided_spec.proposers.suffix import (
    LEAST_CHANCE,
    LONGEST,
    OWN_TOKENS,
    REACH,
    READ_AT_ONCE,
    Learned,
    Suffix,
)
from tests.proposers.test_suffix_counts import count_of
from tests.toys import ToyCompiled, text_rule, toy_batch, toy_context

KIND = ("grammar", None)


@pytest.fixture
def proposer() -> Proposer:
    return build_proposer("suffix", toy_context())


def drafts_of(proposer: Proposer, batch: DecodeBatch) -> list[list[int]]:
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft = proposer.begin(batch, lookahead).finish()
    assert draft.num_tokens.tolist() == [len(row) for row in lookahead.drafted]
    return lookahead.drafted


def propose(
    proposer: Proposer, context: Sequence[int], source: Hashable = KIND, k: int = 3
) -> list[int]:
    batch = toy_batch([context], [None], k=k, limits=[9])
    batch.sources = (source,)
    return drafts_of(proposer, batch)[0]


def learn(proposer: Proposer, text: Sequence[int], source: Hashable = KIND) -> None:
    proposer.learn([FinishedText(source, text, 0)])


def test_the_more_frequent_way_is_taken_and_the_smaller_token_of_two_alike(
    proposer: Proposer,
) -> None:
    assert propose(proposer, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]) == [4, 8, 1]
    proposer.release([0])
    assert propose(proposer, [1, 2, 5, 9, 1, 2, 4, 9, 1, 2], k=1) == [4]


def test_a_longer_match_is_believed_more_than_a_shorter_one(proposer: Proposer) -> None:
    assert propose(proposer, [0, 1, 2, 7, 2, 8, 2, 8, 0, 1, 2], k=1) == [7]


def test_a_draft_is_no_longer_than_its_evidence(proposer: Proposer) -> None:
    assert propose(proposer, [1, *range(2, 11), 1], k=9) == [2, 3, 4, 5][:REACH]
    proposer.release([0])
    ways = int(1 / LEAST_CHANCE) + 1
    tokens = [token for follower in range(ways) for token in (11, follower)]
    assert propose(proposer, [*tokens, 11]) == []  # each of them is improbable


def test_the_grammar_chooses_among_what_was_seen(proposer: Proposer) -> None:
    grammar = ToyCompiled(text_rule([b"abcb"]))
    context = [0, 3, 9, 0, 3, 9, 0, 1, 2, 8, 0]
    batch = toy_batch([context, context], [Constraint(grammar), None], k=3, limits=[4, 4])
    batch.constraints[0].commit([0])  # type: ignore[union-attr]
    assert drafts_of(proposer, batch) == [[1, 2], [3, 9, 0]]


def test_drafts_go_on_behind_the_draft_up_to_the_limit(proposer: Proposer) -> None:
    batch = toy_batch([[0, 1, 2, 3, 9, 0]] * 3, [None] * 3, k=3, limits=[0, 4, 2])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    lookahead.extend([[], [1], [1]])
    proposer.begin(batch, lookahead).finish()
    assert lookahead.drafted == [[], [1, 2, 3, 9], [1, 2]]


def test_texts_of_one_source_are_drafted_from_each_other_and_from_no_other(
    proposer: Proposer,
) -> None:
    learn(proposer, [5, 6, 7, 8])
    learn(proposer, [5, 6, 9], ("grammar", "salt"))
    for source, expected in {
        KIND: [7, 8],
        ("grammar", "salt"): [9],
        ("another", None): [],
    }.items():
        assert propose(proposer, [4, 5, 6], source) == expected
    batch = toy_batch([[4, 5, 6]], [None])  # nobody knows whose text it is
    assert drafts_of(proposer, batch) == [[]]


def test_a_text_begins_behind_the_end_of_its_prompt(proposer: Proposer) -> None:
    prompt = [0, 1] * LONGEST
    proposer.learn([FinishedText(KIND, [3, *prompt, 7, 8], 1 + len(prompt))])
    assert propose(proposer, [9, *prompt[-LONGEST:]]) == [7, 8]
    assert propose(proposer, [3]) == []  # what stood before those few tokens is left out
    proposer.learn([FinishedText(KIND, [5, 3], 2)])  # which wrote nothing
    assert propose(proposer, [5], k=1) == []


def test_release_forgets_the_own_text_and_keeps_what_is_learned(proposer: Proposer) -> None:
    assert propose(proposer, [1, 2, 1], k=1) == [2]
    learn(proposer, [5, 6, 7])
    proposer.release([0, 3])
    assert propose(proposer, [9, 1]) == []
    proposer.release([0])
    assert propose(proposer, [9, 5]) == [6, 7]


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 2), max_size=6)), max_size=6))
def test_a_text_that_goes_back_is_drafted_as_a_new_one(
    steps: list[tuple[int, list[int]]],
) -> None:
    """A request that waits, or is made anew, is released; a slot may also begin another text."""
    proposer, context = build_proposer("suffix", toy_context()), [3]
    for cut, new in steps:
        if cut < len(context):
            proposer.release([0])
            context = context[: len(context) - cut]
        context = [*context, *new]
        fresh = build_proposer("suffix", toy_context())
        assert propose(proposer, context) == propose(fresh, context)


def test_another_text_in_a_slot_is_seen_without_a_release(proposer: Proposer) -> None:
    assert propose(proposer, [1, 2, 3, 1]) == [2, 3, 1]
    assert propose(proposer, [7, 8, 9, 7]) == [8, 9, 7]
    assert propose(proposer, [1]) == []


class Read(list[int]):
    """A text that counts the tokens that are read of it."""

    num_read = 0

    def __getitem__(self, at: object) -> object:  # type: ignore[override]
        found = super().__getitem__(at)  # type: ignore[call-overload]
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_step_reads_what_is_new_and_no_more_than_so_much(proposer: Proposer) -> None:
    text = Read([1, 2, 3, *[5] * (2 * READ_AT_ONCE)])
    for _ in range(3):
        text.num_read = 0
        propose(proposer, text)
        assert text.num_read <= READ_AT_ONCE + 2 * LONGEST
    text += [1, 2]
    text.num_read = 0
    assert propose(proposer, text, k=1) == [3]
    assert text.num_read <= 2 + 2 * LONGEST


def test_of_a_long_text_the_end_is_kept() -> None:
    proposer = Suffix(toy_context())
    text = [1, 2, 3, *[5] * (OWN_TOKENS - 4), 4]
    for _ in range(OWN_TOKENS // READ_AT_ONCE):
        propose_raw(proposer, text)
    counts = proposer._own[0].counts
    assert [count_of(counts, [token]) for token in (2, 5, 4)] == [1, OWN_TOKENS - 4, 1]
    text += [4]
    for _ in range(OWN_TOKENS // READ_AT_ONCE):
        propose_raw(proposer, text)
    counts = proposer._own[0].counts
    assert [count_of(counts, [token]) for token in (2, 5, 4)] == [0, OWN_TOKENS // 2 - 2, 2]


def propose_raw(proposer: Suffix, context: list[int]) -> None:
    batch = toy_batch([context], [None], k=1, limits=[4])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    proposer.propose(batch, lookahead)


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=9)), max_size=20),
)
def test_what_is_learned_has_a_bound_and_the_least_recently_used_goes_first(
    most: int, texts: list[tuple[int, list[int]]]
) -> None:
    """The reference keeps a list of all texts and looks for the one to drop."""
    learned = Learned(most)
    kept: list[tuple[int, list[int]]] = []
    uses: dict[int, int] = {}
    for now, (source, text) in enumerate(texts):
        learned.add(source, text)
        if text:
            uses[source] = now
            kept.append((source, text[:most]))
        while sum(len(own) for _, own in kept) > most:
            oldest = min({source for source, _ in kept}, key=uses.__getitem__)
            kept.remove(next(pair for pair in kept if pair[0] == oldest))
        assert learned.num_tokens == sum(len(own) for _, own in kept) <= most
        for asked in range(4):
            counts = learned._groups.get(asked)
            for token in range(3):
                expected = sum(own.count(token) for source, own in kept if source == asked)
                found = 0 if counts is None else count_of(counts.counts, [token])
                assert found == expected


def test_a_source_that_is_drafted_from_is_used() -> None:
    learned = Learned(6)
    for source in (0, 1):
        learned.add(source, [1, 2, 3])
    assert learned.of(0) is not None
    learned.add(2, [4])
    assert learned.of(1) is None
    assert learned.of(0) is not None


@pytest.mark.parametrize(
    ("spec", "learns"),
    [
        ("suffix", True),
        ("ngram", False),
        ("chain:grammar_forced+suffix", True),
        ("chain:grammar_forced+ngram", False),
    ],
)
def test_who_learns(spec: str, *, learns: bool) -> None:
    proposer = build_proposer(spec, toy_context())
    assert proposer.learns == learns
    proposer.learn([FinishedText(KIND, [5, 6, 7, 8], 0)])
    assert propose(proposer, [4, 5, 6]) == ([7, 8] if learns else [])
