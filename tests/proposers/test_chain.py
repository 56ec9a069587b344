"""Chains: one draft, in turns, never wider than the rows that verify it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from guided_spec import proposers
from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, DraftInFlight, Proposer, TargetOutput
from guided_spec.errors import ConfigError
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.ops.host import Download
from guided_spec.proposers import build_proposer
from guided_spec.proposers.drafting import host_draft
from guided_spec.step import commit, speculative_step
from guided_spec.types import Accepted, Draft
from tests.toys import ToyCompiled, ToyTarget, text_rule, toy_batch, toy_context


class Fixed:
    """Drafts what it is told, [B] lists, whenever it is asked."""

    def __init__(self, drafts: list[list[int]], layers: tuple[int, ...] = ()) -> None:
        self.aux_hidden_layers = layers
        self.released: list[int] = []
        self._drafts = drafts

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        drafts = [row[: batch.num_draft_tokens] for row in self._drafts]
        return host_draft(batch, lookahead.extend(drafts))

    def release(self, slots: Sequence[int]) -> None:
        self.released.extend(slots)


class Flight(NamedTuple):
    """Of what ``Launched`` drafts: ``finish`` walks it."""

    draft: Draft
    most: tuple[int, ...]
    lookahead: Lookahead
    answered: list[str]

    @property
    def is_advanced(self) -> bool:
        return False

    @property
    def serve_mailbox(self) -> Callable[[], None]:
        return partial(self.answered.append, "serve_mailbox")

    def finish(self) -> Draft:
        legal = self.lookahead.extend(self.draft.token_ids.tolist())
        return self.draft._replace(num_tokens=torch.tensor([len(row) for row in legal]))

    def carry(self, *_: Any) -> str:
        return "carried"


class Launched(Proposer):
    """Drafts two tokens of each request, which nobody knows before they are finished."""

    aux_hidden_layers: tuple[int, ...] = (1,)
    ends_chains = True

    def __init__(self) -> None:
        self.begun: list[tuple[int, object | None]] = []
        self.answered: list[str] = []

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        self.begun.append((batch.num_draft_tokens, carry))
        count = min(2, batch.num_draft_tokens)
        starts = [len(drafted) for drafted in lookahead.drafted]
        most = tuple(
            min(count, limit - start) for limit, start in zip(batch.limits, starts, strict=True)
        )
        ids = torch.full((len(batch), count), 3)
        return Flight(Draft(ids, torch.tensor(most)), most, lookahead, self.answered)

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""


def chain(monkeypatch: pytest.MonkeyPatch, **members: Any) -> Proposer:
    for name, member in members.items():
        monkeypatch.setitem(proposers.PROPOSERS, name, lambda _, member=member: member)
    return build_proposer("chain:" + "+".join(members), toy_context())


@pytest.mark.parametrize("argument", ["", "ngram", "ngram+", "chain+ngram", "ngram+chain"])
def test_bad_arguments(argument: str) -> None:
    with pytest.raises(ConfigError, match="at least two proposers"):
        build_proposer(f"chain:{argument}", toy_context())


def test_forced_text_leads_and_lookup_follows() -> None:
    rule = text_rule([b"abcdabcd1", b"abcdabcd0", b"abcdbbbb1", b"abcda1"])
    batch = toy_batch([[0, 1, 2, 3]], [Constraint(ToyCompiled(rule))], k=2, limits=[9])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft = (
        build_proposer("chain:grammar_forced+ngram", toy_context()).begin(batch, lookahead).finish()
    )
    assert lookahead.drafted[0][:6] == [0, 1, 2, 3, 0, 1]
    assert lookahead.forced[0][:4] == [0, 1, 2, 3]
    assert draft.token_ids[0, : int(draft.num_tokens)].tolist() == lookahead.drafted[0]


def test_hidden_states_and_release(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Fixed([[1]], (1, 3)), Fixed([[2]])
    built = chain(monkeypatch, one=one, two=two)
    assert built.aux_hidden_layers == (1, 3)
    built.release([4, 5])
    assert one.released == two.released == [4, 5]
    with pytest.raises(ConfigError, match="different hidden states"):
        chain(monkeypatch, one=one, three=Fixed([[1]], (2,)))


def test_members_continue_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request gets K tokens of the second and the first one's answers, as it does alone."""
    ones, twos = [[1], [1, 1], [], [1]], [[2, 2], [], [2], [2]]
    expected = [[1, 2, 2, 1], [1, 1], [2, 2], [1, 2, 1, 2, 1]]

    def drafts(rows: Sequence[int]) -> list[list[int]]:
        one, two = Fixed([ones[row] for row in rows]), Fixed([twos[row] for row in rows])
        batch = toy_batch([[0]] * len(rows), [None] * len(rows), k=2, limits=[8] * len(rows))
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        draft = chain(monkeypatch, one=one, two=two).begin(batch, lookahead).finish()
        pairs = zip(draft.token_ids.tolist(), draft.num_tokens.tolist(), strict=True)
        lists = [tokens[:length] for tokens, length in pairs]
        assert lists == lookahead.drafted
        assert draft.token_ids.shape[1] <= max(map(len, lists)) + 1
        return lists

    assert drafts(range(4)) == expected
    assert [drafts([row])[0] for row in range(4)] == expected


