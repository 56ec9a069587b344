"""Servers under the same traffic, one after another: ``python -m benchmarks.serving``.

The traffic is that of vLLM's ``benchmark_serving_structured_output``; see docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from benchmarks.gpu.peers import VllmEnvironment
from benchmarks.gpu.run import GpuPlan, folders
from benchmarks.serving.device import DeviceUse
from benchmarks.serving.requests import DATASETS, Asked, make_requests, read_datasets
from benchmarks.serving.servers import DEFAULT, Subject, served
from benchmarks.serving.traffic import Answer, Pattern, Traffic, drive
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, print_table, stderr
from guided_spec.errors import ConfigError

PERCENTILES = (50, 90, 99)
SERVERS = f"none,{DEFAULT}"
WAITS = {"ttft": "first token", "tpot": "per token", "itl": "between pieces", "e2el": "whole"}

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def serving(
    servers: Annotated[str, typer.Option(help="Proposers, vllm, vllm:METHOD, URLs.")] = SERVERS,
    datasets: Annotated[str, typer.Option(help=f"{', '.join(DATASETS)}, files.")] = "documents",
    num_prompts: Annotated[str, typer.Option(help="Requests of a data set, of each size.")] = "128",
    seconds: Annotated[float | None, typer.Option(help="Send them anew until then.")] = None,
    request_rate: Annotated[float, typer.Option(help="A second; inf: all at once.")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: in bursts.")] = 1.0,
    max_concurrency: Annotated[str | None, typer.Option(help="Clients, such as 1,8,64.")] = None,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the times, and of what has a grammar.")] = 0,
    max_batch_size: Annotated[int, typer.Option(help="Texts that run at once.")] = 16,
    model: Annotated[str | None, typer.Option(help="Folder; default: the bundled one.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder of a draft model or head.")] = None,
    work: Annotated[Path | None, typer.Option(help="Take the widened model, kept here.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    vllm_python: Annotated[str | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    vllm_site: Annotated[str | None, typer.Option(help="Folder that vLLM is in.")] = None,
    vllm_memory_share: Annotated[float, typer.Option(help="Of the GPU, for vLLM.")] = 0.75,
    logs: Annotated[Path | None, typer.Option(help="Folder for the servers' output.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write all figures here as JSON.")] = None,
) -> None:
    """Compare servers under the same requests; the exit code says whether all were answered.

    Servers, data sets and sizes are separated by commas. A data set may have settings of its own:
    json-unique:tokens=400, documents:share=0.5:temperature=0.7, regex:part=0.5.
    """
    with failures_as_messages():
        default = Asked("", 1.0, 1.0, output_len, temperature)
        cells = _cells(max_concurrency, num_prompts, read_datasets(datasets, default))
        times = (request_rate, burstiness, cells[0].clients, seconds)
        pattern = Pattern(*times, output_len, temperature, seed)
        vllm = VllmEnvironment(vllm_python, vllm_site, vllm_memory_share, logs)
        plan = GpuPlan(model=None if work else model or bundled_asset("target"), work=work)
        with folders(plan, stderr().print) as (folder, head):
            queue = max(cell.clients or cell.prompts for cell in cells)
            on = (device, dtype, max_batch_size)
            subject = Subject(folder, draft or head, *on, queue, num_draft_tokens, vllm)
            _compare(servers.split(","), subject, cells, pattern, output)


class Cell(NamedTuple):
    """One run of each server. name: of its data set, as asked for. clients: None is no limit."""

    name: str
    asked: Asked
    clients: int | None
    prompts: int

    def pattern(self, common: Pattern) -> Pattern:
        """``common``'s times, and what is this cell's own."""
        return replace(
            common,
            max_concurrency=self.clients,
            max_tokens=self.asked.tokens,
            temperature=self.asked.temperature,
        )


def _cells(sizes: str | None, counts: str, datasets: Mapping[str, Asked]) -> list[Cell]:
    """Of each size, all data sets. counts: one for all sizes, or one for each."""
    clients = [None] if sizes is None else _numbers("max-concurrency", sizes)
    sent = _numbers("num-prompts", counts)
    if len(sent) not in (1, len(clients)):
        raise ConfigError("num-prompts", counts, f"must be one number, or {len(clients)}")
    pairs = list(zip(clients, sent * len(clients), strict=False))
    return [
        Cell(name, asked, size, max(1, round(asked.part * count)))
        for size, count in pairs
        for name, asked in datasets.items()
    ]


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(option, text, "must be numbers from 1, such as 1,8,64")
    return [int(part) for part in parts]


def _compare(
    servers: Sequence[str],
    subject: Subject,
    cells: Sequence[Cell],
    pattern: Pattern,
    output: Path | None,
) -> None:
    found = list[dict[str, Any]]()
    for server in servers:
        for one in _measure(server, subject, cells, pattern):
            found.append(one)
            if output is not None:  # a run that is stopped keeps what it has
                output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print_table(_table(found))
    if any(one["failed"] for one in found):
        raise typer.Exit(1)


def _measure(
    server: str, subject: Subject, cells: Sequence[Cell], pattern: Pattern
) -> Iterator[dict[str, Any]]:
    """One server under the requests of every cell."""
    stderr().print(f"starting {server}", markup=False)
    with served(server, subject) as (url, _):
        for cell in cells:
            requests = make_requests(cell.asked.name, cell.prompts, cell.asked.share, pattern.seed)
            with DeviceUse(subject.device) as use:
                traffic = asyncio.run(drive(url, requests, cell.pattern(pattern)))
            _tell(traffic.answers)
            what = {"server": server, "dataset": cell.name, "clients": cell.clients}
            yield {**what, **summary(traffic), "device_busy": use.share}


def summary(traffic: Traffic) -> dict[str, Any]:
    """All figures of one run; times in milliseconds.

    ttft: to the first piece of text. tpot: for each token behind that. itl: between two pieces.
    e2el: to the end. correct: of the judged answers, in percent; None where none is judged.
    """
    whole = [answer for answer in traffic.answers if answer.fault is None]
    judged = [answer.is_correct for answer in whole if answer.is_correct is not None]
    tokens = sum(answer.tokens for answer in whole)
    waits = {
        "ttft": [answer.first for answer in whole],
        "tpot": [each for answer in whole if (each := answer.per_token) is not None],
        "itl": [gap for answer in whole for gap in answer.gaps],
        "e2el": [answer.seconds for answer in whole],
    }
    return {
        "requests": len(whole),
        "failed": len(traffic.answers) - len(whole),
        "correct": 100.0 * sum(judged) / len(judged) if judged else None,
        "seconds": traffic.seconds,
        "tokens": tokens,
        "requests_per_second": len(whole) / traffic.seconds,
        "tokens_per_second": tokens / traffic.seconds,
        **{f"{name}_ms": _spread(values) for name, values in waits.items()},
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    cuts = zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    known = {"mean": np.mean(values), "std": np.std(values), **{f"p{p}": cut for p, cut in cuts}}
    return {name: 1e3 * float(value) for name, value in known.items()}


def _table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Waits hold the median and the 99th percentile."""
    heads = ("clients", "done", "failed", "correct", "tokens\n/s", "device\nbusy")
    waits = [f"{words}\nms" for words in WAITS.values()]
    columns = (Column(head, justify="right", no_wrap=True) for head in (*heads, *waits))
    table = Table(Column("server"), Column("data set"), *columns, box=SIMPLE, padding=0)
    table.caption, table.caption_justify = "ms: median, 99th percentile", "left"
    for one in found:
        table.add_row(*_row(one))
    return table


def _row(found: Mapping[str, Any]) -> list[str]:
    correct, busy = found["correct"], found["device_busy"]
    cells = [found["server"], Path(found["dataset"]).name]
    cells += [str(found["clients"] or ""), str(found["requests"]), str(found["failed"])]
    cells.append("" if correct is None else f"{correct:.1f} %")
    cells.append(f"{found['tokens_per_second']:.0f}")
    cells.append("" if busy is None else f"{busy:.0%}")
    for name in WAITS:
        spread = found[f"{name}_ms"]
        cells.append("" if spread is None else f"{spread['p50']:.1f} {spread['p99']:.1f}")
    return cells


def _tell(answers: Sequence[Answer]) -> None:
    """What failed or is wrong, up to ten of each."""
    failed = [answer.fault for answer in answers if answer.fault is not None]
    wrong = [f"not what was asked for: {a.text[-200:]!r}" for a in answers if a.is_correct is False]
    for line in (*failed[:10], *wrong[:10]):
        stderr().print(line, markup=False)


if __name__ == "__main__":
    app()
