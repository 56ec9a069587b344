"""The adaptive K: in simulated worlds whose best K is known, in the engine, and under the law."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from guided_spec.config import EngineConfig
from guided_spec.engine.draft_length import (
    Acceptance,
    AdaptiveLength,
    Brought,
    FixedLength,
    Outcome,
    OwnAcceptance,
    Room,
    StepCost,
    Timing,
    build_draft_length,
)
from guided_spec.engine.outputs import Completion
from guided_spec.errors import ConfigError
from guided_spec.ops.sampling.noise import Stream, uniform_noise
from guided_spec.types import SamplingParams
from tests.engine.test_equality import PARAMS, PROMPTS, tokens
from tests.law.harness import Case, check_law, emit
from tests.law.world import SETTINGS, VOCAB_SIZE, K
from tests.tiny_llm import make_llm, near_copy

PLENTY = 10**6  # tokens of room


@dataclass
class World:
    """Steps that take ``1 + draft * K + verify * B * K`` seconds, and requests with known rates.

    rates: of each request, the same at every place. jitter: standard deviation of the time's
    logarithm. pauses: the share of the steps that take thirty times as long.
    """

    rates: Sequence[float]
    draft: float
    verify: float = 0.0
    most: int = 5
    jitter: float = 0.03
    pauses: float = 0.0
    now: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self) -> float:
        return self.now

    def seconds(self, length: int) -> float:
        return 1.0 + self.draft * length + self.verify * len(self.rates) * length

    def gain(self, length: int) -> float:
        return sum(sum(rate**place for place in range(length + 1)) for rate in self.rates)

    def value(self, length: int) -> float:
        """Expected tokens a second of a fixed K."""
        return self.gain(length) / self.seconds(length)

    @property
    def best(self) -> float:
        return max(self.value(length) for length in range(self.most + 1))

    def accepted(self, rate: float, length: int) -> int:
        places = (place for place in range(length) if self.dice.random() >= rate)
        return next(places, length)


class Run(NamedTuple):
    """The K of each step, and the tokens a second that are expected of just these."""

    lengths: list[int]
    value: float


class Simulation:
    """A policy in a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.policy = AdaptiveLength(world.most, world.clock)
        self.rooms = [Room(OwnAcceptance(), PLENTY) for _ in world.rates]

    def run(self, steps: int) -> Run:
        world, lengths = self.world, []
        for _ in range(steps):
            length = self.policy.begin(self.rooms)
            pause = 30.0 if world.dice.random() < world.pauses else 1.0
            noise = math.exp(world.dice.gauss(0.0, world.jitter))
            world.now += world.seconds(length) * pause * noise
            outcomes = [Outcome(length, world.accepted(rate, length)) for rate in world.rates]
            self.policy.end(Brought(outcomes, width=length, forced=0))
            lengths.append(length)
        gains = sum(map(world.gain, lengths))
        return Run(lengths, gains / sum(map(world.seconds, lengths)))


worlds = st.builds(
    lambda rate, size, **costs: World([rate] * size, **costs),
    rate=st.floats(0.0, 0.97),
    size=st.sampled_from([1, 2, 5, 12]),
    draft=st.floats(0.0, 0.5),
    verify=st.sampled_from([0.0, 0.003, 0.05]),
    most=st.sampled_from([1, 3, 5, 12]),
    jitter=st.sampled_from([0.0, 0.03, 0.08]),
    pauses=st.sampled_from([0.0, 0.01]),
)


@given(worlds)
@settings(max_examples=15)
def test_finds_the_best_length_and_is_never_slower_than_plain(world: World) -> None:
    simulation = Simulation(world)
    first, later = simulation.run(1000), simulation.run(1500)
    assert later.value >= 0.98 * world.best
    lengths = first.lengths + later.lengths
    total = sum(map(world.gain, lengths)) / sum(map(world.seconds, lengths))
    assert total >= 0.98 * world.value(0)


@given(
    rate=st.floats(0.0, 0.2),
    size=st.sampled_from([1, 8]),
    draft=st.floats(0.25, 1.0),
    most=st.sampled_from([1, 5, 64]),
)
@settings(max_examples=15)
def test_costs_little_where_drafts_never_pay(
    rate: float, size: int, draft: float, most: int
) -> None:
    world = World([rate] * size, draft, most=most)
    assert world.best == world.value(0)
    run = Simulation(world).run(3000)
    assert run.value >= 0.98 * world.value(0)


def test_follows_a_text_that_becomes_harder_and_easier() -> None:
    world = World([0.9], 0.1)
    simulation = Simulation(world)
    assert simulation.run(800).value > 2.0
    world.rates = [0.05]
    simulation.run(150)
    assert simulation.run(800).value >= 0.98 * world.value(0)
    world.rates = [0.9]
    simulation.run(1500)
    assert simulation.run(800).value >= 0.97 * world.best


