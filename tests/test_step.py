"""The step: what it emits is the target's, whatever was drafted; a failure is its request's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.core import DecodeBatch, DraftInFlight, TargetOutput, from_propose
from guided_spec.errors import GrammarDeadEndError, GrammarStateError, NoTokenLeftError
from guided_spec.masks import lookahead
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.ops.sampling.logprobs import LogprobsPlan
from guided_spec.ops.side_stream import SideStream
from guided_spec.proposers.drafting import NoDraft, host_draft
from guided_spec.step import commit, speculative_step
from guided_spec.types import Accepted, Draft, SamplingParams
from tests.loops import plain_greedy, speculate, target_probs
from tests.tiers import examples
from tests.toys import (
    CPU,
    EOS,
    VOCAB_SIZE,
    Rule,
    ToyCompiled,
    ToyDrafter,
    ToyTarget,
    chi_square_p_value,
    hashed_rule,
    text_rule,
    toy_batch,
    toy_context,
)

TARGET = ToyTarget(1)
PROMPT = [4]
NONE = NoDraft(toy_context())


class Guesser:
    """Drafts the target's own greedy tokens, each replaced by a random one now and then.

    how: ``blind`` never consults the lookahead, ``extend`` and ``accept`` tell it their tokens.
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, rules: Sequence[Rule | None], how: str, error_rate: float) -> None:
        self._rules, self._how, self._error_rate = rules, how, error_rate
        self._dice = random.Random(3)

    def guess(self, batch: DecodeBatch, row: int) -> list[int]:
        output = list(batch.contexts[row][len(PROMPT) :])
        rule = self._rules[batch.slots[row]]
        length = min(batch.limits[row], self._dice.randint(0, batch.num_draft_tokens))
        tokens = plain_greedy(TARGET, rule, PROMPT, len(output) + length)[len(output) :]
        return [
            self._dice.randrange(VOCAB_SIZE) if self._dice.random() < self._error_rate else token
            for token in tokens
        ]

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        guesses = [self.guess(batch, row) for row in range(len(batch))]
        if self._how == "extend":
            guesses = lookahead.extend(guesses)
        if self._how == "accept":
            for depth in range(max(map(len, guesses))):
                lookahead.next_mask()
                tokens = [g[depth] if depth < len(g) else -1 for g in guesses]
                lookahead.accept(torch.tensor(tokens))
        return host_draft(batch, guesses)

    def release(self, slots: Sequence[int]) -> None:
        del slots


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0], ids=["oracle", "corrupted", "random"])
@pytest.mark.parametrize("how", ["blind", "extend", "accept"])
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 99))
def test_greedy_is_plain_greedy(how: str, error_rate: float, seed: int) -> None:
    rules = [hashed_rule(seed), None, text_rule([b"abcd", b'{"a":1}']), hashed_rule(seed + 1, 0.2)]
    found = speculate(
        TARGET, from_propose(Guesser(rules, how, error_rate)), rules, PROMPT, length=10
    )
    assert found == [plain_greedy(TARGET, rule, PROMPT, 10) for rule in rules]


def test_an_oracle_saves_steps() -> None:
    rules = [hashed_rule(0)]
    oracle = Guesser(rules, "blind", 0.0)
    batch = toy_batch([PROMPT], [Constraint(ToyCompiled(rules[0]))], k=5)
    oracle.guess = lambda *_: plain_greedy(TARGET, rules[0], PROMPT, 5)  # type: ignore[method-assign]
    step = speculative_step(TARGET, from_propose(oracle), batch)
    assert step.accepted.num_accepted.item() == step.draft.num_tokens.item() > 1
    assert step.num_drafted.wait().tolist() == step.draft.num_tokens.tolist()


ROWS = 6000


def emit(rule: Rule, seed: int, draft_seed: int, length: int) -> torch.Tensor:
    """[ROWS, length] sampled by steps with drafts of another model; padded with the end."""
    drafter, target = ToyDrafter(ToyTarget(draft_seed)), ToyTarget(seed)
    grammar = ToyCompiled(rule)
    constraints = [Constraint(grammar) for _ in range(ROWS)]
    outputs: list[list[int]] = [[] for _ in range(ROWS)]
    live = list(range(ROWS))
    while live:
        batch = toy_batch(
            [PROMPT + outputs[row] for row in live],
            [constraints[row] for row in live],
            k=2,
            params=[SamplingParams(temperature=1.0)] * len(live),
            seeds=[1000 * seed + row for row in live],
        )
        step = speculative_step(target, from_propose(drafter), batch)
        for row, committed in zip(live, commit(batch, step.accepted), strict=True):
            assert committed.error is None
            outputs[row] += committed.token_ids
            if EOS in outputs[row]:
                outputs[row] += [EOS] * length
        live = [row for row in live if len(outputs[row]) < length]
    return torch.tensor([output[:length] for output in outputs])


# A drafter that is the target itself: everything is accepted, and the bonus tokens are put to test.
@pytest.mark.parametrize(("seed", "draft_seed"), [(0, 1), (1, 2), (0, 0), (2, 2)])
def test_the_law_of_consecutive_steps(seed: int, draft_seed: int) -> None:
    rule, target = hashed_rule(seed, 0.25), ToyTarget(seed)
    found = emit(rule, seed, draft_seed, 3)
    law = torch.zeros(VOCAB_SIZE**3, dtype=torch.float64)
    texts: list[tuple[list[int], float]] = [([], 1.0)]
    for _ in range(3):
        texts = [
            ([*text, token], mass * probability)
            for text, mass in texts
            for token, probability in enumerate(following(target, rule, text))
            if probability > 0
        ]
    for text, mass in texts:
        law[number(torch.tensor(text))] = mass
    assert law.sum().item() == pytest.approx(1.0, abs=1e-5)
    counts = torch.bincount(number(found), minlength=VOCAB_SIZE**3)
    assert chi_square_p_value(counts, law) > 1e-6


