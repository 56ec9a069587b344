"""Paths through lattices against all paths, over drawn grammars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
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
from guided_spec.models.heads.block.candidates import Block, choose_candidates
from guided_spec.models.heads.block.transitions import MarkovHead, MarkovShape
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.proposers.lattice import Lattice, best_path
from tests.toys import CPU, EOS, VOCAB_SIZE, Rule, ToyCompiled, hashed_rule

PLACES, COUNT = 4, 3
ONLY = -1  # stands for the only legal token
seeds = st.integers(0, 10_000)


class Case(NamedTuple):
    lattice: Lattice
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
    return Case(Lattice(ids.astype(np.int64), scores, gains), rule, before)


def worth(case: Case, path: Sequence[int]) -> float:
    """Written again from the module's docstring; -1 for a path that is not legal."""
    total, chance = 0.0, 1.0
    for at in range(len(path)):
        text = (*case.before, *path[:at])
        if EOS in text:
            return -1.0
        place, legal = len(text), case.rule(text)
        shares = dict(
            zip(
                case.lattice.token_ids[place].tolist(),
                np.exp(case.lattice.scores[place] + gain(case.lattice, text)).tolist(),
                strict=True,
            )
        )
        if len(legal) > 1:
            rest = max(0.0, 1 - sum(shares.values()))
            kept = {token: share for token, share in shares.items() if token in legal}
            if path[at] not in kept:
                return -1.0
            chance *= kept[path[at]] / (rest + sum(kept.values()))
        elif path[at] not in legal:
            return -1.0
        total += chance
    return total


def gain(lattice: Lattice, text: Sequence[int]) -> NDArray[np.float32]:
    place = len(text)
    if lattice.gains is None:
        return np.zeros(COUNT, dtype=np.float32)
    known = [*lattice.token_ids[place - 1].tolist()] if place else [None]
    previous = text[-1] if place else None
    rows = lattice.gains[place]
    found = rows[known.index(previous)] if previous in known else np.zeros(COUNT, dtype=np.float32)
    return np.asarray(found)


def walk(case: Case) -> tuple[Lookahead, MaskRows]:
    rows = MaskRows(1, PLACES + 2, VOCAB_SIZE, CPU)
    lookahead = Lookahead.fork([Constraint(ToyCompiled(case.rule))], rows, [PLACES + 1])
    lookahead.extend([case.before])
    return lookahead, rows


def search(case: Case, budget: int, room: int = PLACES) -> list[int]:
    lookahead, _ = walk(case)
    fork = lookahead.fork_of(0)
    if fork is None:
        return []
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    path = best_path(case.lattice, fork, words, room, budget, len(case.before))
    assert fork.token_ids == [*case.before]
    return path


@given(cases(), st.integers(1, PLACES))
def test_the_search_finds_the_best_of_all_legal_paths(case: Case, room: int) -> None:
    room = min(room, PLACES - len(case.before))
    found = search(case, 10_000, room)
    best = max(worth(case, path) for path in paths(case, room))
    assert math.isclose(worth(case, found), best, rel_tol=1e-5, abs_tol=1e-9)


def paths(case: Case, room: int) -> Iterator[tuple[int, ...]]:
    """All of them, of candidates and of tokens that are the only legal ones, legal or not."""
    yield ()
    for length in range(1, room + 1):
        places = case.lattice.token_ids[len(case.before) :][:length].tolist()
        for path in product(*([*place, ONLY] for place in places)):
            filled = list(path)
            for at, token in enumerate(path):
                legal = case.rule((*case.before, *filled[:at]))
                filled[at] = min(legal) if token == ONLY and len(legal) == 1 else token
            yield tuple(filled)


@given(cases())
def test_a_search_of_one_path_takes_the_first_legal_one(case: Case) -> None:
    lookahead, _ = walk(case)
    start, drafted = len(case.before), lookahead.drafted[0]
    (expected,) = lookahead.extend_path([case.lattice.first_paths(start, drafted)])
    assert search(case, 0) == expected
    tokens = (*case.before, *expected)
    for at, token in enumerate(expected):
        legal = case.rule(tokens[: start + at])
        behind = tokens[start + at - 1] if start + at else None
        wanted = [option.token_id for option in case.lattice.options(start + at, behind)]
        assert token == next((t for t in wanted if t in legal), None) or legal == {token}
    ended = EOS in tokens or len(tokens) == PLACES
    assert lookahead.starved == [0 if ended else 1]
    assert lookahead.refused == [None]


def test_a_path_that_starves_later_is_worth_less_than_one_that_goes_on() -> None:
    """The likeliest first token leads to where no candidate is legal."""
    ids = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8]], dtype=np.int64)
    scores = np.log(np.array([[0.5, 0.4, 0.1], [0.9, 0.05, 0.05], [0.9, 0.05, 0.05]]))
    rules: dict[tuple[int, ...], set[int]] = {(): {0, 1}, (0,): {9, 10}, (1,): {3, 4}}
    rules |= {(1, 3): {6, 7}}
    lattice = Lattice(ids, scores.astype(np.float32), None)
    case = Case(lattice, lambda text: frozenset(rules.get(tuple(text), {EOS})), ())
    assert search(case, 0) == [0]
    assert search(case, 100) == [1, 3, 6]


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
            torch.testing.assert_close(total, best.values)
            previous = scored[best.indices[0]]