def test_follows_a_machine_that_becomes_slower() -> None:
    world = World([0.6], 0.02)
    simulation = Simulation(world)
    assert simulation.run(600).lengths[-1] > 2
    world.draft = 0.7
    simulation.run(600)
    assert simulation.run(600).value >= 0.97 * world.best
    world.draft = 0.02
    simulation.run(8000)
    assert simulation.run(600).value >= 0.97 * world.best


def test_weighs_requests_that_differ() -> None:
    world = World([0.95, 0.95, 0.1, 0.0], draft=0.05, verify=0.01)
    simulation = Simulation(world)
    simulation.run(600)
    assert simulation.run(1000).value >= 0.98 * world.best
    easy, _, _, hard = (room.own.failure_ratio for room in simulation.rooms)
    assert easy < 0.5 < 1.0 < hard


def test_a_request_that_leaves_takes_its_rate_along() -> None:
    world = World([0.95, 0.0, 0.0, 0.0], draft=0.3)
    simulation = Simulation(world)
    simulation.run(500)
    world.rates, simulation.rooms = world.rates[:1], simulation.rooms[:1]
    simulation.run(100)
    assert simulation.run(400).value >= 0.97 * world.best


def test_begins_with_a_length_that_is_often_right_and_then_measures_plain_steps() -> None:
    for most, first in ((1, 1), (3, 3), (5, 5), (40, 5)):
        lengths = Simulation(World([0.8], 0.1, most=most)).run(6).lengths
        assert lengths == [first] * 4 + [0, 0]


def test_never_more_than_the_largest_room() -> None:
    simulation = Simulation(World([0.95, 0.95], 0.01))
    simulation.run(100)
    for rooms, most in (((3, 1), 3), ((0, 0), 0), ((0, 2), 2), ((PLENTY, 0), 5)):
        simulation.rooms = [Room(OwnAcceptance(), room) for room in rooms]
        assert max(simulation.run(8).lengths) <= most


def test_no_draft_tokens_at_all() -> None:
    assert set(Simulation(World([0.9], 0.1, most=0)).run(50).lengths) == {0}


def test_steps_with_a_prefill_teach_nothing_about_time() -> None:
    """A prompt is read whenever K is 0, which then looks a hundred times dearer than it is."""
    world = World([0.0], draft=0.5, jitter=0.0)
    simulation, policy = Simulation(world), AdaptiveLength(5, world.clock)
    lengths = []
    for step in range(400):
        length = policy.begin(simulation.rooms)
        has_prefill = length == 0 and step % 2 == 0
        world.now += 100.0 if has_prefill else world.seconds(length)
        policy.end(Brought([Outcome(length, 0)], length, 0), is_typical=not has_prefill)
        lengths.append(length)
    assert sum(length == 0 for length in lengths[100:]) > 280


def test_prefills_in_every_step_leave_the_first_length() -> None:
    policy, room = AdaptiveLength(5, lambda: 0.0), Room(OwnAcceptance(), PLENTY)
    for _ in range(50):
        assert policy.begin([room]) == 5
        policy.end(Brought([Outcome(5, 5)], 5, 0), is_typical=False)


def test_a_clock_that_stands_still() -> None:
    policy, room = AdaptiveLength(5, lambda: 0.0), Room(OwnAcceptance(), PLENTY)
    for _ in range(50):
        length = policy.begin([room])
        policy.end(Brought([Outcome(length, length)], length, 0))
    assert length > 0


# --- its parts ---


def test_a_compilation_is_forgotten() -> None:
    cost = StepCost()
    for seconds in (1.0, 1.0, 1.0):
        cost.add(Timing(1, 0, 0, 0, seconds))
    for seconds in (40.0, 1.5, 1.5, 1.5):
        cost.add(Timing(1, 4, 4, 0, seconds))
    assert cost.seconds(1, 4) == pytest.approx(1.5)
    assert cost.seconds(1, 2) == pytest.approx(1.25)  # between the two that were measured


@given(
    a=st.floats(0.5, 2.0),
    b=st.floats(0.0, 0.3),
    c=st.floats(0.001, 0.05),
)
def test_the_line_stands_in_for_what_was_not_measured(a: float, b: float, c: float) -> None:
    cost = StepCost()

    def seconds(batch: int, length: int) -> float:
        return a + b * length + c * batch * (length + 1)

    for batch, length in ((1, 0), (1, 5), (2, 5), (8, 0), (8, 3)) * 8:
        cost.add(Timing(batch, length, length, 0, seconds(batch, length)))
    for batch, length in ((4, 2), (16, 4), (8, 6), (2, 1)):
        assert cost.seconds(batch, length) == pytest.approx(seconds(batch, length), rel=0.03)


def test_what_was_never_measured_takes_time_all_the_same() -> None:
    cost = StepCost()
    for length in (1, 2, 3, 4) * 8:  # a line through zero
        cost.add(Timing(16, length, length, 0, 0.01 * length))
    assert cost.seconds(1, 0) == pytest.approx(0.2 * 0.01)


