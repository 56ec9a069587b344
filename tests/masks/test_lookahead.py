"""A lookahead beside a model that is lists of tokens: any order of calls gives the right rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks import lookahead as lookahead_module
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows, TabledTexts
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.types import Draft
from tests.masks.walks import BYTES
from tests.tiers import examples
from tests.toys import CPU, EOS, VOCAB_SIZE, ToyCompiled, ToyMatcher, hashed_rule, text_rule

DEPTHS = 5
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 12]}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
PICKS = st.lists(st.integers(0, 999), min_size=3, max_size=3)
LISTS = st.lists(st.lists(st.integers(0, 999), max_size=6), min_size=3, max_size=3)
LIMITS = st.lists(st.integers(0, DEPTHS + 1), min_size=3, max_size=3)


class LookaheadMachine(RuleBasedStateMachine):
    """Three requests, the last one free; ``twins`` replay what the lookahead should have seen."""

    vocab_size, eos = VOCAB_SIZE, EOS

    def __init__(self) -> None:
        super().__init__()
        self.rows = MaskRows(3, DEPTHS, self.vocab_size, CPU)
        self.grammars = [self.grammar(0), self.grammar(1), None]
        self.twins = [self.grammar(0), self.grammar(1), None]
        self.constraints = [None if g is None else Constraint(g, [self.eos]) for g in self.grammars]
        self.committed: list[list[int]] = [[], [], []]
        self.step: Lookahead | None = None

    def grammar(self, request: int) -> CompiledGrammar:
        return ToyCompiled(hashed_rule(request, longest=7))

    def row(self, request: int, tokens: list[int]) -> Tensor:
        """What a fresh matcher that replays ``tokens`` fills; all ones where nothing may be."""
        found = torch.full((1, num_mask_words(self.vocab_size)), -1, dtype=torch.int32)
        twin = self.twins[request]
        if twin is not None:
            matcher = twin.new_matcher()
            assert all(matcher.accept_token(token) for token in tokens)
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(found)
        return found[0]

    def legal(self, request: int, tokens: list[int]) -> list[int]:
        if self.twins[request] is not None and self.eos in tokens:
            return []
        return unpack_bitmask(self.row(request, tokens), self.vocab_size).nonzero()[:, 0].tolist()

    def choose(self, request: int, tokens: list[int], pick: int) -> int:
        """A legal token two times out of three."""
        legal = self.legal(request, tokens)
        return legal[pick // 3 % len(legal)] if pick % 3 and legal else pick % self.vocab_size

    def text(self, request: int) -> list[int]:
        return self.committed[request] + self.drafted[request]

    def append(self, request: int, token: int) -> bool:
        """The model of one drafted token: whether it was taken."""
        if not self.open[request]:
            return False
        if token not in self.legal(request, self.text(request)):
            self.open[request] = False
            return False
        self.drafted[request].append(token)
        ended = token == self.eos and self.twins[request] is not None
        self.open[request] = not ended and len(self.drafted[request]) < self.limits[request]
        return True

    def check(self) -> None:
        assert self.step is not None
        assert self.step.drafted == self.drafted
        assert self.step.is_open == self.open
        rooms = [
            limit - len(drafted) if is_open else 0
            for limit, drafted, is_open in zip(self.limits, self.drafted, self.open, strict=True)
        ]
        assert [self.step.can_draft(count) for count in (1, 2, 3)] == [
            max(rooms) >= count for count in (1, 2, 3)
        ]
        for request, constraint in enumerate(self.constraints):
            if constraint is None:
                continue
            original, fork = constraint._original.own_matcher, constraint._fork.text.own_matcher
            has_read = constraint._fork.start == len(constraint.committed)
            is_there = has_read and self.step._fork_of is Constraint.fork
            if is_there:
                assert constraint._fork.token_ids == self.drafted[request]
            if isinstance(original, ToyMatcher) and isinstance(fork, ToyMatcher):
                read = len(constraint._original.token_ids)
                assert original.tokens == self.committed[request][:read]
                assert not is_there or fork.tokens == self.text(request)
                assert max(original.compiled.fills.values(), default=0) <= 1

    @precondition(lambda self: self.step is None)
    @rule(limits=LIMITS)
    def fork(self, limits: list[int]) -> None:
        for grammar in self.grammars:
            if isinstance(grammar, ToyCompiled):
                grammar.fills.clear()
        self.step = Lookahead.fork(self.constraints, self.rows, limits)
        self.limits = [min(limit, DEPTHS - 1) for limit in limits]
        self.drafted: list[list[int]] = [[], [], []]
        self.open = [limit > 0 for limit in limits]
        self.check()

    @precondition(lambda self: self.step is not None)
    @rule()
    def next_mask(self) -> None:
        assert self.step is not None
        mask = self.step.next_mask()
        assert mask is not None
        for request in range(3):
            if self.open[request]:
                assert torch.equal(mask[request], self.row(request, self.text(request)))
        assert bool((mask[2] == -1).all())
        self.check()

    @precondition(lambda self: self.step is not None)
    @rule(picks=PICKS, gives_up=st.integers(0, 9))
    def accept(self, picks: list[int], gives_up: int) -> None:
        assert self.step is not None
        tokens = [self.choose(r, self.text(r), pick) for r, pick in enumerate(picks)]
        if gives_up < 3:
            tokens[gives_up] = -1
        self.step.accept(torch.tensor(tokens))
        for request, token in enumerate(tokens):
            self.append(request, token)
        self.check()

    @precondition(lambda self: self.step is not None)
    @rule(lists=LISTS, forced=st.booleans())
    def extend(self, lists: list[list[int]], *, forced: bool) -> None:
        assert self.step is not None
        drafts: list[list[int]] = []
        expected: list[list[int]] = []
        for request, picks in enumerate(lists):
            drafts.append([])
            expected.append([])
            for pick in picks:
                drafts[-1].append(self.choose(request, self.text(request), pick))
                if self.append(request, drafts[-1][-1]):
                    expected[-1].append(drafts[-1][-1])
        extend = self.step.extend_forced if forced else self.step.extend
        assert extend(drafts) == expected
        self.check()

    @precondition(lambda self: self.step is not None)
    @rule(wider=st.integers(0, 2), kept=PICKS, picks=PICKS)
    def finish(self, wider: int, kept: list[int], picks: list[int]) -> None:
        assert self.step is not None
        width = min(max(map(len, self.drafted)) + wider, DEPTHS - 1)
        padded = [row + [0] * (width - len(row)) for row in self.drafted]
        lengths = torch.tensor([len(row) for row in self.drafted])
        self.step.advance(Draft(torch.tensor(padded).view(3, width), lengths))
        self.step.start()
        masks = self.step.finish(width)
        assert masks is not None
        assert masks.shape[:2] == (3, width + 1)
        for request, drafted in enumerate(self.drafted):
            for depth in range(width + 1):
                row = self.row(request, self.committed[request] + drafted[:depth])
                if depth > len(drafted):
                    row = torch.full_like(row, -1)
                assert torch.equal(masks[request, depth], row)
        self.check()
        for request in range(3):
            self.commit(request, kept[request], picks[request])
        self.step = None

    def commit(self, request: int, kept: int, pick: int) -> None:
        """Keep some of the draft, then one more token, as the verifier would."""
        constraint = self.constraints[request]
        if constraint is None:
            return
        tokens = self.drafted[request][: kept % (len(self.drafted[request]) + 1)]
        legal = self.legal(request, self.committed[request] + tokens)
        after = [legal[pick % len(legal)]] if legal else [0]  # behind the end: dropped
        commit = constraint.commit if pick % 3 == 0 else constraint.commit_ahead
        if not legal:  # a text that goes on has something legal
            commit = constraint.commit
        assert commit(tokens + after) == tokens + (after if legal else [])
        self.committed[request] += tokens + (after if legal else [])
        assert constraint.committed == self.committed[request]
        if constraint.is_terminated:  # the request has ended; another one takes its place
            self.committed[request] = []
            grammar = self.grammars[request]
            assert grammar is not None
            self.constraints[request] = Constraint(grammar, [self.eos])


class XGrammarMachine(LookaheadMachine):
    vocab_size, eos = 257, 256
    compiled = XGrammarBackend(BYTES).compile(GrammarSpec.json_schema(SCHEMA))

    def grammar(self, request: int) -> CompiledGrammar:
        del request
        return self.compiled


@pytest.mark.parametrize("threshold", [1, 6, 1000])
def test_any_order_of_calls(monkeypatch: pytest.MonkeyPatch, threshold: int) -> None:
    monkeypatch.setattr(lookahead_module, "ROWS_WORTH_A_THREAD", threshold)
    run_state_machine_as_test(
        LookaheadMachine, settings=settings(max_examples=examples(40), stateful_step_count=20)
    )


@pytest.mark.parametrize("threshold", [1, 1000])
def test_any_order_of_calls_with_xgrammar(monkeypatch: pytest.MonkeyPatch, threshold: int) -> None:
    monkeypatch.setattr(lookahead_module, "ROWS_WORTH_A_THREAD", threshold)
    run_state_machine_as_test(
        XGrammarMachine, settings=settings(max_examples=examples(12), stateful_step_count=20)
    )


def toy_lookahead(compiled: ToyCompiled | None, limit: int = 4) -> tuple[Lookahead, MaskRows]:
    rows = MaskRows(1, DEPTHS, VOCAB_SIZE, CPU)
    constraint = None if compiled is None else Constraint(compiled)
    return Lookahead.fork([constraint], rows, [limit]), rows


def test_nobody_is_constrained() -> None:
    lookahead, _ = toy_lookahead(None)
    lookahead.accept(torch.tensor([EOS]))  # free text: it has no end here
    assert lookahead.extend([[1, 2]]) == [[1, 2]]
    assert lookahead.next_mask() is None
    assert lookahead.fork_of(0) is None
    assert lookahead.finish(3) is None


def test_drafts_that_nobody_announced_are_walked() -> None:
    compiled = ToyCompiled(text_rule([b"abcd"]))
    lookahead, rows = toy_lookahead(compiled)
    lookahead.advance(Draft(torch.tensor([[0, 1, 5, 0]]), torch.tensor([4])))
    lookahead.start()
    masks = lookahead.finish(4)
    assert masks is not None
    assert masks[0, :, 0].tolist() == [1 << 0, 1 << 1, 1 << 2, -1, -1]
    assert rows.allows(0, 2, 2)
    assert not rows.allows(0, 2, 5)
    assert lookahead.drafted == [[0, 1]]


def test_a_position_without_candidates_ends_a_draft_but_leaves_it_open() -> None:
    lookahead, _ = toy_lookahead(ToyCompiled(text_rule([b"abcd"])))
    assert lookahead.extend_best([[(5, 0), (), (1,)]]) == [[0]]
    assert lookahead.is_open == [True]
    assert lookahead.refused == [None]
    assert lookahead.extend_best([[(9, 1), (7, 8)]]) == [[1]]
    assert lookahead.is_open == [False]
    assert lookahead.refused == [7]


def test_no_token_ends_a_draft_and_closes_it() -> None:
    """As it does for ``accept``."""
    lookahead, _ = toy_lookahead(None)
    assert lookahead.extend([[0, -1, 1]]) == [[0]]
    assert lookahead.is_open == [False]
    assert lookahead.refused == [None]


def test_the_next_draft_may_overwrite_where_rows_come_from() -> None:
    lookahead, _ = toy_lookahead(ToyCompiled(text_rule([b"abcd"])))
    row = torch.full((1,), 5, dtype=torch.int32)
    sources = torch.tensor([[row.data_ptr()], [0]])
    lookahead.leave(TabledTexts({0: frozenset()}, sources, is_alone=True), sources)
    lookahead.keep_sources()
    sources.zero_()
    masks = lookahead.finish(1)
    assert masks is not None
    assert masks[0, :, 0].tolist() == [5, -1]


def test_forced_positions() -> None:
    lookahead, _ = toy_lookahead(ToyCompiled(text_rule([b"abcd"])))
    lookahead.extend([[0]])
    lookahead.extend_forced([[1, 2, 9]])
    assert lookahead.forced == [[1, 2]]


def test_a_text_that_has_ended_is_left_alone() -> None:
    compiled = ToyCompiled(text_rule([b"a"]))
    constraint = Constraint(compiled)
    constraint.commit([0, EOS])
    lookahead = Lookahead.fork([constraint], MaskRows(1, 3, VOCAB_SIZE, CPU), [2])
    assert lookahead.is_open == [False]
    lookahead.next_mask()
    assert lookahead.extend([[0]]) == [[]]
    masks = lookahead.finish(1)
    assert masks is not None
    assert bool((masks == -1).all())


def test_forks_are_asked_for_when_they_are_needed() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"abcd"])), [EOS])
    assert constraint.commit_ahead([0]) == [0]
    lookahead = Lookahead.fork([constraint], MaskRows(1, DEPTHS, VOCAB_SIZE, CPU), [4])
    lookahead.advance(Draft(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0])))
    lookahead.start()
    assert lookahead.is_open == [True]
    assert constraint._fork.text.token_ids == []
    masks = lookahead.finish(0)
    assert masks is not None
    assert masks[0, :, 0].tolist() == [1 << 1]
    assert lookahead.extend([[1, 2]]) == [[1, 2]]
    assert constraint._original.token_ids == [0], "it filled the row, and sees no draft"


def test_a_fork_that_has_parted_from_its_text_concerns_no_other() -> None:
    constraints = [Constraint(ToyCompiled(text_rule([b"ab"])), [EOS]) for _ in range(2)]
    broken, healthy = constraints
    for constraint in constraints:
        assert constraint.commit_ahead([0]) == [0]
    matcher = broken._fork.text.own_matcher
    assert isinstance(matcher, ToyMatcher)
    matcher.tokens = [0, 1, EOS]
    broken._fork.text.token_ids[:] = [0]
    broken.compiled = ToyCompiled(text_rule([b"b"]))  # so does what it is made anew from
    lookahead = Lookahead.fork(constraints, MaskRows(2, DEPTHS, VOCAB_SIZE, CPU), [2, 2])
    masks = lookahead.finish(0)
    assert masks is not None
    assert masks[1, :, 0].tolist() == [1 << 1]
    assert lookahead.is_open == [False, True]
    with pytest.raises(GrammarStateError, match="token 0 at output position 0"):
        broken.commit_ahead([1])
    assert healthy.commit_ahead([1]) == [1]


def test_a_failure_on_the_other_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead_module, "ROWS_WORTH_A_THREAD", 1)
    compiled = ToyCompiled(text_rule([b"ab"]))
    lookahead, rows = toy_lookahead(compiled)
    monkeypatch.setattr(ToyMatcher, "fill_next_token_bitmask", lambda *_: 1 / 0)
    lookahead.advance(Draft(torch.tensor([[0]]), torch.tensor([1])))
    lookahead.start()
    with pytest.raises(ZeroDivisionError):
        lookahead.finish(1)
    rows.clear()
    assert rows._filling is None
