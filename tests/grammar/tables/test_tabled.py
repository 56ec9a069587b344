"""A matcher over a table is like the grammar's own one, wherever a text stands."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.masks.tables import finished
from guided_spec.errors import ConfigError, GrammarStateError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import compare_steps, proven_table, tabled_part
from guided_spec.grammar.tables.tabled import (
    TabledGrammar,
    TableMaker,
    table_bytes,
)
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.grammar.text.state import probe
from guided_spec.grammar.text.unique_keys import NotedGrammar, UniqueKeysGrammar
from guided_spec.masks.constraint import MOST_UNREAD, Constraint, Fork
from tests.grammar.tables.test_table import RECORD, SMALL, STOPS, backend
from tests.tiers import examples

SPECS = {
    "whole": GrammarSpec.json_schema(RECORD),
    "part": GrammarSpec.json_schema(
        {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}
    ),
    "regex": GrammarSpec.regex(r"(a|ab|é)*[0-9]{1,40}"),
}
WORDS = -(-SMALL.vocab_size // 32)
USED = np.packbits(np.arange(WORDS * 32) < SMALL.vocab_size, bitorder="little").view(np.int32)


@cache
def parts(name: str) -> tuple[NotedGrammar, TokenTable]:
    compiled = tabled_part(backend("auto").compile(SPECS[name]))
    assert isinstance(compiled, NotedGrammar)
    return compiled, proven_table(
        compiled, Spelling(SMALL), TableLimits(states=60 if name == "part" else 2000)
    )


def row_of(matcher: GrammarMatcher) -> list[int]:
    rows = np.zeros((2, WORDS), dtype=np.int32)
    matcher.fill_next_token_bitmask(rows, 1)
    found: list[int] = (rows[1] & USED).tolist()
    return found


def legal(matcher: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(
        np.array(row_of(matcher), dtype=np.int32).view(np.uint8), bitorder="little"
    )
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


class AgainstTheMatcher(RuleBasedStateMachine):
    """The same calls on both; the table comes at any time."""

    @initialize(name=st.sampled_from(sorted(SPECS)))
    def begin(self, name: str) -> None:
        compiled, self.finished = parts(name)
        self.made: Future[TokenTable] = Future()
        self.grammar = TabledGrammar(compiled, lambda: self.made, 0)
        self.tabled: Any = self.grammar.new_matcher()
        self.own: Any = compiled.new_matcher()
        self.length = 0

    @precondition(lambda self: not self.made.done())
    @rule()
    def arrive(self) -> None:
        self.made.set_result(self.finished)

    @precondition(lambda self: not self.own.is_terminated())
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(legal(self.own)))
        assert self.tabled.accept_token(token)
        assert self.own.accept_token(token)
        self.length += 1

    @precondition(lambda self: not self.own.is_terminated())
    @rule(token=st.integers(0, SMALL.vocab_size - 1))
    def try_any(self, token: int) -> None:
        if token not in legal(self.own):
            assert not self.tabled.accept_token(token)
            assert not probe(self.tabled).takes([token])
        else:
            assert probe(self.tabled).takes([token])

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(self.length, 5)))
        self.tabled.rollback(count)
        self.own.rollback(count)
        self.length -= count

    @rule(keeps_fork=st.sampled_from([True, False]))
    def fork(self, keeps_fork: object) -> None:
        """Whichever goes on, the other one's moves do not show."""
        other, goes_on = self.tabled.fork(), self.tabled
        if keeps_fork:
            other, goes_on = goes_on, other
        if not other.is_terminated():
            for _ in range(2):
                if not other.is_terminated():
                    assert other.accept_token(legal(other)[0])
        self.tabled = goes_on

    @invariant()
    def agree(self) -> None:
        assert self.tabled.is_terminated() == self.own.is_terminated()
        if not self.own.is_terminated():
            assert row_of(self.tabled) == row_of(self.own)
        else:
            assert not self.tabled.accept_token(STOPS[0])


TestAgainstTheMatcher = AgainstTheMatcher.TestCase
TestAgainstTheMatcher.settings = settings(max_examples=examples(40), stateful_step_count=25)


def accepted(matcher: GrammarMatcher, data: bytes) -> bool:
    return all(map(matcher.accept_token, data))


def test_a_text_goes_over_to_a_table_and_counts_from_there() -> None:
    compiled, table = parts("whole")
    made: Future[TokenTable] = Future()
    matcher = TabledGrammar(compiled, lambda: made, 0).new_matcher()
    assert accepted(matcher, b'{"na')
    assert (matcher.num_tabled, matcher.own_matcher is None) == (0, False)
    made.set_result(table)
    assert accepted(matcher, b'me": "b"}')
    assert (matcher.num_tabled, matcher.own_matcher is None) == (9, True)
    matcher.rollback(2)
    assert (matcher.num_tabled, matcher.fork().num_tabled) == (7, 7)
    matcher.rollback(11)
    assert row_of(matcher) == row_of(compiled.new_matcher())


