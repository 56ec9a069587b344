"""The script that compares ``LLM(engine="vllm")`` with vLLM: its loops and its judgement."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.turns import Turns
from benchmarks.vllm_engine import run as benchmark
from benchmarks.vllm_engine.child import (
    Answer,
    DirectWriter,
    LlmWriter,
    make_llm,
    measure,
    run_all,
    run_soak,
)
from benchmarks.vllm_engine.run import WAYS, Soak, app, judge_soak, make_requests, rows
from guided_spec import LLM
from guided_spec.bundled import bundled_asset
from tests.integrations.vllm.fake import install

OFF, ON, OWN = (WAYS[name] for name in ("off", "all", "llm"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


def test_requests_and_runs(llm: LLM) -> None:
    requests = make_requests(llm.encode, 6, 40)
    assert [one["schema"] is None for one in requests] == [False, False, True] * 2
    run = asyncio.run(run_all(LlmWriter(llm), requests, 2))
    assert run["tokens"] == sum(len(one["token_ids"]) for one in run["answers"])
    assert all(one["error"] is None for one in run["answers"])
    refused = {**requests[0], "schema": {"not": {"multipleOf": 2}}}
    (answer,) = asyncio.run(run_all(LlmWriter(llm), [refused], 1))["answers"]
    assert "positive spelling" in answer["error"]


class Hanging:
    """Writes nothing, ever."""

    cancelled = 0

    async def write(self, request: Any) -> Any:
        del request
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.slow
def test_some_of_a_soak_are_cancelled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(llm.encode, 3, 8) * 20
    monkeypatch.setattr("benchmarks.vllm_engine.child.LONGEST_WAIT", 0.01)
    soak = asyncio.run(run_soak(LlmWriter(llm), requests, 8))
    cancelled = sum(one["cancelled"] for one in soak["answers"])
    assert 0 < cancelled < 30
    monkeypatch.setattr("benchmarks.vllm_engine.child.CANCELLED_SHARE", 1.0)
    writer = Hanging()
    asyncio.run(run_soak(writer, requests[:3], 8))
    assert writer.cancelled == 3


class Engine:
    """vLLM's, with one answer."""

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncGenerator[Any, None]:
        if params.structured_outputs is not None and params.structured_outputs.json == {}:
            raise ValueError("no such schema")
        answer = SimpleNamespace(text=f"{name}{prompt['prompt_token_ids']}", token_ids=[1, 2])
        yield SimpleNamespace(outputs=[answer])


def test_vllm_directly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    requests: list[dict[str, Any]] = [
        {"prompt_ids": [5], "schema": None, "max_tokens": 4},
        {"prompt_ids": [6], "schema": {}, "max_tokens": 4},
    ]
    good, bad = asyncio.run(run_all(DirectWriter(Engine()), requests, 2))["answers"]
    assert good == {"text": "0[5]", "token_ids": [1, 2], "error": None, "cancelled": False}
    assert bad["error"] == "no such schema"


def test_both_ways_have_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = install(monkeypatch, tmp_path, "compilation_config", "gpu_memory_utilization", "seed")
    plan = {
        "model": bundled_asset("target"), "eagle3": bundled_asset("eagle3"), "batches": [1, 8],
        "method": "eagle3", "num_draft_tokens": 3, "max_model_len": 256,
        "memory_share": 0.5,
        "engine": {"tensor_parallel_size": 2},
    }  # fmt: skip
    with make_llm(plan) as llm:
        args = world.engine.args
        assert llm.proposer == "chain:grammar_forced+eagle3"
    assert (args.max_num_seqs, args.max_model_len, args.dtype) == (8, 256, "bfloat16")
    assert args.tensor_parallel_size == 2
    assert args.speculative_config["num_speculative_tokens"] == 3
    assert args.structured_outputs_config.disable_any_whitespace is True
    assert args.gpu_memory_utilization == 0.5
    assert 32 in args.compilation_config["cudagraph_capture_sizes"]


def answer(text: str, token_ids: list[int], **more: Any) -> dict[str, Any]:
    return {"text": text, "token_ids": token_ids, "error": None, "cancelled": False, **more}


REQUESTS: list[dict[str, Any]] = [
    {"prompt_ids": [1], "schema": SCHEMA, "max_tokens": 4},
    {"prompt_ids": [1], "schema": None, "max_tokens": 4},
]
GOOD, CUT = answer('{"a": 1}', [1, 2]), answer('{"a": ', [1, 2, 3, 4])
FREE, OTHER = answer("free", [7]), answer("other", [8])


def cell(seconds: float, *answers: dict[str, Any]) -> dict[str, Any]:
    tokens = sum(len(one["token_ids"]) for one in answers)
    return {
        "batch": 8, "temperature": 0.0, "lap": len(answers), "seconds": seconds, "tokens": tokens,
        "answers": list(answers),
    }  # fmt: skip


