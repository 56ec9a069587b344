"""Steps under traffic of all kinds, from the first one on: ``python -m benchmarks.mixed_traffic``.

Requests come by chance, with prompts of any length, schemas or none, and any temperature. What is
reported: how long it takes to make the engine, how long its steps take, and how many graphs they
capture and kernels they compile, which should be none: all of that is done when it is made.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

from benchmarks.gpu.run import GpuPlan, folders
from benchmarks.gpu.subject import Subject, json_documents, load_subject
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.config import EngineConfig
from guided_spec.engine.engine import Engine
from guided_spec.engine.options import Options
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.process import frozen_heap
from guided_spec.engine.request import Job, Request, State
from guided_spec.engine.setup import Setup
from guided_spec.types import SamplingParams

DOCUMENTS = 32
FREE_SHARE = 0.25  # of the requests, without a grammar
TEMPERATURES = (0.0, 0.7, 1.0)
MAX_TOKENS = (16, 256)


class Traffic(NamedTuple):
    """steps: that are timed. load: requests that come in a hundred steps. prompts: tokens."""

    steps: int
    load: int
    prompts: tuple[int, int]


def main(  # noqa: PLR0913 - the options of a command
    work: Annotated[Path | None, typer.Option(help="Where the widened model is kept.")] = None,
    proposers: Annotated[str, typer.Option(help="Names, comma-separated.")] = "none,eagle3",
    steps: Annotated[int, typer.Option(help="That are timed.")] = 10_000,
    load: Annotated[int, typer.Option(help="Requests that come in a hundred steps.")] = 20,
    longest: Annotated[int, typer.Option(help="Tokens of a prompt; 50 at least.")] = 8000,
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Milliseconds of a step, and what steps capture and compile, under mixed traffic."""
    table = Table(
        *("proposer", "ready s", "steps", "median ms", "p90", "p99", "max"),
        *("p99 / median", "graphs captured", "kernels compiled", "tokens"),
    )
    traffic = Traffic(steps, load, (50, longest))
    with failures_as_messages(), folders(GpuPlan(work=work), stdout().print) as paths:
        subject = load_subject(*paths, device=device, dtype=dtype)
        for proposer in proposers.split(","):
            table.add_row(proposer, *measure(subject, proposer, traffic, batch))
    stdout().print(table)


@torch.inference_mode()
def measure(subject: Subject, proposer: str, traffic: Traffic, batch: int) -> list[str]:
    """The cells of a row: see ``main``."""
    options = Options(tokenizer=subject.tokenizer, config=EngineConfig(max_batch_size=batch))
    draft = subject.eagle3 if "eagle3" in proposer else None
    began = time.perf_counter()
    setup = Setup.build(subject.model, proposer, draft, options)
    ready = f"{time.perf_counter() - began:.1f}"
    source = random.Random(0)
    requests = _requests(setup, subject, traffic, source)
    try:
        with counted() as made, frozen_heap():
            spans, written = _run(setup.engine, requests, traffic, source)
    finally:
        setup.engine.cancel_all()
        setup.grammars.queue.close()
    cuts = statistics.quantiles(spans, n=100)
    median, p90, p99 = cuts[49], cuts[89], cuts[98]
    times = [f"{span * 1e3:.2f}" for span in (median, p90, p99, max(spans))]
    counts = [str(made[name]) for name in ("captured", "compiled")]
    return [ready, str(len(spans)), *times, f"{p99 / median:.2f}", *counts, str(written)]


def _run(
    engine: Engine, requests: Iterator[Request], traffic: Traffic, source: random.Random
) -> tuple[list[float], int]:
    """Seconds of each step, and the tokens that ended requests have."""
    spans, running, written = list[float](), list[Request](), 0
    while len(spans) < traffic.steps:
        arrived = source.random() * 100 < traffic.load
        if arrived or not engine.has_work:
            running.append(next(requests))
            engine.add(running[-1])
        began = time.perf_counter()
        engine.step()
        spans.append(time.perf_counter() - began)
        written += sum(
            request.stats.output_tokens for request in running if request.state is State.FINISHED
        )
        running = [request for request in running if request.state is not State.FINISHED]
    return spans, written


def _requests(
    setup: Setup, subject: Subject, traffic: Traffic, source: random.Random
) -> Iterator[Request]:
    """Without end; their grammars are compiled before the first."""
    items = json_documents(DOCUMENTS)
    text = "".join(f"{item.prompt}{item.answer}\n\n" for item in items)
    line: list[int] = subject.tokenizer(text, add_special_tokens=False)["input_ids"]
    grammars = [setup.grammars.queue.submit(item.grammar) for item in items if item.grammar]
    for one in grammars:
        one.result()

    def ignore(_: Chunk) -> None:
        """Nobody waits for these texts."""

    shortest, longest = (math.log(length) for length in traffic.prompts)
    while True:
        length = int(math.exp(source.uniform(shortest, longest)))
        first = source.randrange(max(len(line) - length, 1))
        most = source.randint(*MAX_TOKENS)
        params = SamplingParams(max_tokens=most, temperature=source.choice(TEMPERATURES))
        grammar = None if source.random() < FREE_SHARE else source.choice(grammars)
        prompt = (line * (length // len(line) + 2))[first : first + length]
        job = Job(
            prompt, params, setup.max_model_len, source.randrange(2**31), grammar, is_streamed=False
        )
        yield Request(job, setup.vocabulary, ignore)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many CUDA graphs are captured and kernels compiled while it is open."""
    made: Counter[str] = Counter()
    begin: Any = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(*arguments: Any, **options: Any) -> Any:
        made["captured"] += 1
        return begin(*arguments, **options)

    def compiled(**_: Any) -> None:
        made["compiled"] += 1

    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook
    torch.cuda.CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign]
    knobs.runtime.jit_post_compile_hook = compiled
    try:
        yield made
    finally:
        torch.cuda.CUDAGraph.capture_begin = begin  # type: ignore[method-assign]
        knobs.runtime.jit_post_compile_hook = before


if __name__ == "__main__":
    typer.run(main)
