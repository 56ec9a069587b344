"""Many streaming clients at one server: ``python -m benchmarks.serve_load``.

Starts ``guided-spec serve`` once for each proposer, lets clients of the ``openai`` package stream
held-out documents from it without a pause, and prints errors, invalid texts, throughput, and how
long a client waits for its first token and between two of them.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import openai
import typer
from rich.table import Table

from guided_spec.cli.console import failures_as_messages, stderr, stdout
from guided_spec.engine.setup import bundled_asset
from guided_spec.errors import GuidedSpecError
from guided_spec.evaluate.measurement import is_valid
from guided_spec.evaluate.workload import WorkItem, load_workload

__all__ = ["main"]

READY_SECONDS = 300.0
DOCUMENTS = 128
DEFAULT = "default"  # no --proposer
NAME = "measured"


class Load(NamedTuple):
    """clients: that stream at a time. seconds: in which they begin requests."""

    clients: int
    seconds: float
    max_tokens: int


@dataclass(slots=True)
class Found:
    """What clients saw: seconds to first tokens and between parts, and each fault in words."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0


def main(  # noqa: PLR0913 - the options of a command
    proposers: Annotated[str, typer.Option(help="Comma-separated.")] = f"none,{DEFAULT}",
    clients: Annotated[int, typer.Option(help="That stream at a time.")] = 64,
    seconds: Annotated[float, typer.Option(help="For each proposer.")] = 120.0,
    max_tokens: Annotated[int, typer.Option(help="Of a document.")] = 256,
    max_batch_size: Annotated[int, typer.Option(help="Texts that run at once.")] = 16,
    model: Annotated[str | None, typer.Option(help="Folder; default: the bundled one.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder of a draft model or head.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Requests, tokens and milliseconds by proposer; the exit code says whether all was well."""
    heads = ("requests", "faults", "tokens/s", "first token p50", "p99", "between parts p50", "p99")
    table, load = Table("proposer", *heads), Load(clients, seconds, max_tokens)
    items = load_workload(Path(bundled_asset("heldout.jsonl")), DOCUMENTS)
    shared = ["--device", device, "--max-batch-size", str(max_batch_size), "--no-playground"]
    shared += ["--max-queue", str(clients), "--served-model-name", NAME]
    shared += [*(["--model", model] if model else []), *(["--draft", draft] if draft else [])]
    faults: list[str] = []
    with failures_as_messages():
        for proposer in proposers.split(","):
            given = [] if proposer == DEFAULT else ["--proposer", proposer]
            with served([*shared, *given]) as url:
                found = asyncio.run(stream_all(url, items, load))
            table.add_row(proposer, *_cells(found))
            faults += found.faults
    stdout().print(table)
    for fault in faults[:20]:
        stderr().print(fault, markup=False)
    if faults:
        raise typer.Exit(1)


@contextmanager
def served(options: Sequence[str]) -> Iterator[str]:
    """The address of a server of its own, ready for requests.

    Raises GuidedSpecError where it does not come up.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "guided_spec.cli.main", "serve", "--port", str(port)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    url, ready = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
    try:
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() > ready:
                raise GuidedSpecError(f"the server with {' '.join(options)} did not come up")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


async def stream_all(url: str, items: Sequence[WorkItem], load: Load) -> Found:
    """Each client asks for one document at least, and one after another, from another one on."""
    found, began = Found(), time.perf_counter()
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600.0
    ) as client:

        async def ask(number: int) -> None:
            at = number
            while at == number or time.perf_counter() - began < load.seconds:
                item = items[at % len(items)]
                try:
                    await _stream(client, item, load.max_tokens, found)
                except openai.OpenAIError as error:
                    found.faults.append(f"{type(error).__name__}: {error}")
                at += 1

        await asyncio.gather(*(ask(number) for number in range(load.clients)))
    found.seconds = time.perf_counter() - began
    return found


async def _stream(
    client: openai.AsyncOpenAI, item: WorkItem, max_tokens: int, found: Found
) -> None:
    assert item.grammar is not None
    kind = "json" if item.grammar.kind == "json_schema" else item.grammar.kind
    source = json.loads(item.grammar.source) if kind in ("json", "choice") else item.grammar.source
    options: dict[str, Any] = {"extra_body": {"structured_outputs": {kind: source}}}
    options |= {"max_tokens": max_tokens, "temperature": 0.7}
    began = last = time.perf_counter()
    text, usage = "", None
    stream = await client.completions.create(
        model=NAME,
        prompt=item.prompt,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        part = chunk.choices[0].text if chunk.choices else ""
        if not part:
            continue
        now = time.perf_counter()
        (found.between if text else found.first).append(now - (last if text else began))
        text, last = text + part, now
    found.requests += 1
    found.tokens += usage.completion_tokens if usage else 0
    if not is_valid(text, item.grammar):
        found.faults.append(f"invalid: {text[:200]!r}")


def _cells(found: Found) -> list[str]:
    waits = []
    for values in (found.first, found.between):
        cuts = statistics.quantiles(values, n=100) if len(values) > 1 else [0.0] * 99
        waits += [f"{cuts[49] * 1e3:.0f} ms", f"{cuts[98] * 1e3:.0f} ms"]
    rate = f"{found.tokens / found.seconds:.0f}"
    return [str(found.requests), str(len(found.faults)), rate, *waits]


if __name__ == "__main__":
    typer.run(main)
