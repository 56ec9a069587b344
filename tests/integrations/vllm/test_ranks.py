"""Ranks that share a model, each with tables of its own, made in its own time: they do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import proven_table
from guided_spec.grammar.tables.tabled import TabledGrammar
from guided_spec.grammar.tables.token_table import OUTSIDE, TokenTable
from guided_spec.integrations.vllm import requests as vllm_requests
from guided_spec.integrations.vllm.drafts import tabled_requests
from guided_spec.integrations.vllm.drafts.tabled_requests import TabledRequests
from guided_spec.integrations.vllm.ranks import LATER, NEVER, OneRank, RankGroup
from guided_spec.integrations.vllm.requests import GrammarRequests
from tests.integrations.vllm.test_requests import Grammars, note
from tests.tiers import examples
from tests.toys import VOCAB_SIZE, VOCABULARY

CPU, RANKS, DEPTH = torch.device("cpu"), 2, 3
LETTERS, DIGITS = GrammarSpec.regex("[abc]{2,}"), GrammarSpec.regex("[10]{2,}")
TOKENS = {LETTERS: (0, 1, 2), DIGITS: (9, 10)}
GRAMMARS = {"a": LETTERS, "b": LETTERS, "d": DIGITS, "e": DIGITS, "free": None}


@cache
def whole_table(spec: GrammarSpec) -> TokenTable:
    compiled = XGrammarBackend(VOCABULARY).compile(spec)
    return proven_table(compiled, Spelling(VOCABULARY), TableLimits())


@cache
def part_table(spec: GrammarSpec) -> TokenTable:
    """A text of more than two tokens has left it."""
    whole = whole_table(spec)
    then = whole.then.copy()
    then[2, whole.classes[TOKENS[spec][0]]] = OUTSIDE
    return replace(whole, then=then)


class TabledGrammars(Grammars):
    """Their tables come when ``made`` says so."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.made = {spec: Future[TokenTable]() for spec in TOKENS}

    def compile(self, spec: GrammarSpec) -> TabledGrammar:
        inner: Any = self._backend.compile(spec)
        return TabledGrammar(inner, lambda: self.made[spec], 1)


class Rank:
    """One rank's requests, and what came of them, step by step: which walked, and the others'
    texts that the host knows."""

    def __init__(self, ranks: Any) -> None:
        parallel = SimpleNamespace(tensor_parallel_size=RANKS, pipeline_parallel_size=1)
        self.requests = GrammarRequests(SimpleNamespace(parallel_config=parallel))
        with torch.inference_mode(mode=False):
            self.tabled = TabledRequests(len(GRAMMARS), DEPTH, VOCAB_SIZE, None, CPU, 2**24)
        self.requests.use_tables(self.tabled, ranks)
        self.seen = list[tuple[list[str], list[Any], Any]]()
        self.looks = list[Any]()
        self.texts = dict[str, list[int]]()

    @property
    def made(self) -> dict[GrammarSpec, Future[TokenTable]]:
        grammars: Any = self.requests.grammars
        return grammars.made  # type: ignore[no-any-return]

    def add(self, *names: str) -> None:
        """Requests begin, or go on behind what they have written."""
        for name in names:
            spec = GRAMMARS[name]
            params = None if spec is None else SimpleNamespace(grammar=spec, max_tokens=None)
            self.requests.add(name, params, self.texts.setdefault(name, []))
        self.requests.begin_tables(names)

    def drop(self, name: str) -> None:
        """A request ends."""
        self.texts.pop(name, None)
        self.requests.keep(self.texts)

    def wait(self) -> None:
        """Until all grammars are compiled."""
        for asked in self.requests._asked.values():
            if asked.shadow is not None:
                asked.shadow._future.result(60)

    def step(self, sampled: dict[str, list[int]]) -> None:
        """As ``Drafting.step``, with the first masks of the draft."""
        names = [*sampled]
        note(self.requests, sampled)
        for name, tokens in sampled.items():
            self.texts[name] += tokens
        constraints: list[Any] = [None] * len(names)
        if self.requests.any_on_host(names):
            constraints = self.requests.commit(names)
        for name, constraint in zip(names, constraints, strict=True):
            assert constraint is None or constraint.committed == self.texts[name]
        walk = self.tabled.start(names)
        rows = torch.zeros(len(names), 1 + tabled_requests.TAIL, dtype=torch.int32)
        if walk is not None:
            walk.mask(0, rows, is_blank=True)
        tabled_names = [name for name in names if name in self.tabled]
        self.seen.append(
            (tabled_names, [one and one.committed for one in constraints], rows.tolist())
        )

    @property
    def tabled_names(self) -> list[list[str]]:
        return [names for names, _, _ in self.seen]


