"""The soak in small: it finds nothing wrong, and it would find what it looks for."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.soak import run as module
from benchmarks.soak.census import find_leaks
from benchmarks.soak.model import CONTEXT, make_toy
from benchmarks.soak.proposer import Turns
from benchmarks.soak.requests import GRAMMARS, Case, CaseSource
from benchmarks.soak.run import Plan, SoakReport, find_wrong, soak
from guided_spec.engine.llm import LLM
from guided_spec.engine.prompt import Prompt
from guided_spec.engine.request import Request
from guided_spec.errors import (
    BudgetTooSmallError,
    GrammarCompileError,
    PromptError,
    RequestCancelledError,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks.constraint import Constraint
from guided_spec.types import SamplingParams

TURNS = Turns(("none", "chain:grammar_forced+draft_model"), 10)
SMALL = Plan(requests=90, steps=60, seed=1, checks=3, in_flight=30, turns=TURNS)
JSON = GRAMMARS["json"][2]
PATIENCE = 20.0  # seconds


@pytest.fixture(scope="module")
def report() -> SoakReport:
    return soak(SMALL)


@pytest.mark.slow
def test_a_small_soak_finds_nothing(report: SoakReport) -> None:
    assert report.wrong == ()
    tally = report.tally
    assert tally.requests >= SMALL.requests
    assert report.steps >= SMALL.steps
    assert sum(tally.ends.values()) >= tally.requests  # some have two samples
    assert tally.tokens > SMALL.requests
    kinds = {end for _, end in tally.ends}
    assert {"stop", "length", "error"} <= kinds
    assert len(report.censuses) >= 2


def test_the_census_counts_what_is_there(report: SoakReport) -> None:
    first = report.censuses[0]
    assert set(first.alive.values()) == {0}
    assert first.tensors > 0
    assert first.cached_bytes > 0
    assert find_leaks(first, first, 0) == []
    kept = first._replace(alive={**first.alive, "forks": 2}, busy_slots=1, held_slots=1)
    grown = kept._replace(
        tensors=first.tensors + 100,
        threads=first.threads + 20,
        cached_bytes=first.cache_limit + 1,
        resident_bytes=first.resident_bytes + 11,
    )
    found = find_leaks(first, grown, 10)
    assert [leak.split(", ")[0].split(" ", 1)[1] for leak in found] == [
        "forks alive",
        "busy slots",
        "slots that proposers hold",
        "tensors",
        "threads",
        "bytes of cached grammars",
        "resident bytes",
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    toy = make_toy()
    with LLM(toy.model, "ngram", tokenizer=toy.tokenizer, max_model_len=CONTEXT) as llm:
        yield llm


def test_the_judge(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, grammar=JSON, logprobs=0)
    case = Case("json", "A", params, judged_by=JSON)
    good = llm.generate("A", params, on_error="return")[0].completions[0]
    assert find_wrong(case, good, llm.vocabulary) is None
    error = RequestCancelledError("the request was cancelled")
    bad: list[tuple[Any, str]] = [
        (good._replace(text='["dog"]'), "does not match"),
        (good._replace(finish_reason="length", is_complete=False), "it ended by length"),
        (good._replace(logprobs=None), "logprobs are missing"),
        (good._replace(token_ids=good.token_ids * 60), "of at most 60"),
        (good._replace(token_ids=good.token_ids[:-1]), "in the statistics"),
        (good._replace(finish_reason="error", error=error), "no error was expected"),
    ]
    for completion, message in bad:
        assert message in str(find_wrong(case, completion, llm.vocabulary))
    cancelled = case._replace(is_cancelled=True)
    assert find_wrong(cancelled, bad[-1][0], llm.vocabulary) is None
    refused = case._replace(error=BudgetTooSmallError)
    assert "BudgetTooSmallError was expected" in str(find_wrong(refused, good, llm.vocabulary))


def test_the_same_seed_draws_the_same_cases() -> None:
    least = dict.fromkeys((spec for specs in GRAMMARS.values() for spec in specs), 20)
    first, second, other = (CaseSource(seed, least) for seed in (1, 1, 2))
    cases = [first.draw() for _ in range(60)]
    assert cases == [second.draw() for _ in range(60)]
    assert cases != [other.draw() for _ in range(60)]
    assert len({case.kind for case in cases}) > 9


@pytest.mark.slow
def test_an_error_keeps_no_other_request_alive(llm: LLM) -> None:
    """What comes back with an error may be kept for ever; its traceback would hold its batch."""
    before = _requests_alive()
    broken = SamplingParams(grammar=GrammarSpec.regex("("))
    small = SamplingParams(max_tokens=1, grammar=JSON)
    good = SamplingParams(max_tokens=2, grammar=GrammarSpec.regex("[ab]{9}"), complete=False)
    params = [broken, broken, small, good, good]
    prompts: list[Prompt] = ["A", "A", "A", [-1], "A"]
    outputs = llm.generate(prompts, params, on_error="return")
    kinds = [type(output.error) for output in outputs[:4]]
    assert kinds == [GrammarCompileError, GrammarCompileError, BudgetTooSmallError, PromptError]
    assert outputs[4].error is None
    deadline = time.monotonic() + PATIENCE
    while _requests_alive() > before and time.monotonic() < deadline:
        time.sleep(0.02)  # the engine's thread is on its way out of its last step
    assert _requests_alive() <= before


def _requests_alive() -> int:
    gc.collect()
    return sum(type(each) in (Request, Constraint) for each in gc.get_objects())


def test_the_command(monkeypatch: pytest.MonkeyPatch, report: SoakReport) -> None:
    """Its exit code says whether anything was wrong."""
    import typer

    app = typer.Typer()
    app.command()(module.main)
    plans: list[Plan] = []

    def reports(plan: Plan) -> SoakReport:
        plans.append(plan)
        return report._replace(wrong=("a leak",)) if plan.seed == 7 else report

    monkeypatch.setattr(module, "soak", reports)
    fine = CliRunner().invoke(app, ["--requests", "5"])
    assert fine.exit_code == 0
    assert "nothing wrong" in fine.stdout
    assert "alive while idle" in fine.stdout
    wrong = CliRunner().invoke(app, ["--seed", "7", "--steps", "3"])
    assert wrong.exit_code == 1
    assert "WRONG: a leak" in wrong.stdout
    assert [(plan.requests, plan.steps) for plan in plans] == [(5, 0), (20_000, 3)]
