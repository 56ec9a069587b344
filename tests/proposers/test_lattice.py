"""Paths through lattices against all paths, over drawn grammars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.models.heads.block.candidates import (
    GROUP,
    Block,
    MarkovHead,
    MarkovShape,
    choose_candidates,
)
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.proposers.block_draft import Lattice
from tests.toys import CPU, EOS, VOCAB_SIZE, Rule, ToyCompiled, hashed_rule

PLACES, COUNT = 4, 3
seeds = st.integers(0, 10_000)


class Case(NamedTuple):
    lattice: Lattice
    scores: NDArray[np.float32]
    rule: Rule
    before: tuple[int, ...]  # tokens of the draft that others made


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(seeds))
    ids = np.stack([random.permutation(VOCAB_SIZE)[:COUNT] for _ in range(PLACES)])
    logits = random.normal(size=(PLACES, VOCAB_SIZE)) * draw(st.sampled_from([0.3, 2.0, 5.0]))
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    scores = np.take_along_axis(scores, ids, 1).astype(np.float32)
    order = np.argsort(-scores, 1)
    ids, scores = np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
    gains = None
    if draw(st.booleans()):
        gains = random.normal(size=(PLACES, COUNT, COUNT)).astype(np.float32)
    rule = hashed_rule(draw(seeds))
    before: tuple[int, ...] = ()
    if draw(st.booleans()):
        legal = sorted(rule(()) - {EOS})
        before = (legal[0],) if legal else ()
    scores[:, draw(st.sampled_from([COUNT, COUNT - 1])) :] = -np.inf
    token_ids = np.where(np.isneginf(scores), -1, ids).astype(np.int32)
    # One is at hand, the others are read when they are asked for.
    lattice = Lattice(token_ids, token_ids[:, :1].tolist(), scores, gains)
    return Case(lattice, scores, rule, before)


def ranked(case: Case, text: tuple[int, ...]) -> list[int]:
    """The legal tokens behind a text, the likeliest first; written again from the docstrings."""
    place, legal = len(text), case.rule(text)
    if EOS in text or place == PLACES:
        return []
    if len(legal) == 1:
        return sorted(legal)
    scores, gains = case.scores[place].copy(), case.lattice.gains
    known = case.lattice.token_ids[place - 1].tolist() if place else [None]
    previous = text[-1] if place else None
    if gains is not None and previous in known:
        scores += gains[place, known.index(previous)]
    order = case.lattice.token_ids[place][np.argsort(-scores, kind="stable")].tolist()
    return [token for token in order if token in legal]


def ranks(case: Case, text: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All legal paths to their ends, each behind the ranks of its tokens."""
    behind = ranked(case, text)
    if not behind:
        yield (), text
    for rank, token in enumerate(behind):
        for others, path in ranks(case, (*text, token)):
            yield (rank, *others), path


@given(cases())
def test_the_draft_is_the_first_of_all_legal_paths(case: Case) -> None:
    rows = MaskRows(1, PLACES + 2, VOCAB_SIZE, CPU)
    lookahead = Lookahead.fork([Constraint(ToyCompiled(case.rule))], rows, [PLACES + 1])
    lookahead.extend([case.before])
    start, drafted = len(case.before), lookahead.drafted[0]
    lookahead.extend_path([case.lattice.first_paths(start, drafted)])
    _, expected = min(ranks(case, case.before))
    assert tuple(lookahead.drafted[0]) == expected
    is_whole = EOS in expected or len(expected) == PLACES
    assert lookahead.starved == [0 if is_whole else 1]
    assert lookahead.refused == [None]


@pytest.mark.parametrize("size", [1000, 4 * 2 * GROUP + 1, 4 * 2 * GROUP, 5])
def test_the_likeliest_of_many_tokens(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.stack([torch.randperm(size).float() for _ in range(6)]).view(2, 3, size)
    logits[0, 0, -1] = size  # in the last group, which may be a part of one
    found = choose_candidates(Block(logits, logits, torch.zeros(2).long()), 4)
    best = logits.topk(4)
    assert torch.equal(found.scores, best.values)
    assert torch.equal(found.token_ids, best.indices)


@pytest.mark.parametrize("is_reduced", [False, True])
@torch.no_grad()
def test_candidates_follow_the_likeliest_ones(*, is_reduced: bool) -> None:
    """Under a transition a place's candidates are those behind the best one of the place before."""
    torch.manual_seed(0)
    vocabulary = DraftVocabulary(torch.tensor([1, 3, 4, 7, 9]), 12) if is_reduced else None
    scored = torch.arange(12) if vocabulary is None else vocabulary.target_ids
    markov = MarkovHead(MarkovShape(4, "vanilla"), 6, 12, vocabulary)
    block = Block(torch.randn(2, 3, len(scored)), torch.randn(2, 3, 6), torch.tensor([5, 2]))
    found = choose_candidates(block, 4, vocabulary, markov)
    for row in range(2):
        previous = block.last[row]
        for place in range(3):
            bias = markov.markov_w2.weight @ markov.markov_w1.weight[previous]
            behind = (block.logits[row, place] + bias).log_softmax(0)
            best = behind.topk(4)
            assert found.token_ids[row, place].tolist() == scored[best.indices].tolist()
            assert found.gains is not None
            total = found.scores[row, place] + found.gains[row, place, 0]
            torch.testing.assert_close(total.log_softmax(0), best.values.log_softmax(0))
            previous = scored[best.indices[0]]
