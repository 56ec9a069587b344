"""Prompt lookup against a search that tries everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.core import Proposer
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers import build_proposer
from guided_spec.proposers.ngram import LONGEST, LOOKS_BACK, continue_ngram
from tests.toys import ToyCompiled, text_rule, toy_batch, toy_context


def slow_ngram(tokens: list[int], length: int) -> list[int]:
    """The last earlier occurrence of the longest suffix, at most ``LONGEST`` tokens long."""
    for n in range(LONGEST, 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if len(tokens) > n and tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + length]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(0, 6))
def test_continue_ngram(tokens: list[int], length: int) -> None:
    assert continue_ngram(np.array(tokens, dtype=np.int32), length) == slow_ngram(tokens, length)


def test_longer_matches_first_then_later_ones() -> None:
    def find(tokens: list[int], length: int) -> list[int]:
        return continue_ngram(np.array(tokens, dtype=np.int32), length)

    assert find([1, 2, 7, 9, 2, 8, 1, 2], 1) == [7]
    assert find([2, 7, 2, 8, 2], 1) == [8]
    assert find([5, 5, 5], 4) == [5]
    assert find([5], 4) == []


class Read(list[int]):
    """A text that counts the tokens that are read of it."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


def propose(proposer: Proposer, context: list[int]) -> list[int]:
    batch = toy_batch([context], [None], k=3, limits=[4])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    proposer.begin(batch, lookahead).finish()
    return [*lookahead.drafted[0]]


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, 3), min_size=1, max_size=8)),
        min_size=1,
        max_size=8,
    )
)
def test_a_text_that_grows_or_not_is_drafted_as_a_new_one(
    steps: list[tuple[int, list[int]]],
) -> None:
    """Where a slot is used again without a release, all but the last tokens may be missed."""
    proposer = build_proposer("ngram", toy_context())
    context: list[int] = []
    for cut, new in steps:
        if cut < LONGEST:
            proposer.release([0])
            context = context[: len(context) - cut]
        context = [*context, *new]
        assert propose(proposer, context) == slow_ngram(context, 3)


def test_a_step_reads_what_is_new_and_looks_back_so_far() -> None:
    proposer = build_proposer("ngram", toy_context())
    text = Read([1, 2, 3] + [5] * (LOOKS_BACK + 100))
    assert propose(proposer, text) == [5, 5, 5][:1]
    text += [1, 2]
    text.num_read = 0
    assert propose(proposer, text) == []  # what is older is not looked at
    assert text.num_read <= 2 + LONGEST
    text += [7, 1, 2]
    assert propose(proposer, text) == [7, 1, 2]


def test_drafts_continue_behind_the_draft_and_stop_at_the_first_illegal_token() -> None:
    grammar = ToyCompiled(text_rule([b"abcb"]))
    contexts = [[0, 1, 2, 3, 9, 0], [0, 1, 2, 3, 9, 0], [7, 0, 0, 0, 5]]
    batch = toy_batch(contexts, [Constraint(grammar), None, None], k=3, limits=[4, 2, 4])
    batch.constraints[0].commit([0])  # type: ignore[union-attr]
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    proposer = build_proposer("ngram", toy_context())
    draft = proposer.begin(batch, lookahead).finish()
    assert lookahead.drafted == [[1, 2], [1, 2], []]  # cut: illegal, at the limit, no match
    assert draft.num_tokens.tolist() == [2, 2, 0]
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, [0, 4, 4])
    lookahead.extend([[], [1], [0]])
    proposer.begin(batch, lookahead).finish()
    assert lookahead.drafted == [[], [1, 2, 3, 9], [0, 5, 0]]