def test_forced_columns_are_not_charged_to_the_length() -> None:
    cost, dice = StepCost(), random.Random(0)
    for step in range(200):
        length, forced = 3 * (step % 2), dice.choice([0, 0, 4, 9])
        seconds = 1.0 + 0.1 * length + 0.05 * (length + forced + 1)
        cost.add(Timing(1, length, length + forced, forced, seconds))
    assert cost.seconds(1, 0) == pytest.approx(1.05, rel=0.02)
    assert cost.seconds(1, 3) == pytest.approx(1.5, rel=0.02)


def test_places_have_rates_of_their_own() -> None:
    acceptance, dice = Acceptance(3), random.Random(1)
    for _ in range(2000):
        accepted = (1 + (dice.random() < 0.9)) if dice.random() < 0.3 else 0
        acceptance.count([Outcome(2, accepted)])
    first, second, third = acceptance.rates()
    assert first == pytest.approx(0.3, abs=0.12)
    assert second == pytest.approx(0.9, abs=0.12)
    assert third == second  # never tried


# --- in the engine ---


def generate(mode: str, proposer: str, params: SamplingParams | None = None) -> list[Completion]:
    """Seven requests in three slots: the engine has time to change K."""
    wishes = [
        each if params is None else replace(params, grammar=each.grammar, max_tokens=40)
        for each in PARAMS
    ]
    options = {"draft_length": mode, "verifier": "coupled", "max_batch_size": 3}
    with make_llm("llama", proposer, near_copy("llama"), **options) as llm:
        outputs = llm.generate(PROMPTS, wishes, on_error="return")
    assert {output.error for output in outputs} == {None}
    return [output.completions[0] for output in outputs]


@pytest.mark.parametrize(
    ("proposer", "temperature"),
    [("draft_model", 0.0), ("ngram", 1.0), ("chain:grammar_forced+draft_model", 1.0)],
)
def test_greedy_and_coupled_texts_do_not_change(proposer: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11)
    fixed = generate("fixed", proposer, params)
    found = generate("adaptive", proposer, params)
    assert tokens(found) == tokens(fixed)
    lengths = [completion.stats.draft_length for completion in found]
    assert 0 < max(lengths) <= 4
    assert min(lengths) < 4  # plain steps are measured, at least


def test_fixed_is_every_step_alike() -> None:
    stats = [completion.stats for completion in generate("fixed", "ngram")]
    assert {(s.planned, s.draft_length) for s in stats} == {(4 * s.steps, 4.0) for s in stats}
    policy = build_draft_length(EngineConfig(num_draft_tokens=3))
    assert isinstance(policy, FixedLength)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_length='none': must be one of fixed, adaptive"):
        EngineConfig(draft_length="none")  # type: ignore[arg-type]


@pytest.fixture
def _two_processes() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_two_processes")
def test_parallel_processes_would_part() -> None:
    with pytest.raises(ConfigError, match="use fixed"):
        build_draft_length(EngineConfig(draft_length="adaptive"))
    assert isinstance(build_draft_length(EngineConfig()), FixedLength)


# --- the law: K may depend on what was accepted before, and on nothing that is still to come ---

ROWS = 20_000


@dataclass(frozen=True)
class FollowingCase(Case):
    """Drafts are as long as the last step was successful; every third step has none."""

    last: Tensor = field(default_factory=lambda: torch.zeros(ROWS, dtype=torch.int64))
    steps: Tensor = field(default_factory=lambda: torch.zeros(ROWS, dtype=torch.int64))

    def limits(self, seeds: Tensor, nodes: Tensor) -> Tensor:
        gained = written(nodes) - self.last[seeds]
        self.last[seeds] = written(nodes)
        self.steps[seeds] += 1
        return torch.where((self.steps[seeds] + seeds) % 3 == 0, 0, gained.clamp(1, K))


@dataclass(frozen=True)
class PeekingCase(Case):
    """The mistake: a draft is dropped where the noise says that it is going to be refused."""

    def limits(self, seeds: Tensor, nodes: Tensor) -> Tensor:
        positions = (written(nodes) + 1).unsqueeze(1)
        noise = uniform_noise(seeds, positions, Stream.ACCEPT).squeeze(1)
        return torch.where(noise < 0.5, K, 0)


def written(nodes: Tensor) -> Tensor:
    """int64 [B]: how many tokens the texts of these numbers have."""
    firsts = [sum(VOCAB_SIZE**i for i in range(length)) for length in range(1, 8)]
    return torch.bucketize(nodes, torch.tensor(firsts), right=True)


@pytest.mark.parametrize("kind", ["sampled", "unmasked"])
def test_the_law_holds_when_k_follows_the_past(kind: str) -> None:
    case = FollowingCase(kind, SETTINGS["temperature"])
    with torch.inference_mode():
        texts = emit(case, torch.arange(ROWS))
    assert set(case.last.tolist()) == {0, 1, 2, 3}
    check_law(case, texts)


def test_the_law_is_broken_when_k_follows_the_noise() -> None:
    case = PeekingCase("sampled", SETTINGS["temperature"])
    with torch.inference_mode():
        texts = emit(case, torch.arange(ROWS))
    with pytest.raises(AssertionError, match="p ="):
        check_law(case, texts)