def test_rows() -> None:
    results = {
        OFF.name: {"cells": [cell(1.0, GOOD, FREE)]},
        ON.name: {"cells": [cell(2.0, GOOD, FREE), cell(1.0, GOOD, FREE)]},
        OWN.name: {
            "cells": [
                *(cell(seconds, GOOD, OTHER) for seconds in (1.25, 1.0)),
                cell(1.0, GOOD) | {"temperature": 0.7},
            ]
        },
    }
    off, on, own, warm = rows(results, REQUESTS)
    assert (warm.batch, warm.temperature, warm.against) == (8, 0.7, None)
    assert (off.tokens_per_second, on.tokens_per_second) == (3.0, 3.0)
    assert own.against == 1.3  # of 2.0 / 1.25 and 1.0 / 1.0
    assert (off.spread, on.spread) == (0.0, 0.5)
    assert (on.against, own.valid, on.same_free, own.same_free) == (None, 1.0, 1.0, 0.0)
    results[OWN.name] = {"cells": [cell(1.0, answer("no", [1], error="why"), FREE)]}
    assert rows(results, REQUESTS)[-1][6:] == (0.0, 1.0, 1)
    assert rows({OWN.name: results[OWN.name]}, REQUESTS)[0].against is None


def test_every_lap_is_judged() -> None:
    """Each by the requests that it asked for, which may be fewer than there are."""
    more = [*REQUESTS, {**REQUESTS[1], "schema": {"type": "string"}}]
    laps = cell(1.0, GOOD, FREE, answer("no", [1]), OTHER) | {"lap": 2}
    found = {OFF.name: {"cells": [cell(1.0, GOOD, FREE, GOOD, FREE) | {"lap": 2}]}}
    _, own = rows({**found, OWN.name: {"cells": [laps]}}, more)
    assert (own.valid, own.same_free) == (0.5, 0.5)


class Echoing:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def write(self, request: Any) -> Answer:
        self.asked.append(request)
        return Answer("", [1])


def test_laps_are_one_run(tmp_path: Path) -> None:
    requests = [{"prompt_ids": [at], "max_tokens": 20} for at in range(15)]
    plan = {"requests": requests, "batches": [1], "laps": 3, "repeats": 2, "settle": 0.0}
    plan |= {"temperatures": [0.7], "soak": 0}
    writer, result = Echoing(), {"cells": list[Any]()}
    Turns.begin(tmp_path, ["it"])
    asyncio.run(measure(writer, plan, result, Turns(tmp_path, "it")))
    cells = result["cells"]
    assert [(one["lap"], len(one["answers"]), one["tokens"]) for one in cells] == [(12, 36, 36)] * 2
    first = writer.asked[:12]  # with other prompts, of which the engine keeps nothing for these
    assert [one["prompt_ids"] for one in first] == [[at, at] for at in range(12)]
    asked = [{**request, "temperature": 0.7} for request in requests[:12]]
    assert writer.asked[12:] == asked * 6


def test_the_soak_is_judged() -> None:
    given_up = answer("", [], cancelled=True)
    soak = {"seconds": 2.0, "answers": [GOOD, FREE, CUT, OTHER, given_up, FREE]}
    found = judge_soak(soak, [GOOD, FREE], REQUESTS)
    assert found == Soak(6, 1, 0, 1.0, round(2 / 3, 4), 2.0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every way runs once, the last one with the soak; what fails is shown."""
    asked: list[Any] = []

    def run(plan: Any, way: Any, child: Any) -> dict[str, Any]:
        asked.append((way.name, plan["soak"]))
        assert child.variables["CUDA_VISIBLE_DEVICES"] == "4,5"
        assert plan["laps"] == 3
        assert (plan["temperatures"], plan["engine"]) == ([0.0, 0.7], {"tensor_parallel_size": 2})
        if way is ON:
            return {"problem": "out of memory"}
        answers = [GOOD if one["schema"] else FREE for one in plan["requests"]]
        soak = {"seconds": 1.0, "answers": answers} if plan["soak"] else None
        return {"cells": [{**cell(1.0, *answers), "batch": 1}], "soak": soak, "version": "1"}

    monkeypatch.setattr(benchmark, "_run", run)
    output = tmp_path / "found.json"
    given = ["--model", bundled_asset("target"), "--eagle3", bundled_asset("eagle3")]
    given += ["--vllm-site", "/x", "--batches", "1", "--soak", "9", "--output", str(output)]
    given += ["--temperatures", "0,0.7", "--tensor-parallel", "2", "--devices", "4,5"]
    given += ["--laps", "3"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert asked == [(way.name, 9 if way is OWN else 0) for way in (OFF, ON, OWN)]
    assert "out of memory" in result.output
    found = json.loads(output.read_text())
    assert [row["name"] for row in found["rows"]] == [OFF.name, OWN.name]
    assert found["soak"]["requests"] == 12
    assert found[ON.name] == {"problem": "out of memory"}
    refused = CliRunner().invoke(app, [*given, "--ways", "off,on"])
    assert "must be of off, drafts, forced, tables, graphs, fast, all, llm" in str(
        refused.exception
    )