def following(target: ToyTarget, rule: Rule, text: list[int]) -> list[float]:
    if EOS in text:
        return [float(token == EOS) for token in range(VOCAB_SIZE)]
    probs: list[float] = target_probs(target, rule, PROMPT, text).tolist()
    return probs


def number(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens * torch.tensor([VOCAB_SIZE**2, VOCAB_SIZE, 1])).sum(-1)


def liar() -> ToyCompiled:
    compiled = ToyCompiled(text_rule([b"ab"]))
    compiled.refused = frozenset({0})
    return compiled


def stuck() -> ToyCompiled:
    return ToyCompiled(lambda prefix: frozenset({0}) if not prefix else frozenset())


Drafts = Callable[[DecodeBatch], list[list[int]]]


@pytest.mark.parametrize(
    ("broken", "error", "kept"),
    [(liar, GrammarStateError, []), (stuck, GrammarDeadEndError, [0])],
)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_broken_request_fails_alone(
    broken: Callable[[], ToyCompiled], error: type[Exception], kept: list[int], *, drafts: bool
) -> None:
    healthy = hashed_rule(5)
    constraints = [Constraint(broken()), Constraint(ToyCompiled(healthy)), None]
    expected = [plain_greedy(TARGET, rule, PROMPT, 8) for rule in (healthy, None)]
    outputs: list[list[int]] = [[], [], []]
    errors: list[Exception] = []
    live = [0, 1, 2]
    while len(outputs[1]) < 4 or len(outputs[2]) < 4:
        contexts = [PROMPT + outputs[row] for row in live]
        batch = toy_batch(contexts, [constraints[row] for row in live])
        proposer = ToyDrafter(TARGET) if drafts else NONE
        step = speculative_step(TARGET, from_propose(proposer), batch)
        for row, committed in zip(list(live), commit(batch, step.accepted), strict=True):
            outputs[row] += committed.token_ids
            if committed.error is not None:
                assert row == 0
                errors.append(committed.error)
                live.remove(row)
    assert [type(found) for found in errors] == [error]
    assert outputs[0] == kept
    for found, wanted in zip(outputs[1:], expected, strict=True):
        shared = min(len(found), len(wanted))
        assert found[:shared] == wanted[:shared]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_thread_fills_beside_a_slow_launch_only(
    monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    target = ToyTarget(1)
    monkeypatch.setattr(lookahead, "ROWS_WORTH_A_THREAD", 1)
    batch = toy_batch([PROMPT], [Constraint(ToyCompiled(text_rule([b"ab"])))], k=2)
    filling: list[bool] = []
    verify = target.verify

    def watched(batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        filling.append(batch.mask_rows._filling is not None)
        return verify(batch, flight)

    monkeypatch.setattr(target, "verify", watched)
    for text in ([0], [1], [EOS]):
        side = SideStream.none() if at_once else None
        step = speculative_step(target, from_propose(NONE), batch, side=side)
        assert [row.token_ids for row in commit(batch, step.accepted)] == [text]
        batch = replace(batch, contexts=([*batch.contexts[0], *text],))
    assert filling == [not at_once] * 3


def test_the_end_inside_a_draft_is_no_dead_end() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"a"])))
    batch = toy_batch([PROMPT], [constraint])
    accepted = Accepted(torch.tensor([[0, EOS, -1, -1]]), torch.tensor([2]))
    (row,) = commit(batch, accepted)
    assert row == ([0, EOS], 2, None)
    assert constraint.is_terminated


def test_log_probabilities_follow_the_committed_tokens() -> None:
    """Of those requests that ask, whatever was drafted; cut where the grammar ends."""
    rules = [text_rule([b"ab"]), None]
    params = [SamplingParams(logprobs=1, logprobs_mode="masked"), SamplingParams()]
    batch = toy_batch([PROMPT] * 2, [Constraint(ToyCompiled(text_rule([b"ab"]))), None])
    oracle = Guesser(rules, "blind", 0.0)
    oracle.guess = lambda *_: [0, 1, EOS]  # type: ignore[method-assign]
    assert speculative_step(TARGET, from_propose(oracle), batch).logprobs is None
    batch.logprobs = LogprobsPlan.stack(params, CPU)
    step = speculative_step(TARGET, from_propose(oracle), batch)
    committed = commit(batch, step.accepted)
    assert step.logprobs is not None
    asked, quiet = step.logprobs.records([row.token_ids for row in committed])
    assert quiet == []
    assert [one.token_id for one in asked] == committed[0].token_ids == [0, 1, EOS]
    assert [one.logprob for one in asked] == [0.0] * 3  # the only legal token each time


def test_free_requests_have_dead_ends_too() -> None:
    batch = toy_batch([PROMPT], [None])
    (row,) = commit(batch, Accepted(torch.tensor([[3, -1]]), torch.tensor([1])))
    assert row.token_ids == [3]
    assert isinstance(row.error, NoTokenLeftError)
    assert "at output position 1: the target's logits" in str(row.error)