def test_a_text_that_leaves_the_table_goes_on_with_a_matcher() -> None:
    compiled, table = parts("part")
    matcher = TabledGrammar(compiled, lambda: finished(table), 0).new_matcher()
    deep = 40
    assert accepted(matcher, b"[" * deep + b"]" * deep)
    assert 0 < matcher.num_tabled < deep
    assert matcher.own_matcher is not None
    assert matcher.accept_token(STOPS[0])
    assert matcher.is_terminated()
    matcher.rollback(2 * deep)
    assert matcher.own_matcher is None


def test_what_is_wrong_is_said() -> None:
    compiled, table = parts("whole")
    matcher = TabledGrammar(compiled, lambda: finished(table), 0).new_matcher()
    assert accepted(matcher, b'{"name": ""}')
    assert matcher.accept_token(STOPS[1])
    with pytest.raises(GrammarStateError, match="the text is complete"):
        row_of(matcher)
    for count in (-1, 14):
        with pytest.raises(ConfigError, match=f"num_tokens={count}: must be between 0 and 13"):
            matcher.rollback(count)
    assert not any(map(matcher.accept_token, (-1, SMALL.vocab_size, 2**32 + ord("{"))))


def pipeline(when: Any, name: str = "auto") -> GrammarPipeline:
    endings = EndingsCache(SMALL)
    own = partial(BackendChoice, name)
    return GrammarPipeline(own(SMALL), endings=endings, tables=when, make=own, name=name)


def inside(compiled: CompiledGrammar) -> TabledGrammar:
    part = tabled_part(compiled)
    assert isinstance(part, TabledGrammar)
    return part


def test_tables_made_at_once() -> None:
    with closing(pipeline("always")) as made:
        closed = made.compile(GrammarSpec.json_schema(RECORD))
        assert isinstance(closed, NotedGrammar)
        assert (inside(closed).reason, closed.backend) == (None, "xgrammar")
        opened = made.compile(GrammarSpec.json_object())
        assert isinstance(opened, UniqueKeysGrammar)
        table = inside(opened).table
        assert table is not None
        assert not table.is_whole
        assert table_bytes(opened) == table.memory_size_bytes > 0
        matcher = opened.new_matcher()
        assert accepted(matcher, b'{"a": 1, "')
        assert not matcher.accept_token(ord("a")) or not matcher.accept_token(ord('"'))
        assert matcher.num_tabled > 0


def test_a_grammar_without_a_table_keeps_its_matcher() -> None:
    with closing(pipeline("always")) as made:
        spec = GrammarSpec.ebnf('root ::= "a" root "b" | "c"')
        compiled = inside(made.compile(spec))
        assert compiled.table is None or not compiled.table.is_whole
    with closing(pipeline("always", "llguidance")) as made:
        compiled_by_other = made.compile(GrammarSpec.json_schema(RECORD))
        assert not isinstance(compiled_by_other, TabledGrammar)
        assert table_bytes(compiled_by_other) == 0

    def fails(*_: object) -> TokenTable:
        raise NoTableError("none today")

    compiled_part, _ = parts("whole")
    hopeless = TableMaker(fails, 0).attach(SPECS["whole"], compiled_part)
    assert isinstance(hopeless, TabledGrammar)
    assert hopeless.reason == "none today"
    assert hopeless.new_parts().tabled is None


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_a_grammar_that_is_sent_again_and_again_gets_its_table_from_a_worker() -> None:
    with closing(pipeline("auto")) as made:
        grammar = inside(made.compile(SPECS["whole"]))
        first = grammar.new_matcher()
        assert accepted(first, b'{"name')
        for _ in range(31):
            assert not made._workers.pids
            assert grammar.new_parts().tabled is grammar
        until = time.monotonic() + 60
        while grammar.table is None and time.monotonic() < until:
            time.sleep(0.02)
        assert grammar.table is not None, grammar.reason
        assert compare_steps(grammar.table, grammar.inner) is None
        assert accepted(first, b'": "b"}')
        assert first.num_tabled == 7
        assert made._workers.pids


def test_no_table_is_begun_once_it_is_closed() -> None:
    made = pipeline("auto")
    grammar = inside(made.compile(SPECS["regex"]))
    made.close()
    for _ in range(40):
        grammar.new_matcher()
    assert grammar.reason == "none is made any more"
    assert not made._workers.pids


