"""How long new schemas wait beside a busy engine: ``python -m benchmarks.schemas.waiting``.

Clients ask for one new schema after another, while a thread like the engine's runs Python for 7 of
9 ms. Printed are the times to a compiled grammar, by how long a thread waits for the interpreter.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from benchmarks.schemas.corpus import padded_vocabulary
from benchmarks.serving.requests import Request, make_requests
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.config import EngineConfig
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.models.tokenizer import load_tokenizer

_BUSY, _IDLE = 0.007, 0.002  # seconds of a step


def main(
    tokenizer: Annotated[str, typer.Option(help="Hub id or folder.")] = str(
        bundled_asset("target")
    ),
    clients: Annotated[int, typer.Option(help="At a time.")] = 8,
    schemas: Annotated[int, typer.Option(help="Of each run.")] = 64,
    turns: Annotated[str, typer.Option(help="Milliseconds, with commas.")] = "5,1",
    repeats: Annotated[int, typer.Option(help="Runs of each, by turns; the median.")] = 5,
) -> None:
    """Compile new schemas beside a busy thread."""
    with failures_as_messages():
        loaded = load_tokenizer(tokenizer)
        vocabulary = padded_vocabulary(loaded)
        grammars = RequestGrammars.build(EngineConfig(), vocabulary, loaded)
        grammars.warm_up()
        found = dict[str, list[list[float]]]()
        with busy_thread(), ThreadPoolExecutor(clients) as pool:
            ask(grammars, pool, schemas)  # workers start meanwhile
            for _ in range(repeats):
                for turn in turns.split(","):
                    sys.setswitchinterval(float(turn) / 1000)
                    found.setdefault(turn, []).append(ask(grammars, pool, schemas))
        grammars.queue.close()
        table = Table("turn, ms", "wait, ms", "p90, ms", "schemas/s")
        for turn, runs in found.items():
            table.add_row(turn, *(f"{value:.0f}" for value in np.median(runs, axis=0)))
        stdout().print(table)


def ask(grammars: RequestGrammars, pool: ThreadPoolExecutor, count: int) -> list[float]:
    """Mean and 90th percentile of the waits in milliseconds, and schemas a second."""

    def wait(request: Request) -> float:
        assert request.grammar is not None
        began = time.perf_counter()
        grammars.queue.submit(request.grammar).result()
        return 1e3 * (time.perf_counter() - began)

    requests, began = make_requests("documents-unique", count, 1.0, 0), time.perf_counter()
    waits = list(pool.map(wait, requests))
    speed = count / (time.perf_counter() - began)
    return [float(np.mean(waits)), float(np.percentile(waits, 90)), speed]


@contextmanager
def busy_thread() -> Iterator[None]:
    """Inside, a thread runs Python as an engine does."""
    is_over = threading.Event()

    def step() -> None:
        while not is_over.is_set():
            end = time.perf_counter() + _BUSY
            while time.perf_counter() < end:
                sum(range(200))
            time.sleep(_IDLE)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    typer.run(main)