class World(NamedTuple):
    """Runs what each rank does, in a thread for each."""

    pool: ThreadPoolExecutor
    groups: list[RankGroup]

    def run(self, script: Callable[[Rank, int], None]) -> list[Rank]:
        """``script`` gets a rank and its number; the ranks behind it."""

        def one(number: int) -> Rank:
            rank = Rank(self.groups[number])
            script(rank, number)
            return rank

        running = [self.pool.submit(one, number) for number in range(RANKS)]
        return [future.result() for future in running]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    store = distributed.HashStore()  # type: ignore[attr-defined]

    def group(number: int) -> RankGroup:
        made = distributed.ProcessGroupGloo(store, number, RANKS, timedelta(seconds=20))
        return RankGroup(made)

    with ThreadPoolExecutor(RANKS) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_requests, "VllmGrammars", TabledGrammars)
        yield World(pool, [*pool.map(group, range(RANKS))])


def agreed(world: World, marks: Sequence[Sequence[int]]) -> list[list[int]]:
    """By rank, what the ranks with these marks agree on."""
    return [*world.pool.map(lambda group, own: group.agree(own), world.groups, marks)]


def test_all_do_what_all_can(world: World, caplog: pytest.LogCaptureFixture) -> None:
    found = agreed(world, [[5, 5, 5, LATER, NEVER, LATER], [5, LATER, NEVER, NEVER, 5, LATER]])
    assert found == [[5, LATER, NEVER, NEVER, NEVER, LATER]] * RANKS
    assert not caplog.records
    assert OneRank().agree([5, LATER, NEVER]) == [5, LATER, NEVER]


def test_tables_that_differ_are_not_used(world: World, caplog: pytest.LogCaptureFixture) -> None:
    assert agreed(world, [[5, 2**33], [6, 2**33]]) == [[NEVER, 2**33]] * RANKS
    assert "different tables" in caplog.text


def test_equal_tables_have_one_fingerprint() -> None:
    copies = [replace(whole_table(spec)) for spec in TOKENS]
    assert [one.fingerprint for one in copies] == [whole_table(x).fingerprint for x in TOKENS]
    row_of = copies[0].row_of[::-1].copy()
    others = [replace(copies[0], row_of=row_of), part_table(LETTERS), *copies]
    assert len({one.fingerprint for one in others}) == len(others)


def test_a_request_walks_from_where_the_last_rank_has_its_table(world: World) -> None:
    def script(rank: Rank, number: int) -> None:
        rank.add("a", "d", "free")
        rank.wait()
        for at in range(6):
            if at == (1, 3)[number]:
                rank.made[LETTERS].set_result(whole_table(LETTERS))
            if at == (4, 2)[number]:
                rank.made[DIGITS].set_result(whole_table(DIGITS))
            rank.step({"d": [9], "a": [0, 1], "free": [5]})
        rank.add("b", "a")
        rank.step({"b": [], "d": [], "a": []})

    ranks = world.run(script)
    assert ranks[0].tabled_names == [[], [], [], ["a"], ["d", "a"], ["d", "a"], ["b", "d", "a"]]
    assert ranks[0].seen == ranks[1].seen


def test_a_rank_without_room_leaves_the_others_without_a_walk(world: World) -> None:
    size = whole_table(LETTERS).memory_size_bytes
    assert size >= whole_table(DIGITS).memory_size_bytes

    def script(rank: Rank, number: int) -> None:
        for spec in TOKENS:
            rank.made[spec].set_result(whole_table(spec))
        if number == 0:
            rank.tabled._tables._left = size  # of one table
        rank.add("a", "d")
        rank.wait()
        for _ in range(3):
            rank.step({"a": [0], "d": [9]})
        rank.drop("a")
        rank.step({"d": [9]})

    ranks = world.run(script)
    assert ranks[0].tabled_names == [[], ["a"], ["a"], ["d"]]
    assert ranks[0].seen == ranks[1].seen


