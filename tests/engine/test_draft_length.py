"""Steps draft where that writes more tokens a second, and the texts are the same either way."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec import step
from guided_spec.core import PromptPiece
from guided_spec.engine.options import Options
from guided_spec.engine.request import Job, Request
from guided_spec.engine.setup import Setup
from guided_spec.engine.steps import draft_length, step_runner
from guided_spec.engine.steps.draft_length import (
    PLAIN,
    DraftLengthPolicy,
    ForwardTimes,
    StepTaken,
    draft_lengths,
)
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.step import Committed
from guided_spec.types import SamplingParams
from tests.by_chance import draft_by_chance
from tests.engine.test_equality import PROMPTS, PROPOSERS, generate, plain, tokens
from tests.engine.test_laws import NUM_SEEDS, PROMPT, UNLIKELY, headed, law, p_value, sampled
from tests.tiny_llm import make_llm, near_copy, tiny_model

K = 5
SIZES = (1, 64, 128, 256, 512, 1024, 2048)
UNKNOWN = ForwardTimes({})


@dataclass(frozen=True)
class World:
    """accepts: how likely the next token of a draft is accepted. forward: seconds for so many
    tokens, and not less than for a hundred. text, token: seconds of a text, and of a token that is
    drafted for it. uneven: by how much a step is quicker or slower than that.
    """

    accepts: float
    forward: float = 0.01
    text: float = 0.1
    token: float = 0.1
    uneven: float = 0.0

    def tokens(self, drafted: int) -> float:
        """That a text gets."""
        return sum(self.accepts**at for at in range(drafted + 1))

    def of_forward(self, num_tokens: int) -> float:
        return self.forward * max(100, num_tokens)

    def seconds(self, texts: int, drafted: int, read: int = 0) -> float:
        own = texts * (self.text + drafted * self.token)
        return self.of_forward(texts * (drafted + 1) + read) + own

    @property
    def times(self) -> ForwardTimes:
        return ForwardTimes({size: self.of_forward(size) for size in SIZES})


class Run(NamedTuple):
    """Of many steps: how many drafted so many tokens, the tokens of a text, and the seconds."""

    drafted: Counter[int]
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def run(
    one: DraftLengthPolicy, world: World, steps: int, texts: int, read: Sequence[int] = (0,)
) -> Run:
    """read: tokens of prompts, step by step, and again."""
    dice, drafted, gained, took = random.Random(0), Counter[int](), 0.0, 0.0
    for at in range(steps):
        num_read = read[at % len(read)]
        count = one.num_draft_tokens(texts, num_read)
        accepted = [0] * texts
        for text in range(texts):
            while accepted[text] < count and dice.random() < world.accepts:
                accepted[text] += 1
        seconds = world.seconds(texts, count, num_read) * (1 + world.uneven * dice.uniform(-1, 1))
        one.count(StepTaken(count, num_read, accepted, seconds))
        drafted[count] += 1
        gained, took = gained + 1 + sum(accepted) / texts, took + seconds
    return Run(drafted, gained, took)


GOOD = World(0.9, text=0.02, token=0.01)
COSTLY = World(0.2, token=1.0)


@pytest.mark.parametrize("times", [GOOD.times, UNKNOWN])
def test_good_drafts_are_long(times: ForwardTimes) -> None:
    assert run(DraftLengthPolicy(K, times), GOOD, 2000, 16).drafted[K] > 1900
    assert run(DraftLengthPolicy(K, times), GOOD, 2000, 1).drafted[K] > 1900


@pytest.mark.parametrize("times", [COSTLY.times, UNKNOWN])
def test_drafts_that_cost_more_than_they_bring_are_left(times: ForwardTimes) -> None:
    assert run(DraftLengthPolicy(K, times), COSTLY, 4000, 64).drafted[0] > 3800
    assert run(DraftLengthPolicy(K, times), World(0.1, token=9.0), 4000, 1).drafted[0] > 3300


def test_drafts_are_left_where_nearly_every_step_reads_a_prompt() -> None:
    """Texts of another kind come, whose drafts bring nothing."""
    good = replace(GOOD, forward=0.002)
    one, read = DraftLengthPolicy(K, good.times), [300] * 19 + [0]
    assert run(one, good, 400, 64, read).drafted[0] < 20  # half of K is as fast as K
    assert run(one, replace(good, accepts=0.1, token=0.1), 400, 64, read).drafted[0] > 370


@pytest.mark.parametrize("has_times", [True, False])
def test_a_length_in_between_is_taken(*, has_times: bool) -> None:
    """256 texts: what more is drafted makes the forward longer by more than it brings."""
    world = World(0.7, forward=0.3, text=1.0)
    best = max((0, 3, 5), key=lambda k: world.tokens(k) / world.seconds(256, k))
    assert best == 3
    assert (
        run(DraftLengthPolicy(K, world.times if has_times else UNKNOWN), world, 2000, 256).drafted[
            3
        ]
        > 1800
    )


@dataclass(frozen=True)
class ForcedWorld(World):
    """A grammar forces as many tokens of each text as ``forced``, in all steps but plain ones, for
    which the host does nothing. waits: seconds that each text of a step takes where it does.
    """

    forced: float = 1.0
    waits: float = 0.1

    def tokens(self, drafted: int) -> float:
        return super().tokens(max(0, drafted)) + (0.0 if drafted == PLAIN else self.forced)

    def seconds(self, texts: int, drafted: int, read: int = 0) -> float:
        waits = 0.0 if drafted == PLAIN else self.waits * texts
        return super().seconds(texts, max(0, drafted), read) + waits

    def speed(self, texts: int, drafted: int) -> float:
        return self.tokens(drafted) / self.seconds(texts, drafted)


@pytest.mark.parametrize(
    ("world", "best"),
    [
        (ForcedWorld(0.2, text=0.05, token=0.01, forced=0.3, waits=1.0), PLAIN),
        (ForcedWorld(0.1, text=0.05, token=0.5, forced=2.0, waits=0.01), 0),
        (ForcedWorld(0.95, forward=0.001, text=0.2, token=0.01, waits=0.01), K),
    ],
)
@pytest.mark.parametrize("has_times", [True, False])
def test_what_comes_without_k_counts(world: ForcedWorld, best: int, *, has_times: bool) -> None:
    one = DraftLengthPolicy(K, world.times if has_times else UNKNOWN, has_more=True)
    assert one.lengths == (PLAIN, 0, 3, K)
    assert max(one.lengths, key=lambda drafted: world.speed(64, drafted)) == best
    dice, drafted = random.Random(0), Counter[int]()
    for _ in range(2000):
        count = one.num_draft_tokens(64)
        accepted = list[int]()
        for _ in range(64):
            forced = int(world.forced + dice.random()) if count != PLAIN else 0
            own = 0
            while own < max(0, count) and dice.random() < world.accepts:
                own += 1
            accepted.append(forced + own)
        one.count(StepTaken(count, 0, accepted, world.seconds(64, count)))
        drafted[count] += 1
    assert drafted[best] > 1800
    assert one.stays_plain(64) == (best == PLAIN) or drafted[best] < 2000


def test_texts_change() -> None:
    one = DraftLengthPolicy(K, GOOD.times)
    run(one, COSTLY, 1000, 32)
    assert run(one, GOOD, 4000, 32).drafted[0] < 1500
    assert run(one, COSTLY, 4000, 32).drafted[0] > 3500


def test_texts_that_begin_say_nothing_of_drafts() -> None:
    """None is made for their first tokens: where many come, drafts are as good as before."""
    one, dice = DraftLengthPolicy(K, UNKNOWN), random.Random(0)
    for at in range(60):
        count = one.num_draft_tokens(64, 500)
        assert count == K
        new = 0 if at == 0 else 48
        accepted = [0 if text < new else dice.choice([3, 4, 5]) for text in range(64)]
        one.count(StepTaken(count, 500, accepted, 1.0, new))


def test_who_begins_without_a_draft() -> None:
    """Of those whose prompts come along."""
    batch: Any = SimpleNamespace(
        slots=(0, 2, 3, 5),
        num_draft_tokens=K,
        prompts=[PromptPiece(slot, 0, [1, 2, 3]) for slot in (2, 3, 4)],
        states=HiddenStates(),
    )
    committed = [Committed([1, 2], 1), Committed([1], 0), Committed([1, 2, 3], 2), Committed([], 0)]
    taken = StepTaken.of(batch, K, committed, [4, 0, 2, 0], 0.5, 6)
    assert taken == (K, 9, [1, 0, 2, 0], 0.5, 1, 6)


@pytest.mark.parametrize(("accepts", "best"), [(0.1, 0), (0.25, 0), (0.8, 3)])
@pytest.mark.parametrize("read", [[0], [0, 0, 200]])
def test_halves_with_drafts_are_compared_with_all_texts_without(
    accepts: float, best: int, read: list[int]
) -> None:
    """A forward of half the texts takes as long as one of all, as long as nobody drafts: so weak
    drafts of halves look better than no drafts of halves, and are worse than none at all."""
    world, texts = World(accepts, forward=0.01, text=0.0, token=0.0), 64

    def speed(count: int) -> float:
        batch = texts // 2 if count else texts
        return batch * world.tokens(count) / world.seconds(batch, count)

    assert max(draft_lengths(K), key=speed) == best
    one = DraftLengthPolicy(K, world.times, in_halves=True)
    dice, drafted = random.Random(0), Counter[int]()
    for at in range(2000):
        num_read, in_halves = read[at % len(read)], one.drafts(texts)
        count = one.num_draft_tokens(texts, num_read)
        batch = texts // 2 if in_halves else texts
        accepted = [0] * batch
        for text in range(batch):
            while accepted[text] < count and dice.random() < accepts:
                accepted[text] += 1
        seconds = world.seconds(batch, count, num_read)
        if one.drafts(texts) == in_halves:
            one.count(StepTaken(count, num_read, accepted, seconds, 0, texts))
        drafted[count] += not num_read
    assert drafted[best] > 0.9 * drafted.total()
    assert one.drafts(texts) == (best > 0)


def in_turns(
    one: DraftLengthPolicy, world: World, steps: int, texts: int, read: Sequence[int]
) -> Counter[tuple[int, bool]]:
    """How many steps drafted so many tokens, and were of a half. Turns hide what drafts take."""
    dice, taken = random.Random(0), Counter[tuple[int, bool]]()
    for at in range(steps):
        num_read, in_halves = read[at % len(read)], one.drafts(texts)
        count = one.num_draft_tokens(texts, num_read)
        batch = texts // 2 if in_halves else texts
        accepted = [0] * batch
        for text in range(batch):
            while accepted[text] < count and dice.random() < world.accepts:
                accepted[text] += 1
        seconds = world.seconds(batch, count, num_read)
        if one.drafts(texts) == in_halves:
            one.count(StepTaken(count, num_read, accepted, seconds, 0, texts))
        taken[count, in_halves] += 1
    return taken


@pytest.mark.parametrize(("accepts", "drafts"), [(0.1, False), (0.9, True)])
@pytest.mark.parametrize("num_reading", [40, 400])
def test_turns_follow_the_drafts_of_steps_that_nearly_all_read(
    accepts: float, num_reading: int, *, drafts: bool
) -> None:
    """Halves that draft nothing are slow, and so are drafts that nothing hides. The few steps that
    read none try other lengths, and must not stop half-way."""
    world = World(accepts, forward=0.01, text=0.001, token=0.001)
    one = DraftLengthPolicy(K, world.times, in_halves=True)
    taken = in_turns(one, world, 2000, 64, [0] + [200] * num_reading)
    # In halves where there are drafts, of all texts where there are none.
    right = sum(taken[count, drafts] for count in draft_lengths(K) if (count > 0) == drafts)
    assert right > 0.85 * taken.total()
    assert one.drafts(64) == drafts


@pytest.mark.parametrize(
    ("world", "best"),
    [
        (World(0.6, forward=1.0, text=0.0, token=0.0), K),  # free, where only half are accepted
        (World(0.9, forward=0.1, token=40.0), 0),  # too dear, although most are accepted
    ],
)
def test_where_every_step_reads_their_times_decide(world: World, best: int) -> None:
    assert run(DraftLengthPolicy(K, world.times), world, 600, 8, [40]).drafted[best] > 550


def test_each_number_of_texts_goes_its_own_way() -> None:
    """Drafts are free as long as the forward is as long without."""
    world, one = World(0.6, forward=1.0, token=0.0), DraftLengthPolicy(K, UNKNOWN)
    for _ in range(50):
        run(one, world, 40, 1)
        run(one, world, 40, 256)
    assert run(one, world, 200, 1).drafted[0] < 20
    assert run(one, world, 200, 256).drafted[0] > 150


def test_where_prompts_are_read_each_token_has_its_price() -> None:
    """Steps that read fill the device up; the others leave room for drafts, which are free."""
    world = World(0.3, forward=1.0, text=0.0, token=0.0)
    one = DraftLengthPolicy(K, world.times)
    run(one, world, 400, 16, [0, 0, 84, 84])
    reads, others = (Counter[int]() for _ in range(2))
    for _ in range(200):
        others += run(one, world, 1, 16).drafted
        reads += run(one, world, 1, 16, [84]).drafted
    assert others[0] < 20
    assert reads[0] > 150


def test_steps_that_read_tell_what_the_others_would_take() -> None:
    """Only the first steps read none, so that no others show how quick steps without drafts are."""
    world = World(0.7, forward=0.1, text=0.02, token=0.01)
    one = DraftLengthPolicy(K, world.times)
    run(one, world, 4, 256)
    assert run(one, world, 400, 256, [2000]).drafted[0] > 350


class ReadingWorld(World):
    """What a host does for prompts takes long."""

    def seconds(self, texts: int, drafted: int, read: int = 0) -> float:
        more = 5.0 + 0.1 * texts * drafted if read else 0.0
        return super().seconds(texts, drafted, read) + more


def test_a_long_trial_keeps_its_measurements() -> None:
    """Trials last for many steps where only one in thirty reads none."""
    world = ReadingWorld(0.5, forward=0.001, token=0.01)
    one, read = DraftLengthPolicy(K, world.times), [300] * 29 + [0]
    assert world.tokens(K) / world.seconds(1, K) > 1.5 * world.tokens(0) / world.seconds(1, 0)
    assert run(one, world, 1000, 1, read).drafted[0] < 200


def test_without_times_steps_that_read_draft_what_others_do() -> None:
    assert (
        run(DraftLengthPolicy(K, UNKNOWN), GOOD, 500, 8, [100]).drafted[K] == 500
    )  # as most of it is accepted
    assert run(DraftLengthPolicy(K, UNKNOWN), World(0.3), 500, 8, [100]).drafted[0] > 400
    assert run(DraftLengthPolicy(K, UNKNOWN), COSTLY, 4000, 8, [0, 100, 100]).drafted[0] > 3500


@given(st.lists(st.sampled_from([1, 8, 64]), max_size=200), st.data())
def test_a_step_that_is_told_to_stay_plain_is_plain(texts: list[int], data: st.DataObject) -> None:
    one, told = DraftLengthPolicy(K, UNKNOWN), dict[int, bool]()
    for count in texts:
        drawn = one.num_draft_tokens(count)
        assert not (told.pop(count, False) and drawn)
        if drawn == 0:
            told[count] = one.stays_plain(count)
        seconds = data.draw(st.sampled_from([1.0, 2.0]))
        one.count(StepTaken(drawn, 0, [0] * count, seconds))


WORLDS = st.builds(
    World,
    accepts=st.floats(0, 1),
    forward=st.floats(0.01, 1),
    text=st.floats(0, 1),
    token=st.floats(0, 0.5),
    uneven=st.sampled_from([0.0, 0.2]),
)


@pytest.mark.slow
@given(data=st.data(), world=WORLDS, texts=st.sampled_from([1, 5, 64, 300]))
@settings(max_examples=40, derandomize=True)  # how near it comes is measured, not promised
def test_no_length_alone_is_much_faster(data: st.DataObject, world: World, texts: int) -> None:
    times = data.draw(st.sampled_from([world.times, UNKNOWN]))
    found = run(DraftLengthPolicy(K, times), world, 4000, texts)
    best = max(world.tokens(count) / world.seconds(texts, count) for count in draft_lengths(K))
    assert found.speed > best / (1.15 if texts > 1 else 1.3)


@given(st.dictionaries(st.integers(1, 3000), st.floats(0.001, 1), min_size=1), st.integers(1, 9000))
def test_times_of_forwards(seconds: dict[int, float], num_tokens: int) -> None:
    times, sizes = ForwardTimes(seconds), sorted(seconds)
    assert [times.of(size) for size in sizes] == pytest.approx([seconds[size] for size in sizes])
    around = [size for size in sizes if size <= num_tokens][-1:]
    around += [size for size in sizes if size >= num_tokens][:1]
    found = times.of(num_tokens)
    if num_tokens > sizes[-1]:
        assert found == pytest.approx(seconds[sizes[-1]] * num_tokens / sizes[-1])
    else:
        assert min(seconds[size] for size in around) <= found * (1 + 1e-9)
        assert found <= max(seconds[size] for size in around) * (1 + 1e-9)


def test_lengths_of_drafts() -> None:
    assert [draft_lengths(most) for most in (1, 2, 3, 5, 8)] == [
        (0, 1),
        (0, 1, 2),
        (0, 2, 3),
        (0, 3, 5),
        (0, 4, 8),
    ]


@pytest.fixture
def by_chance(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return draft_by_chance(monkeypatch)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_texts_are_the_same(by_chance: list[int], proposer: str) -> None:
    draft = near_copy("llama") if "draft_model" in proposer else None
    found = generate("llama", proposer, draft, max_batch_size=3, drafting="auto")
    assert tokens(found) == tokens(plain("llama"))
    drafts = 0 if proposer == "none" else 3 + ("grammar_forced" in proposer)
    assert len({*by_chance}) == drafts


@pytest.mark.parametrize(
    ("verifier", "temperature", "seed", "asks"),
    [
        ("rejection", 0.0, 3, True),
        ("rejection", 1.0, 3, False),
        ("rejection", 1.0, None, True),
        ("coupled", 1.0, 3, True),
    ],
)
def test_no_draft_depends_on_others_where_a_text_depends_on_it(
    by_chance: list[int], verifier: str, temperature: float, seed: int | None, *, asks: bool
) -> None:
    """And somebody has asked for that text."""
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=seed)
    found = []
    for drafting in ("auto", "always"):
        options: Any = {"verifier": verifier, "drafting": drafting, "max_batch_size": 3}
        with make_llm("llama", "ngram", **options) as llm:
            found.append([one.text for one in llm.generate(PROMPTS, params)])
        assert bool(by_chance) == asks
        if drafting == "auto":
            calls = len(by_chance)
    assert len(by_chance) == calls  # "always" asks nobody
    assert seed is None or found[0] == found[1]


def test_a_seed_that_was_given_makes_all_steps_draft(by_chance: list[int]) -> None:
    """Those that it shares with others, too."""
    given = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    drawn = replace(given, seed=None)
    with make_llm("llama", "ngram", max_batch_size=2, drafting="auto") as llm:
        (alone,) = llm.generate(PROMPTS[:1], given)
        assert by_chance == []
        beside, _ = llm.generate(PROMPTS[:2], [given, drawn])
        assert beside.text == alone.text
        llm.generate(PROMPTS[:1], drawn)
        assert by_chance != []


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["eagle3", "chain:grammar_forced+draft_model"])
def test_the_law_does_not_depend_on_it(
    by_chance: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proposer: str
) -> None:
    """Of whole texts whose steps draft by chance; their seeds are drawn, the same in each run."""
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(0))
    target, draft = headed(proposer, tmp_path)
    params = sampled(seed=None)
    options: Any = {"max_batch_size": 60, "max_model_len": 32, "num_draft_tokens": 3}
    with make_llm(target, proposer, draft, drafting="auto", **options) as llm:
        exact = law(llm, params)
        found = [one.completions[0] for one in llm.generate([PROMPT] * NUM_SEEDS, params)]
        others = law(llm, sampled(seed=None, temperature=1.6))
    drafts = 0 if proposer == "none" else 3 + ("grammar_forced" in proposer)
    assert len({*by_chance}) == drafts
    assert sum(sum(one.stats.accepted) for one in found) > 0
    counts = Counter(tuple(one.token_ids) for one in found)
    assert set(counts) <= set(exact)
    assert p_value(counts, exact) > UNLIKELY
    assert p_value(counts, others) < UNLIKELY  # there are enough texts to tell


def test_an_engine_leaves_drafts_that_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock: a step with drafts takes ten times as long here."""
    clock = [0.0]

    def commit(batch: Any, *arguments: Any) -> Any:
        clock[0] += 10.0 if batch.num_draft_tokens else 1.0
        return step.commit(batch, *arguments)

    monkeypatch.setattr(step_runner, "commit", commit)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(draft_length, "SHORTEST", 200)
    with make_llm("llama", "draft_model", tiny_model("qwen3"), drafting="auto") as llm:
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        (output,) = llm.generate("A", params)
    stats = output.completions[0].stats
    assert sum(stats.accepted) < stats.steps  # it knows nothing of this target
    assert 20 < stats.drafted[0] < 100


def test_a_pause_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose texts were cancelled before it: nobody waited for a step meanwhile."""
    clock, seconds = [0.0], list[float]()

    def commit(*arguments: Any) -> Any:
        clock[0] += 1.0
        return step.commit(*arguments)

    monkeypatch.setattr(step_runner, "commit", commit)
    monkeypatch.setattr(DraftLengthPolicy, "count", lambda _, taken: seconds.append(taken.seconds))
    options = Options.from_dict({"drafting": "auto", "max_model_len": 64})
    setup = Setup.build(None, "ngram", None, options)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    for _ in range(2):
        job = Job([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True), 64, 0)
        request = Request(job, setup.vocabulary, lambda _: None)
        setup.engine.add(request)
        for _ in range(3):
            setup.engine.step()
        request.cancel()
        clock[0] += 1000.0
    setup.grammars.queue.close()
    assert len(seconds) >= 4
    assert max(seconds) <= 2.0
