"""Rows filled on one thread and on many are the same rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.grammar.backends.guarded import GuardedBackend
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.markers import AfterGrammar, Marker
from guided_spec.masks import filler as row_filler
from guided_spec.masks.batch import RowBatch
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.filler import RequestDraft, RowFiller
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.types import Draft
from tests.grammar.backends.own_backends import Listed
from tests.masks.walks import BYTES, EOS
from tests.toys import CPU, ToyCompiled, ToyMatcher, hashed_rule

VOCAB_SIZE = BYTES.vocab_size
DEPTHS = 5
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 12]}, "s": {"type": "string", "maxLength": 3}},
    "required": ["n"],
    "additionalProperties": False,
}
SPECS = [GrammarSpec.json_schema(SCHEMA), GrammarSpec.regex("[ab]{1,3}(c|dd)?")]
THREADS = [1, 2, 3, 8]


def _grammars() -> list[CompiledGrammar | None]:
    """Every kind of matcher there is, and a free request."""
    native = [XGrammarBackend(BYTES).compile(spec) for spec in SPECS]
    marker = Marker(b"<>", BYTES, list)
    other = [LLGuidanceBackend(BYTES).compile(spec) for spec in SPECS]
    return [
        *native,
        AfterGrammar(native[0], marker, budget=2),
        AfterGrammar(other[1], marker),
        *other,
        ToyCompiled(hashed_rule(3, longest=6), BYTES),
        GuardedBackend("listed", Listed, BYTES).compile(GrammarSpec.choice(["abc", "abd", "b"])),
        None,
    ]


GRAMMARS = _grammars()


class Case:
    """A batch of requests with drafts that are legal, drawn from ``picks``."""

    def __init__(self, picks: Sequence[Sequence[int]], committed: int) -> None:
        self.rows = MaskRows(len(picks), DEPTHS, VOCAB_SIZE, CPU)
        self.constraints = [
            None if (compiled := GRAMMARS[at % len(GRAMMARS)]) is None else Constraint(compiled)
            for at in range(len(picks))
        ]
        for constraint, row in zip(self.constraints, picks, strict=True):
            if constraint is not None:
                constraint.commit(legal_tokens(constraint, row[:committed]))
        self.drafts = [
            list(row) if constraint is None else legal_tokens(constraint, row)
            for constraint, row in zip(self.constraints, picks, strict=True)
        ]

    def request_drafts(self) -> list[RequestDraft]:
        """What a new step begins with, all drafts appended and no row filled."""
        self.rows.clear(len(self.constraints))
        found = []
        for at, (constraint, tokens) in enumerate(zip(self.constraints, self.drafts, strict=True)):
            draft = RequestDraft(at, None if constraint is None else constraint.fork(), DEPTHS - 1)
            for token in tokens:
                if draft.is_open:
                    assert draft.append(token)
            found.append(draft)
        return found


def legal_tokens(constraint: Constraint, picks: Sequence[int]) -> list[int]:
    """One legal token after another, chosen by ``picks``, until the end of the text."""
    fork = constraint.fork()
    tokens: list[int] = []
    row = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    for pick in picks:
        if fork.text.is_terminated():
            break
        fork.text.fill_next_token_bitmask(row)
        legal = unpack_bitmask(torch.from_numpy(row)[0], VOCAB_SIZE).nonzero()[:, 0].tolist()
        if not legal:
            break
        tokens.append(legal[pick % len(legal)])
        assert fork.text.accept_token(tokens[-1])
    fork.rollback_to(0)
    return tokens


def filled(case: Case, threads: int) -> Tensor:
    drafts = case.request_drafts()
    RowFiller(case.rows).fill(drafts, threads=threads)
    for draft in drafts:
        assert draft.num_missing == 0
        if draft.fork is not None:  # the forks stand where they stood
            assert draft.fork.token_ids == draft.drafted
            assert draft.fork.text.is_terminated() == draft.has_ended
    return case.rows.first(len(drafts), DEPTHS).clone()


PICKS = st.lists(st.lists(st.integers(0, 999), max_size=DEPTHS - 1), min_size=1, max_size=20)


@given(picks=PICKS, committed=st.integers(0, 3), threads=st.sampled_from(THREADS[1:]))
def test_many_threads_fill_what_one_fills(
    picks: list[list[int]], committed: int, threads: int
) -> None:
    case = Case(picks, committed)
    alone = filled(case, 1)
    assert torch.equal(filled(case, threads), alone)
    for at, constraint in enumerate(case.constraints):  # and that is what each matcher says
        if constraint is None:
            assert bool((alone[at] == -1).all())
            continue
        fork = constraint.fork()
        expected = torch.full_like(alone[at], -1)
        for depth, token in enumerate([*case.drafts[at][: DEPTHS - 1], None]):
            if not fork.text.is_terminated():
                fork.text.fill_next_token_bitmask(expected, depth)
            assert token is None or fork.text.accept_token(token)
        assert torch.equal(alone[at], expected)


@given(picks=PICKS, asked=st.lists(st.booleans(), min_size=20, max_size=20))
def test_rows_filled_before_are_left_alone(picks: list[list[int]], asked: list[bool]) -> None:
    case = Case(picks, 0)
    alone = filled(case, 1)
    drafts = case.request_drafts()
    filler = RowFiller(case.rows)
    filler.fill([draft for draft, is_asked in zip(drafts, asked, strict=False) if is_asked])
    filler.fill(drafts, threads=3)
    assert torch.equal(case.rows.first(len(drafts), DEPTHS), alone)


def test_rows_of_the_libraries_are_filled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[int] = []
    fill = RowBatch.fill

    def counting(batch: RowBatch, matchers: Sequence[Any], *args: Any) -> None:
        together.append(len(matchers))
        fill(batch, matchers, *args)

    monkeypatch.setattr(RowBatch, "fill", counting)
    case = Case([[60, 62, 3]] * len(GRAMMARS), 0)  # "<>" ends the free part of the third
    drafts = case.request_drafts()
    missing = [draft for draft in drafts if draft.num_missing]
    RowFiller(case.rows)._fill_together(missing, RowBatch())
    assert together[0] == 4
    assert max(together) > 4  # the one behind the marker, where it got there
    sources = [RowBatch().takes(w.fork.text.own_matcher) for w in drafts if w.fork]
    assert sources == [True, True, True, True, True, True, False, False]


def _lookahead(count: int, make: Callable[[int], CompiledGrammar]) -> Lookahead:
    constraints = [Constraint(make(at)) for at in range(count)]
    rows = MaskRows(count, DEPTHS, VOCAB_SIZE, CPU)
    return Lookahead.fork(constraints, rows, [DEPTHS - 1] * count)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.004, [64, 64]), (0.002, [16, 56, 56]), (0.0003, [16, 32, 64, 16]), (0.0, [16, 32, 64, 16])],
    ids=["slow", "slowish", "many", "fast"],
)
def test_other_threads_help_where_rows_take_long(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[int]
) -> None:
    """seconds: from one look at the clock to the next. In all 4 milliseconds are few for many."""
    shares: list[int] = []
    fill = RowFiller._fill_together

    def counting(filler: RowFiller, drafts: Sequence[RequestDraft], batch: RowBatch) -> None:
        shares.append(len(drafts))
        fill(filler, drafts, batch)

    monkeypatch.setattr(RowFiller, "_fill_together", counting)
    monkeypatch.setattr(row_filler, "cores", lambda: 4)
    ticks = partial(next, itertools.count(0.0, seconds))
    clock = SimpleNamespace(perf_counter=ticks, thread_time=time.thread_time)
    monkeypatch.setattr(row_filler, "time", clock)
    compiled = XGrammarBackend(BYTES).compile(SPECS[1])
    count = sum(expected)
    lookahead = _lookahead(count, lambda _: compiled)
    masks = lookahead.next_mask()
    assert masks is not None
    assert shares == expected
    legal = unpack_bitmask(masks, VOCAB_SIZE)
    assert legal.sum(-1).tolist() == [2] * count
    lookahead.extend([[ord("a"), ord("b"), ord("c"), EOS]] * count)
    lookahead.advance(Draft(torch.zeros(count, 4, dtype=torch.int64), torch.full((count,), 4)))
    lookahead.start()
    finished = lookahead.finish(4)
    assert finished is not None
    assert torch.equal(finished[:, 0], masks)
    assert unpack_bitmask(finished, VOCAB_SIZE)[0].sum(-1).tolist() == [2, 5, 5, 1, VOCAB_SIZE]
    assert sum(shares) == 2 * count


def test_a_failure_waits_for_the_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [ToyCompiled(hashed_rule(at, longest=6), BYTES) for at in range(6)]
    lookahead = _lookahead(6, lambda at: compiled[at])
    assert lookahead.fork_of(0) is not None  # so that all are there
    fill = ToyMatcher.fill_next_token_bitmask

    def failing(matcher: ToyMatcher, bitmask: Tensor, index: int = 0) -> bool:
        if index == 0:  # this thread's first row
            raise ZeroDivisionError
        time.sleep(0.02)  # the other thread's rows are not done by then
        return fill(matcher, bitmask, index)

    monkeypatch.setattr(ToyMatcher, "fill_next_token_bitmask", failing)
    with pytest.raises(ZeroDivisionError):
        lookahead._filler.fill(lookahead._drafts, threads=2)
    assert [draft.filled for draft in lookahead._drafts] == [0, 1, 0, 1, 0, 1]
