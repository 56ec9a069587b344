"""Documents with each drafter and policy: acceptance length, tokens per second, steps."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.blocks.clock import Clock
from benchmarks.gpu.subject import Subject, json_documents
from guided_spec.config import EngineConfig
from guided_spec.engine.engine import Engine
from guided_spec.engine.options import Options
from guided_spec.engine.outputs import Chunk, Completion
from guided_spec.engine.process import frozen_heap
from guided_spec.engine.request import Job, Request, State
from guided_spec.engine.setup import Setup
from guided_spec.errors import GuidedSpecError
from guided_spec.evaluate.measurement import WorkItem, measure_completions, valid_share
from guided_spec.types import SamplingParams

ENGINES = (
    *("none", "eagle3@5", "dflash", "dspark", "p_eagle"),
    *("dflash:validate", "dspark:validate", "p_eagle:validate"),
)
WORKLOADS = ("json", "free")
Documents = Mapping[int, int]


class RunKey(NamedTuple):
    """engine: a proposer, and the draft tokens behind an @. workload: of ``WORKLOADS``."""

    engine: str
    batch: int
    workload: str
    temperature: float


class DocumentPlan(NamedTuple):
    """What to run.

    documents: how many, by requests at a time. num_draft_tokens: where an engine says nothing else.
    options: further fields of ``EngineConfig``. The free workload is that of the same prompts
    without their schemas; policies, which then change little, are left out of it.
    """

    engines: Sequence[str] = ENGINES
    documents: Documents = MappingProxyType({1: 16, 64: 128, 8: 32})
    workloads: Sequence[str] = WORKLOADS
    temperatures: Sequence[float] = (0.0, 0.7)
    num_draft_tokens: int = 7
    max_tokens: int = 256
    options: Mapping[str, Any] = MappingProxyType({})


class BlockRun(NamedTuple):
    """One engine on one workload.

    steps: of the engine, all requests together. step_ms: mean. tokens_per_forward: of each
    request's. starved: drafts that ended since no legal token was known. same_text: share of texts
    equal to those of ``none``, where that was run too. problem: why there is nothing.
    """

    key: RunKey
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    step_ms: float = 0.0
    tokens_per_second: float = 0.0
    tokens_per_forward: float = 0.0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    starved: int = 0
    device_steps: int = 0
    valid: float = 1.0
    same_text: float | None = None
    failed: int = 0
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Every field, those of the key beside them, for JSON."""
        return self.key._asdict() | {k: v for k, v in self._asdict().items() if k != "key"}


Texts = dict[tuple[int, str, float], list[str]]


def measure_blocks(
    subject: Subject,
    heads: Mapping[str, Path],
    plan: DocumentPlan,
    done: Container[RunKey],
    clock: Clock,
    report: Callable[[str], None],
) -> Iterator[BlockRun]:
    """Every engine and workload but those ``done``, until the time is over.

    heads: folders by method; an engine without its head is told as a problem.
    """
    plain: Texts = {}
    for engine in plan.engines:
        keys = [key for key in _keys(engine, plan) if key not in done]
        if not keys or clock.left <= 0:
            continue
        report(f"documents: {engine}")
        method = next((name for name in re.split("[:+@]", engine) if name in METHODS), None)
        if method is not None and method not in heads:
            yield BlockRun(keys[0], problem=f"there is no {method} head")
            continue
        try:
            yield from _measure(subject, heads.get(method or ""), plan, keys, plain, clock)
        except (GuidedSpecError, torch.OutOfMemoryError) as error:
            yield BlockRun(keys[0], problem=f"{type(error).__name__}: {error}")


METHODS = ("eagle3", "p_eagle", "dflash", "dspark")


def _keys(engine: str, plan: DocumentPlan) -> list[RunKey]:
    workloads = [w for w in plan.workloads if w == "json" or ":" not in engine]
    return [
        RunKey(engine, batch, workload, temperature)
        for batch in plan.documents
        for workload in workloads
        for temperature in plan.temperatures
    ]