@pytest.mark.parametrize("max_tokens", [None, 25])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_rows_behind_a_place_are_the_tables(name: str, max_tokens: int | None) -> None:
    """As far as is asked, along random texts, of which a budget or the table's end are in reach."""
    compiled, table = parts(name)
    if name == "part":
        table = proven_table(compiled, Spelling(SMALL), TableLimits(states=300))
    grammar: Any = TabledGrammar(compiled, lambda: finished(table), 0)
    if max_tokens is not None:
        grammar = EndingsCache(SMALL).bound(grammar, max_tokens, is_required=False)
    dice, answers = random.Random(0), Counter[bool]()
    for _ in range(12):
        constraint = Constraint(grammar, STOPS)
        while not constraint.is_terminated and len(constraint.committed) < (max_tokens or 30):
            at, fork = constraint.table_state(3), constraint.fork()
            answers[at is not None] += 1
            state = None if at is None else at.state
            drafted = list[int]()
            for _ in range(4):
                found = row_of(fork.text)
                if state is not None:
                    assert found == table.row(state).tolist()
                token_id = dice.choice(legal(fork.text))
                assert fork.text.accept_token(token_id)
                drafted.append(token_id)
                if fork.text.is_terminated():
                    break
                if state is not None:
                    state = table.after(state, token_id)
            assert not fork.text.steered or at is None
            constraint.commit_ahead(drafted[: dice.randint(1, 4)])
    assert answers[True] >= 5
    assert answers[False] >= 3 or (max_tokens is None and table.is_whole)


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_matchers_of_a_text_in_its_table_read_many_tokens_at_once(max_tokens: int | None) -> None:
    """And nothing of it is left unread at its end, or in a statistic."""
    compiled, table = parts("regex")
    grammar: Any = TabledGrammar(compiled, lambda: finished(table), 0)
    if max_tokens is not None:
        grammar = EndingsCache(SMALL).bound(grammar, max_tokens, is_required=True)
    constraint, unread = Constraint(grammar, STOPS), list[int]()
    for _ in range(50):
        place = constraint.table_state(5)
        assert place is not None
        assert place.state == [0, *table.states(0, constraint.committed)][-1]
        assert constraint.catch_up() is None
        assert constraint.commit_ahead([97, 97, 98]) == [97, 97, 98]
        unread.append(len(constraint.committed) - len(constraint._original.token_ids))
        assert constraint.num_tabled == len(constraint.committed)
    assert max(unread) == MOST_UNREAD + 2
    assert constraint.commit([48, STOPS[0]]) == [48, STOPS[0]]
    assert constraint.is_terminated
    assert constraint.num_tabled == len(constraint.committed) == 152
    assert constraint.resyncs == 0


@pytest.mark.parametrize("max_tokens", [None, 330])
def test_a_fork_that_nobody_asked_for_is_made_anew(
    max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands where one stands that is asked for in every step, and has read little."""
    compiled, table = parts("regex")
    grammar: Any = TabledGrammar(compiled, lambda: finished(table), 0)
    if max_tokens is not None:
        grammar = EndingsCache(SMALL).bound(grammar, max_tokens, is_required=True)
    rare, often = Constraint(grammar, STOPS), Constraint(grammar, STOPS)
    advance, read = Fork.advance, Counter[Fork]()

    def counted(fork: Fork, token_ids: Sequence[int]) -> int:
        read[fork] += len(token_ids)
        return advance(fork, token_ids)

    monkeypatch.setattr(Fork, "advance", counted)
    for step in range(100):
        for constraint in (rare, often):
            assert constraint.table_state(5) is not None
            if constraint is often or step % 40 == 39:
                row = row_of(constraint.fork().text)
                assert constraint.fork().depth == 0
            assert constraint.commit_ahead([97, 97, 98]) == [97, 97, 98]
            assert constraint.catch_up() is None
        if step % 40 == 39:
            assert row == row_of(rare._fork.text)
    while len(often.committed) < (max_tokens or 330) - 2:  # a budget takes tokens out of these rows
        for constraint in (rare, often):
            row = row_of(constraint.fork().text)
            constraint.commit_ahead([97])
        assert row == row_of(rare._fork.text)
    assert all(one.commit([48, STOPS[0]]) == [48, STOPS[0]] for one in (rare, often))
    assert rare.steered == often.steered
    assert bool(rare.steered) == (max_tokens is not None)
    assert read[often._fork] == len(often.committed)
    since = 237  # tokens of the text when it was made anew last
    assert (read[rare._fork], rare.resyncs) == (len(rare.committed) - since, 0)


def test_what_a_fork_cut_is_known_when_it_is_made_anew() -> None:
    """A budget leaves no room for the first branch; behind the first token it is far away."""
    compiled = tabled_part(backend("auto").compile(GrammarSpec.regex("a{90}|b*c")))
    table = proven_table(compiled, Spelling(SMALL), TableLimits())
    grammar: Any = TabledGrammar(compiled, lambda: finished(table), 0)  # type: ignore[arg-type]
    grammar = EndingsCache(SMALL).bound(grammar, 85, is_required=True)
    constraint = Constraint(grammar, STOPS)
    assert constraint.table_state(5) is None
    assert legal(constraint.fork().text) == [98, 99]
    assert constraint.commit_ahead([98]) == [98]
    for _ in range(78):
        assert constraint.table_state(1) is not None
        assert constraint.commit_ahead([98]) == [98]
        assert constraint.catch_up() is None
    assert legal(constraint.fork().text) == [98, 99]
    assert constraint.steered == [0]


def test_a_token_that_a_table_refuses_is_found_at_the_next_commit() -> None:
    compiled, table = parts("regex")
    constraint = Constraint(TabledGrammar(compiled, lambda: finished(table), 0), STOPS)
    assert constraint.table_state(5) is not None
    assert constraint.commit_ahead([97, 99]) == [97, 99]
    assert isinstance(constraint.catch_up(), GrammarStateError)
    with pytest.raises(GrammarStateError, match="token 99 at output position 1"):
        constraint.commit_ahead([97])
