"""Steps draft where that writes more tokens a second, and the texts are the same either way."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec import step
from guided_spec.engine import engine, pace
from guided_spec.engine.pace import Pace
from guided_spec.types import SamplingParams
from tests.engine.test_equality import PROMPTS, PROPOSERS, generate, plain, tokens
from tests.engine.test_laws import NUM_SEEDS, PROMPT, UNLIKELY, headed, law, p_value, sampled
from tests.tiny_llm import make_llm, near_copy, tiny_model

K = 5


class World(NamedTuple):
    """tokens: that a text gets in a step with drafts. cost: seconds of it, where one without takes
    one second."""

    tokens: float
    cost: float

    def of(self, count: int) -> tuple[float, float]:
        """Tokens and seconds of a step."""
        return (self.tokens, self.cost) if count else (1.0, 1.0)


class Run(NamedTuple):
    """Of many steps: how many drafted, the tokens of a text, and the seconds."""

    drafted: int
    tokens: float
    seconds: float


def run(
    one: Pace, world: World, steps: int, texts: int, reads: Callable[[int], bool] = lambda _: False
) -> Run:
    """reads: in which steps prompts are read besides, which takes any time."""
    drafted, gained, took = 0, 0.0, 0.0
    for at in range(steps):
        count = one.num_draft_tokens(texts, is_reading=reads(at))
        assert count in (0, K)
        tokens, seconds = world.of(count)
        told = None if reads(at) else seconds
        one.count(texts, round(tokens * texts), told)
        drafted, gained, took = drafted + (count > 0), gained + tokens, took + seconds
    return Run(drafted, gained, took)


def test_good_drafts_are_made_in_every_step() -> None:
    assert run(Pace(K), World(4.7, 4.0), 2000, 64).drafted == 2000
    assert run(Pace(K), World(3.5, 1.4), 2000, 1).drafted == 2000


def test_drafts_that_cost_more_than_they_bring_are_left() -> None:
    found = run(Pace(K), World(1.25, 2.5), 4000, 64)
    assert found.drafted < 200
    assert run(Pace(K), World(1.25, 2.5), 4000, 1).drafted < 700


def test_drafts_that_bring_little_and_cost_less_are_made() -> None:
    assert run(Pace(K), World(2.0, 1.4), 4000, 8).drafted > 3800


def test_texts_change() -> None:
    one = Pace(K)
    run(one, World(1.0, 3.0), 1000, 32)
    assert run(one, World(5.0, 3.0), 3000, 32).drafted > 1800
    assert run(one, World(1.0, 3.0), 4000, 32).drafted < 700


def test_each_number_of_texts_goes_its_own_way() -> None:
    one = Pace(K)
    for _ in range(50):
        run(one, World(2.0, 1.2), 40, 1)
        run(one, World(2.0, 3.0), 40, 64)
    assert run(one, World(2.0, 1.2), 200, 1).drafted > 150
    assert run(one, World(2.0, 3.0), 200, 64).drafted < 50


def test_steps_that_read_prompts_draft_what_is_accepted() -> None:
    assert run(Pace(K), World(4.7, 3.0), 500, 8, lambda _: True).drafted == 500
    assert run(Pace(K), World(1.2, 1.1), 500, 8, lambda _: True).drafted == 8  # until it shows
    found = run(Pace(K), World(1.0, 3.0), 4000, 8, lambda at: at % 3 > 0)
    assert found.drafted < 400


def test_what_steps_take_that_read_prompts_tells_nothing() -> None:
    one = Pace(K)
    run(one, World(2.0, 100.0), 500, 8, lambda _: True)
    assert run(one, World(2.0, 1.4), 4000, 8).drafted > 3700


@given(st.lists(st.sampled_from([1, 8, 64]), max_size=200), st.data())
def test_a_step_that_is_told_to_stay_plain_is_plain(texts: list[int], data: st.DataObject) -> None:
    one, told = Pace(K), dict[int, bool]()
    for count in texts:
        draws = one.num_draft_tokens(count)
        assert not (told.pop(count, False) and draws)
        if draws == 0:
            told[count] = one.stays_plain(count)
        seconds = data.draw(st.sampled_from([1.0, 2.0]))
        one.count(count, count, seconds)


@given(st.floats(1, 6), st.floats(1, 5), st.sampled_from([1, 5, 64, 300]))
def test_neither_way_alone_is_much_faster(brings: float, cost: float, texts: int) -> None:
    found = run(Pace(K), World(brings, cost), 8000, texts)
    best = max(1.0, brings / cost)
    if brings - 1 >= K / 2:  # drafts are not doubted
        best = brings / cost
    assert found.tokens / found.seconds > best / (1.15 if texts > 1 else 1.25)


@pytest.fixture
def by_chance(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps draft or do not, by chance; returns how many draft tokens each might have."""
    dice, counts, own = random.Random(0), list[int](), Pace.num_draft_tokens

    def num_draft_tokens(one: Pace, num_texts: int, *, is_reading: bool = False) -> int:
        counts.append(dice.choice([0, own(one, num_texts, is_reading=is_reading)]))
        return counts[-1]

    monkeypatch.setattr(Pace, "num_draft_tokens", num_draft_tokens)
    return counts


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_texts_are_the_same(by_chance: list[int], proposer: str) -> None:
    draft = near_copy("llama") if "draft_model" in proposer else None
    found = generate("llama", proposer, draft, max_batch_size=3, drafting="auto")
    assert tokens(found) == tokens(plain("llama"))
    assert len({*by_chance}) == 2


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
    assert len({*by_chance}) == 2
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

    monkeypatch.setattr(engine, "commit", commit)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(pace, "SHORTEST", 200)
    with make_llm("llama", "draft_model", tiny_model("qwen3"), drafting="auto") as llm:
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        (output,) = llm.generate("A", params)
    stats = output.completions[0].stats
    assert sum(stats.accepted) < stats.steps  # it knows nothing of this target
    assert 60 < stats.drafted[0] < 200