def _measure(
    subject: Subject,
    head: Path | None,
    plan: DocumentPlan,
    keys: Sequence[RunKey],
    plain: Texts,
    clock: Clock,
) -> Iterator[BlockRun]:
    name, _, depth = keys[0].engine.partition("@")
    draft_tokens = 0 if name == "none" else int(depth or plan.num_draft_tokens)
    items = json_documents(max(plan.documents.values()))
    prompts = [subject.tokenizer(str(item.prompt))["input_ids"] for item in items]
    config = EngineConfig(
        num_draft_tokens=draft_tokens,
        max_batch_size=max(plan.documents),
        max_model_len=max(map(len, prompts)) + plan.max_tokens + 1,
        prefix_cache=False,  # prompts are read by the rehearsal too
        drafting="always",
        **plan.options,
    )
    options = Options(tokenizer=subject.tokenizer, config=config)
    setup = Setup.build(subject.model, name, None if head is None else str(head), options)
    try:
        with frozen_heap():
            for key in keys:
                if clock.left <= 0:
                    return
                own = items[: plan.documents[key.batch]]
                with torch.inference_mode():
                    found = _run(setup, key, own, prompts, plain, plan.max_tokens)
                yield found
    finally:
        setup.engine.cancel_all()
        setup.grammars.queue.close()


def _run(
    setup: Setup,
    key: RunKey,
    items: Sequence[WorkItem],
    prompts: Sequence[list[int]],
    plain: Texts,
    max_tokens: int,
) -> BlockRun:
    if key.workload == "free":
        items = [item._replace(grammar=None) for item in items]
    params = SamplingParams(max_tokens=max_tokens, temperature=key.temperature)
    _write(setup, items[: max(2, key.batch)], prompts, params, key.batch)
    completions, seconds, steps = _write(setup, items, prompts, params, key.batch)
    texts = [completion.text for completion in completions]
    place = (key.batch, key.workload, key.temperature)
    if key.engine == "none":
        plain[place] = texts
    same = None
    with suppress(KeyError):
        same = sum(a == b for a, b in zip(texts, plain[place], strict=True)) / len(texts)
    valid = valid_share(completions, items)
    found = measure_completions(key.engine, completions, seconds, valid=valid, same_text=same or 0)
    errors = [str(completion.error) for completion in completions if completion.error]
    return BlockRun(
        key,
        *(found.tokens, seconds, steps, seconds / steps * 1e3),
        *(found.tokens_per_second, found.acceptance_length, found.drafted, found.accepted),
        accepted_at=found.accepted_at,
        starved=sum(completion.stats.starved for completion in completions),
        device_steps=sum(completion.stats.device_steps for completion in completions),
        valid=valid,
        same_text=same,
        failed=found.failed,
        problem=errors[0] if errors else None,
    )


class _Written(NamedTuple):
    """completions: of the items in their order. seconds, steps: of the engine, from the first."""

    completions: list[Completion]
    seconds: float
    steps: int


def _write(
    setup: Setup,
    items: Sequence[WorkItem],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    batch: int,
) -> _Written:
    """All documents, ``batch`` at a time, the next as soon as one has ended."""
    ended: dict[int, Completion] = {}

    def take(chunk: Chunk) -> None:
        if chunk.completion is not None:
            ended[chunk.prompt_index] = chunk.completion

    requests = [
        Request(job, setup.vocabulary, take) for job in _jobs(setup, items, prompts, params)
    ]
    began = time.perf_counter()
    steps = _drive(setup.engine, requests, batch)
    seconds = time.perf_counter() - began
    return _Written([ended[index] for index in range(len(requests))], seconds, steps)


def _jobs(
    setup: Setup,
    items: Sequence[WorkItem],
    prompts: Sequence[list[int]],
    params: SamplingParams,
) -> Iterator[Job]:
    """Their grammars are compiled."""
    submit = setup.grammars.queue.submit
    grammars = [None if item.grammar is None else submit(item.grammar) for item in items]
    for grammar in grammars:
        if grammar is not None:
            grammar.result()
    for index, (grammar, prompt) in enumerate(zip(grammars, prompts, strict=False)):
        yield Job(
            *(prompt, params, setup.max_model_len, index, grammar),
            prompt_index=index,
            is_streamed=False,
        )


def _drive(engine: Engine, requests: Sequence[Request], batch: int) -> int:
    """Returns how many steps it took."""
    waiting, running, steps = iter(requests), list[Request](), 0
    while True:
        for request in islice(waiting, batch - len(running)):
            running.append(request)
            engine.add(request)
        if not running:
            return steps
        engine.step()
        steps += 1
        running = [request for request in running if request.state is not State.FINISHED]