def test_a_draft_that_nobody_announced_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is walked whoever has a draft before it, and cut where a request's turn ends."""

    class Silent(Fixed):
        def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
            rows = zip(self._drafts, lookahead.is_open, strict=True)
            return host_draft(batch, [row if is_open else [] for row, is_open in rows])

    built = chain(monkeypatch, one=Fixed([[1], []]), two=Silent([[2, 2, 2], [3]]))
    batch = toy_batch([[0], [0]], [None, None], k=2, limits=[8, 8])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft = built.begin(batch, lookahead).finish()
    assert lookahead.drafted == [[1, 2, 2, 1], [3, 3]]
    assert draft.num_tokens.tolist() == [4, 2]
    assert draft.token_ids.tolist() == [[1, 2, 2, 1], [3, 3, 0, 0]]


@pytest.mark.parametrize("spec", ["chain:grammar_forced+ngram", "chain:ngram+grammar_forced"])
def test_ragged_drafts_fit_the_mask_rows(spec: str) -> None:
    """The first request is forced at once, the second one only behind what lookup found."""
    config = EngineConfig(num_draft_tokens=2, max_forced_tokens=6)
    rules = [text_rule([b"abcdabcd"]), text_rule([b"dabcdabc", b"cabcdabc"])]
    constraints = [Constraint(ToyCompiled(rule)) for rule in rules]
    rows = config.num_draft_tokens + config.max_forced_tokens
    batch = toy_batch([[0], [3, 3]], constraints, k=config.num_draft_tokens, limits=[rows, rows])
    proposer = build_proposer(spec, toy_context(config=config))
    step = speculative_step(ToyTarget(), proposer, batch)
    assert step.draft.token_ids.shape[1] <= rows
    assert bool((step.draft.num_tokens <= step.draft.token_ids.shape[1]).all())
    assert sorted(map(len, step.lookahead.drafted)) == sorted(step.draft.num_tokens.tolist())
    assert all(committed.error is None for committed in commit(batch, step.accepted))


def test_an_illegal_token_at_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Illegal(Fixed):
        def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
            lookahead.accept(torch.tensor([9]))
            return host_draft(batch, [[9]])

    batch = toy_batch([[0]], [Constraint(ToyCompiled(text_rule([b"ab"])))], k=3)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    built = chain(monkeypatch, one=Fixed([[0]]), two=Illegal([[]]))
    draft = built.begin(batch, lookahead).finish()
    assert draft.token_ids.tolist() == [[0, 9]]
    assert draft.num_tokens.tolist() == [2]
    assert lookahead.drafted == [[0]]


def test_a_draft_under_way_ends_the_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is joined before anybody knows it; who comes behind it gets its hidden states only."""
    one, two, three = Fixed([[1, 1], [], [1]]), Launched(), Launched()
    built = chain(monkeypatch, one=one, two=two, three=three)
    only_threes = text_rule([b"ddd", b"ddda"])
    constraints = [None, Constraint(ToyCompiled(only_threes)), None]
    batch = toy_batch([[0]] * 3, constraints, k=2, limits=[3, 8, 8])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    flight = built.begin(batch, lookahead)
    assert not flight.is_advanced
    assert flight.most == (3, 2, 3)
    assert flight.draft.token_ids.tolist() == [[1, 1, 3], [3, 3, 0], [1, 3, 3]]
    assert lookahead.drafted == [[1, 1], [], [1]]
    assert two.answered == ["serve_mailbox"]  # before the third read
    assert flight.serve_mailbox is not None
    flight.serve_mailbox()
    assert (two.answered, three.answered) == (["serve_mailbox"] * 2, [])
    draft = flight.finish()
    assert draft.token_ids.tolist() == flight.draft.token_ids.tolist()
    assert draft.num_tokens.tolist() == [3, 2, 3]
    assert lookahead.drafted == [[1, 1, 3], [3, 3], [1, 3, 3]]
    assert (two.begun, three.begun) == ([(2, None)], [(0, None)])
    carried = flight.carry(
        Accepted(draft.token_ids, draft.num_tokens),
        TargetOutput(torch.ones(1)),
        Download(torch.ones(1)),
    )
    again = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    built.begin(batch, again, carried)
    assert (two.begun[1:], three.begun[1:]) == ([(2, "carried")], [(0, "carried")])


def test_what_is_left_for_a_draft_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """K tokens for all members behind the first, each request by itself."""
    one, two, three = Fixed([[1], [1], []]), Fixed([[2], [2, 2], []]), Launched()
    built = chain(monkeypatch, one=one, two=two, three=three)
    batch = toy_batch([[0]] * 3, [None] * 3, k=2, limits=[8] * 3)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    flight = built.begin(batch, lookahead)
    assert lookahead.drafted == [[1, 2, 1], [1, 2, 2, 1], []]
    assert flight.most == (4, 4, 2)
    assert flight.finish().num_tokens.tolist() == [4, 4, 2]
    assert lookahead.drafted == [[1, 2, 1, 3], [1, 2, 2, 1], [3, 3]]