def test_what_never_has_a_table_is_not_asked_about_again(world: World) -> None:
    """One rank has found out, then the other; and a text has left its table."""
    counts = [list[int](), list[int]()]

    def script(rank: Rank, number: int) -> None:
        def agree(marks: Sequence[int]) -> list[int]:
            counts[number].append(len(marks))
            return world.groups[number].agree(marks)

        rank.requests.use_tables(rank.tabled, SimpleNamespace(agree=agree))
        rank.add("a", "d")
        rank.wait()
        rank.made[LETTERS].set_result(part_table(LETTERS))
        for at in range(8):
            if at == 1 + number:
                rank.made[DIGITS].set_exception(NoTableError("it is too large"))
            rank.step({"a": [0], "d": [9]})

    ranks = world.run(script)
    assert ranks[0].tabled_names == [[], ["a"], *[[]] * 6]
    assert counts[0] == counts[1] == [2, 2, 2, 1]
    assert ranks[0].seen == ranks[1].seen


def test_a_text_that_vllm_sets_back_may_walk_again(world: World) -> None:
    def script(rank: Rank, number: int) -> None:
        rank.add("a", "free")
        rank.wait()
        for at in range(6):
            if at == number:
                rank.made[LETTERS].set_result(part_table(LETTERS))
            rank.step({"a": [0]})
        rank.texts["a"] = [1]
        rank.requests.restate("a", [1])
        rank.step({"free": [5]})
        rank.step({"a": [1]})

    ranks = world.run(script)
    # It leaves at the third token, which the host reads at the second step behind it.
    assert ranks[0].tabled_names == [[], ["a"], ["a"], ["a"], [], [], [], ["a"]]
    assert ranks[0].seen == ranks[1].seen


def test_the_host_goes_by_no_table(world: World) -> None:
    """A rank that has one drafts what the others draft, which have none."""

    def script(rank: Rank, number: int) -> None:
        rank.add("a")
        rank.wait()
        rank.step({"a": [0]})
        if number == 0:
            rank.made[LETTERS].set_result(whole_table(LETTERS))
        rank.step({"a": [0]})
        note(rank.requests, {"a": [1]})
        (constraint,) = rank.requests.commit(["a"])
        assert constraint is not None
        assert constraint.table_state(0) is None

    world.run(script)


class Kind(NamedTuple):
    """A grammar's table as each rank has it: from which step on, and what; None: there is none."""

    since: list[int]
    has: list[bool]
    is_part: bool


KIND = st.builds(
    Kind,
    st.lists(st.integers(0, 6), min_size=RANKS, max_size=RANKS),
    st.lists(st.sampled_from([True, True, True, False]), min_size=RANKS, max_size=RANKS),
    st.booleans(),
)
STEP = st.tuples(
    st.sampled_from(["rest", "rest", "add", "drop", "look", "restate"]),
    st.lists(st.sampled_from([*GRAMMARS]), min_size=1, unique=True),
    st.lists(st.integers(0, 2), min_size=len(GRAMMARS), max_size=len(GRAMMARS)),
)


def take(rank: Rank, at: int, number: int, kinds: Sequence[Kind]) -> None:
    """The tables that come before step ``at``."""
    for (spec, future), kind in zip(rank.made.items(), kinds, strict=True):
        if at == kind.since[number]:
            if kind.has[number]:
                future.set_result((part_table if kind.is_part else whole_table)(spec))
            else:
                future.set_exception(NoTableError("there is none"))


@settings(max_examples=examples(80))
@given(
    st.tuples(KIND, KIND),
    st.tuples(st.sampled_from([100, 2**20]), st.sampled_from([100, 2**20])),
    st.lists(STEP, max_size=14),
)
def test_whatever_comes_when_all_ranks_do_the_same(
    world: World,
    kinds: tuple[Kind, Kind],
    limits: tuple[int, int],
    steps: list[tuple[str, list[str], list[int]]],
) -> None:
    def script(rank: Rank, number: int) -> None:
        rank.tabled._tables._left = limits[number]
        for at, (what, names, counts) in enumerate(steps):
            take(rank, at, number, kinds)
            for name in names:
                if what == "look" and name in rank.texts:
                    found = rank.requests.at_hand(name)
                    rank.looks.append(found and found.committed)
                if what == "drop":
                    rank.drop(name)
                if what == "restate" and name in rank.texts:
                    del rank.texts[name][-1:]
                    rank.requests.restate(name, [*rank.texts[name]])
            known = {*rank.texts}
            rank.add(*(name for name in names if what == "add" or name not in known))
            tokens = zip(names, counts, strict=False)
            rank.step(
                {name: [(TOKENS[x][0] if (x := GRAMMARS[name]) else 5)] * n for name, n in tokens}
            )

    ranks = world.run(script)
    assert ranks[0].seen == ranks[1].seen
    assert ranks[0].looks == ranks[1].looks
