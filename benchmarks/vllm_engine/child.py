"""One way to run vLLM, in a process of its own.

``python -m benchmarks.vllm_engine.child PLAN.json RESULT.json``:
``benchmarks.vllm_engine`` writes the plan, starts this and reads the result. A plan holds: way
("direct" is vLLM's AsyncLLM, "llm" this package's ``LLM(engine="vllm")``), model, eagle3 (the
head's folder), method (what it is), num_draft_tokens, max_model_len, memory_share, batches,
temperatures, repeats, requests (a list of {prompt_ids, schema or None, max_tokens}), laps (how
often a run asks for all of them), settle (seconds behind the warm-up of a batch), soak (how many
of them at the end, greedy, some cancelled), engine (further arguments of vLLM's), turns (a folder)
and name: the engine is made, and every run done, in its turn, see ``benchmarks.turns``. The result:
{load_seconds, version, cells: [{batch, temperature, lap, seconds, tokens, answers}],
soak: {seconds, answers}}; lap is how many requests a lap has, and an answer is
{text, token_ids, error, cancelled}.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu.vllm_peer import engine_arguments
from benchmarks.turns import Turns
from guided_spec import LLM, GrammarSpec, GuidedSpecError, SamplingParams
from guided_spec.engine.process import frozen_heap

CANCELLED_SHARE = 0.15
LONGEST_WAIT = 0.6  # seconds before a request is cancelled
FORCED = "chain:grammar_forced+"


class Answer(NamedTuple):
    """error: why there is no text. cancelled: whether it was given up on purpose."""

    text: str
    token_ids: Sequence[int]
    error: str | None = None
    cancelled: bool = False


class Writer(Protocol):
    """Writes one request; cancelling the task that waits for it cancels it."""

    async def write(self, request: Mapping[str, Any]) -> Answer:
        """Its text, or the error in place of it."""


class DirectWriter:
    """vLLM's AsyncLLM as its own server uses it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._names = (str(number) for number in itertools.count())
        self._vllm: Any = importlib.import_module("vllm.sampling_params")

    async def write(self, request: Mapping[str, Any]) -> Answer:
        """In one piece."""
        schema = request["schema"]
        wanted = None if schema is None else self._vllm.StructuredOutputsParams(json=schema)
        params = self._vllm.SamplingParams(
            temperature=request.get("temperature", 0.0),
            max_tokens=request["max_tokens"],
            structured_outputs=wanted,
            output_kind=self._vllm.RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request["prompt_ids"]}
        try:
            async for output in self._engine.generate(prompt, params, next(self._names)):
                answer = output.outputs[0]
        except ValueError as error:
            return Answer("", [], str(error))
        return Answer(answer.text, list(answer.token_ids))


