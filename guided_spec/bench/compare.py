"""One workload, several proposers, and the baselines: everything measured in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from guided_spec.bench.baseline import run_transformers
from guided_spec.bench.heap import frozen_heap
from guided_spec.bench.measurement import Measurement, measure_completions
from guided_spec.bench.validity import is_valid, valid_share
from guided_spec.bench.workload import WorkItem
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.types import SamplingParams

__all__ = ["Plan", "Timed", "run_items", "run_plan"]

WARM_UP = 2  # requests run before the clock starts


class Plan(NamedTuple):
    """What to run.

    proposers: measured in this order, after plain constrained decoding (``none``); ``name=draft``
        is a proposer with another draft than the LLM's.
    """

    items: Sequence[WorkItem]
    proposers: Sequence[str]
    params: SamplingParams
    with_transformers: bool


def run_plan(llm: LLM, plan: Plan, report: Callable[[str], None]) -> list[Measurement]:
    """Measure transformers (if asked), ``none`` and every proposer on the same weights.

    ``llm`` is closed: each measurement has an engine of its own. ``report`` is told the name of
    each before it starts. Grammars are compiled before the clock starts. The texts of ``none`` are
    what the others' are compared with.
    """
    llm.close()  # its thread would share the cores with those that are measured
    measurements: list[Measurement] = []
    report("none")
    plain, seconds = run_items(llm.with_proposer("none"), plan.items, plan.params)
    texts = [completion.text for completion in plain]
    measurements.append(_measure("none", plain, seconds, plan, texts))
    if plan.with_transformers:
        report("transformers")
        # In a thread of its own, as our engine is: its pool of CPU threads ends with it.
        with ThreadPoolExecutor(1) as pool:
            measurements.append(pool.submit(_run_baseline, llm, plan, texts).result())
    for proposer in plan.proposers:
        name, _, draft = proposer.partition("=")
        report(name)
        engine = llm.with_proposer(name, draft or None)
        completions, seconds = run_items(engine, plan.items, plan.params)
        measurements.append(_measure(name, completions, seconds, plan, texts))
    return measurements


class Timed(NamedTuple):
    """One completion an item, in their order, and the wall seconds that all took together."""

    completions: list[Completion]
    seconds: float


def run_items(
    llm: LLM, items: Sequence[WorkItem], params: SamplingParams, *, rehearse: bool = False
) -> Timed:
    """Generate for all items, each under its own grammar, and close ``llm``.

    Grammars are compiled, and as many requests run as decode together, before the clock starts.
    rehearse: all run, so that every size of batch has its CUDA graph, as engines that capture them
        when they start have.
    """
    matched = [replace(params, grammar=item.grammar) for item in items]
    prompts = [item.prompt for item in items]
    warm_up = len(prompts) if rehearse else max(WARM_UP, llm.config.max_batch_size)
    with llm:
        llm.compile(item.grammar for item in items if item.grammar is not None)
        llm.generate(prompts[:warm_up], matched[:warm_up], on_error="return")
        with frozen_heap():
            started = time.perf_counter()
            outputs = llm.generate(prompts, matched, on_error="return")
            seconds = time.perf_counter() - started
    return Timed([output.completions[0] for output in outputs], seconds)


def _run_baseline(llm: LLM, plan: Plan, texts: Sequence[str]) -> Measurement:
    prompts = [llm.encode(item.prompt) for item in plan.items]
    model, vocabulary = llm.model, llm.vocabulary
    limit = plan.params.max_tokens
    warm_up = slice(WARM_UP)
    run_transformers(model, vocabulary, prompts[warm_up], plan.items[warm_up], max_tokens=limit)
    run = run_transformers(model, vocabulary, prompts, plan.items, max_tokens=limit)
    judged = zip(run.texts, plan.items, run.ended, strict=True)
    return Measurement(
        name="transformers",
        requests=len(prompts),
        failed=0,
        tokens=run.tokens,
        seconds=run.seconds,
        forwards=run.tokens,
        valid=_share(is_valid(t, i.grammar) for t, i, ended in judged if ended),
        same_text=_share(a == b for a, b in zip(run.texts, texts, strict=True)),
    )


def _measure(
    name: str,
    completions: Sequence[Completion],
    seconds: float,
    plan: Plan,
    texts: Sequence[str],
) -> Measurement:
    valid = valid_share(completions, plan.items)
    same = _share(c.text == t for c, t in zip(completions, texts, strict=True))
    return measure_completions(name, completions, seconds, valid=valid, same_text=same)


def _share(flags: Iterable[bool]) -> float:
    counted = list(flags)
    return sum(counted) / len(counted) if counted else 1.0
