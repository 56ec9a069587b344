"""Drafts that are taken back leave a text's budget as it was, and its rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import CompletingGrammar, EndingsCache
from guided_spec.grammar.protocol import legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import TextState
from guided_spec.ops.mask_words import ids_of
from tests.masks.walks import BYTES

SPEC = GrammarSpec.regex("([a-z][0-9]){3}(xy)*!")
BUDGET = 11  # room for one "xy"


@pytest.fixture(scope="module")
def grammar() -> CompletingGrammar:
    compiled = XGrammarBackend(BYTES).compile(SPEC)
    return CompletingGrammar(compiled, EndingsCache(BYTES).of(compiled), BUDGET)


def legal(matcher: TextState) -> list[int]:
    return ids_of(legal_row(matcher, BYTES.vocab_size))


def behind(grammar: CompletingGrammar, text: list[int]) -> TextState:
    """A new matcher behind a text."""
    matcher = grammar.new_matcher()
    assert all(matcher.accept_token(token) for token in text)
    return matcher


def wander(matcher: TextState, dice: random.Random) -> int:
    """Draft up to five legal tokens; returns how many."""
    count = 0
    while count < 5 and not matcher.is_terminated():
        assert matcher.accept_token(dice.choice(legal(matcher)))
        count += 1
    return count


@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_that_is_taken_back_was_never_there(grammar: CompletingGrammar, seed: int) -> None:
    dice, text, matcher = random.Random(seed), list[int](), behind(grammar, [])
    while not matcher.is_terminated():
        assert len(text) < BUDGET
        for _ in range(3):
            matcher.rollback(wander(matcher, dice))
            assert legal(matcher) == legal(behind(grammar, text))
        text.append(max(legal(matcher)))  # as long as it may be
        assert matcher.accept_token(text[-1])
    assert len(text) == BUDGET - 1


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fork_spends_nothing_of_its_original(grammar: CompletingGrammar, seed: int) -> None:
    dice, text, matcher = random.Random(seed), list[int](), behind(grammar, [])
    while not matcher.is_terminated():
        assert len(text) < BUDGET
        row = legal_row(matcher, BYTES.vocab_size)
        wander(matcher.fork(), dice)
        assert np.array_equal(legal_row(matcher, BYTES.vocab_size), row)
        text.append(max(ids_of(row)))
        assert matcher.accept_token(text[-1])
    assert len(text) == BUDGET - 1
