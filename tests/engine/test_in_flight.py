"""What one round of an engine leaves to the next is a value, which nobody changes afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from guided_spec.core import TargetModel
from guided_spec.engine.options import Options
from guided_spec.engine.request import Job, Request
from guided_spec.engine.setup import Setup
from guided_spec.engine.steps.draft_length import PLAIN
from guided_spec.engine.steps.in_flight import InFlight, Plan, StepInFlight
from guided_spec.engine.steps.planner import Turns
from guided_spec.types import SamplingParams
from tests.tiny_llm import tiny_model, tiny_tokenizer

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def build(**options: Any) -> Setup:
    """An engine of packed forwards."""
    defaults = {"kernels": "packed", "tokenizer": tiny_tokenizer(), "max_model_len": 64}
    return Setup.build(tiny_model("llama"), "ngram", None, Options.from_dict(defaults | options))


def rounds(setup: Setup, num_texts: int) -> list[InFlight]:
    """What each round leaves, of an engine that writes so many texts."""
    found = list[InFlight]()
    for at in range(num_texts):
        job = Job([5 + at, 6, 7], PARAMS, 64, at)
        setup.engine.add(Request(job, setup.vocabulary, lambda _: None))
    while setup.engine.has_work:
        setup.engine.step()
        found.append(setup.engine.in_flight)
    setup.grammars.queue.close()
    return found


def test_a_launched_step_takes_what_the_step_before_left() -> None:
    ahead = cast(TargetModel, object())
    before = InFlight(4, (), object(), ahead, ended=2.0, backlog=9)
    step = StepInFlight(Plan([], [], [], PLAIN), cast(Any, None), cast(Any, None), 3.0)
    assert before.launched(step) == InFlight(0, (step,), None, None, ended=2.0, backlog=9)
    assert before.launched(step).dropped() == InFlight(0, ended=2.0, backlog=9)
    assert before.ahead is ahead


def test_steps_are_committed_in_the_round_that_launches_them() -> None:
    assert not any(one.steps for one in rounds(build(max_batch_size=4), 4))


@pytest.mark.parametrize("num_texts", [4, 5])
def test_halves_that_take_turns_are_two_steps(num_texts: int) -> None:
    setup = build(max_batch_size=5)
    setup.engine.planner = replace(setup.engine.planner, turns=Turns(4))
    steps = [one.steps[0] for one in rounds(setup, num_texts) if one.steps]
    together, *halves = [{one.number for one in step.plan.requests} for step in steps[:5]]
    assert together == halves[0] | halves[1]  # all prompts come in one step
    assert sorted(map(len, halves[:2])) == [num_texts // 2, -(-num_texts // 2)]
    assert not any(one & other for one, other in zip(halves, halves[1:], strict=False))