class LlmWriter:
    """``LLM``, whatever engine it has."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    async def write(self, request: Mapping[str, Any]) -> Answer:
        """In one piece."""
        schema = request["schema"]
        grammar = None if schema is None else GrammarSpec.json_schema(schema)
        temperature = request.get("temperature", 0.0)
        params = SamplingParams(
            temperature=temperature, max_tokens=request["max_tokens"], grammar=grammar
        )
        try:
            (output,) = await self._llm.agenerate(request["prompt_ids"], params)
        except GuidedSpecError as error:
            return Answer("", [], str(error))
        completion = output.completions[0]
        failure = None if completion.error is None else str(completion.error)
        return Answer(completion.text, completion.token_ids, failure)


async def run_all(
    writer: Writer, requests: Sequence[Mapping[str, Any]], batch: int
) -> dict[str, Any]:
    """``batch`` of them at a time, until all are done."""
    room = asyncio.Semaphore(batch)

    async def one(request: Mapping[str, Any]) -> Answer:
        async with room:
            return await writer.write(request)

    started = time.perf_counter()
    answers = await asyncio.gather(*map(one, requests))
    seconds = time.perf_counter() - started
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {"seconds": seconds, "tokens": tokens, "answers": [one._asdict() for one in answers]}


async def run_soak(
    writer: Writer, requests: Sequence[Mapping[str, Any]], batch: int, seed: int = 0
) -> dict[str, Any]:
    """As ``run_all``, but some requests are given up while they wait or run."""
    room, drawn = asyncio.Semaphore(batch), random.Random(seed)
    waits = [
        drawn.uniform(0, LONGEST_WAIT) if drawn.random() < CANCELLED_SHARE else None
        for _ in requests
    ]

    async def one(request: Mapping[str, Any], wait: float | None) -> Answer:
        async with room:
            try:
                return await asyncio.wait_for(writer.write(request), wait)
            except TimeoutError:
                return Answer("", [], cancelled=True)

    started = time.perf_counter()
    answers = await asyncio.gather(*map(one, requests, waits))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "answers": [one._asdict() for one in answers]}


async def measure(
    writer: Writer, plan: Mapping[str, Any], result: dict[str, Any], turns: Turns
) -> None:
    """Every batch at every temperature, after a round that compiles grammars; then the soak.

    The laps of a run go over into each other: at the end of one, with few requests left, a step
    costs as much as with all of them, and how many such steps there are is chance.
    Garbage is not looked for in what was there before: it takes as long as several requests.
    """
    with frozen_heap():
        await _measure(writer, plan, result, turns)


async def _measure(
    writer: Writer, plan: Mapping[str, Any], result: dict[str, Any], turns: Turns
) -> None:
    async def run(asked: Sequence[Mapping[str, Any]], batch: int) -> dict[str, Any]:
        await asyncio.to_thread(turns.wait)  # the engine may have something to do meanwhile
        found = await run_all(writer, asked, batch)
        turns.pass_on()
        return found

    requests = plan["requests"]
    shorter = [{**request, "max_tokens": 8, "prompt_ids": _other(request)} for request in requests]
    for batch in plan["batches"]:
        few = requests[: max(12, 3 * batch)]
        await run(shorter[: len(few)], batch)
        await asyncio.sleep(plan["settle"])
        for temperature in plan["temperatures"]:
            asked = [{**request, "temperature": temperature} for request in few]
            about = {"batch": batch, "temperature": temperature, "lap": len(few)}
            for _ in range(plan["repeats"]):
                cell = await run(asked * plan["laps"], batch)
                result["cells"].append({**about, **cell})
    turns.leave()
    if plan["soak"]:
        many = list(itertools.islice(itertools.cycle(requests), plan["soak"]))
        result["soak"] = await run_soak(writer, many, max(plan["batches"]))


def _other(request: Mapping[str, Any]) -> list[int]:
    """A prompt that vLLM's prefix cache knows nothing of: texts whose prompts it knows differ less
    where a step that reads one goes wrong."""
    prompt = request["prompt_ids"]
    return [*prompt[-1:], *prompt]


def make_llm(plan: Mapping[str, Any]) -> LLM:
    """With the engine's settings of ``engine_arguments``."""
    theirs = engine_arguments(_peer(plan))
    options = {"compilation_config", "gpu_memory_utilization", "structured_outputs_config", "seed"}
    return LLM(
        plan["model"],
        FORCED + plan["method"],
        plan["num_draft_tokens"],
        draft=plan["eagle3"],
        engine="vllm",
        engine_options={name: theirs[name] for name in options},
        dtype=theirs["dtype"],
        max_model_len=theirs["max_model_len"],
        max_batch_size=theirs["max_num_seqs"],
        prefill_tokens=theirs["max_num_batched_tokens"],
        **plan["engine"],
    )


def make_direct(plan: Mapping[str, Any]) -> Any:
    """vLLM's AsyncLLM; to be called in the event loop that it is used in."""
    arguments: Any = importlib.import_module("vllm.engine.arg_utils")
    config: Any = importlib.import_module("vllm.config")
    engines: Any = importlib.import_module("vllm.v1.engine.async_llm")
    given = engine_arguments(_peer(plan))
    given["structured_outputs_config"] = config.StructuredOutputsConfig(
        **given["structured_outputs_config"]
    )
    return engines.AsyncLLM.from_engine_args(arguments.AsyncEngineArgs(**given))


def _peer(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as ``vllm_peer`` reads it."""
    return {**plan, "cells": [{"batch": batch} for batch in plan["batches"]]}


async def _direct(plan: Mapping[str, Any], result: dict[str, Any], turns: Turns) -> None:
    with turns.turn():
        started = time.perf_counter()
        engine = make_direct(plan)
        result["load_seconds"] = time.perf_counter() - started
    try:
        await measure(DirectWriter(engine), plan, result, turns)
    finally:
        engine.shutdown()


def _llm(plan: Mapping[str, Any], result: dict[str, Any], turns: Turns) -> None:
    with turns.turn():
        started = time.perf_counter()
        llm = make_llm(plan)
        result["load_seconds"] = time.perf_counter() - started
    with llm:
        asyncio.run(measure(LlmWriter(llm), plan, result, turns))


def main(plan_path: Path, result_path: Path) -> None:
    """What was measured is written in any case."""
    plan = json.loads(plan_path.read_text(encoding="utf-8"))
    vllm: Any = importlib.import_module("vllm")
    result: dict[str, Any] = {"version": vllm.__version__, "cells": [], "soak": None}
    turns = Turns(Path(plan["turns"]), plan["name"])
    try:
        if plan["way"] == "llm":
            _llm(plan, result, turns)
        else:
            asyncio.run(_direct(plan, result, turns))
    finally:
        result_path.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
