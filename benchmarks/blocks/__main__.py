"""``python -m benchmarks.blocks``: block heads beside a chain, trained and measured in one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.blocks.clock import Clock
from benchmarks.blocks.documents import ENGINES, DocumentPlan
from benchmarks.blocks.heads import HeadPlan
from benchmarks.blocks.run import PARTS, BlocksPlan, Records, merge, run_blocks, table_of
from benchmarks.gpu.run import read_engine_options
from guided_spec.cli.console import failures_as_messages, print_table, stderr
from guided_spec.errors import ConfigError

HEADS = HeadPlan()

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def blocks(
    work: Annotated[Path, typer.Option(help="Where heads and models are kept.")],
    output: Annotated[
        Path | None,
        typer.Option(help="JSON, as it grows; documents that it has are not run again."),
    ] = None,
    parts: Annotated[str, typer.Option(help="Some of them, comma-separated.")] = ",".join(PARTS),
    limit_seconds: Annotated[float, typer.Option(help="For all parts.")] = 540.0,
    train_seconds: Annotated[float, typer.Option(help="Of these for training at most.")] = 240.0,
    tokens: Annotated[int, typer.Option(help="That each head is trained on.")] = HEADS.tokens,
    batch_tokens: Annotated[int, typer.Option(help="Of a step of that.")] = HEADS.batch_tokens,
    data: Annotated[Path | None, typer.Option(help="Documents; default: drawn ones.")] = None,
    workers: Annotated[int, typer.Option(help="Processes of each training.")] = HEADS.workers,
    methods: Annotated[str, typer.Option(help="Heads.")] = ",".join(HEADS.methods),
    engines: Annotated[str, typer.Option(help="PROPOSER[@K][/NODES] each.")] = ",".join(ENGINES),
    documents: Annotated[str, typer.Option(help="REQUESTS=DOCUMENTS each.")] = "1=16,64=128,8=32",
    workloads: Annotated[str, typer.Option(help="Of json and free.")] = "json,free",
    temperatures: Annotated[str, typer.Option(help="Such as 0,0.7.")] = "0,0.7",
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 7,
    max_tokens: Annotated[int, typer.Option(help="Of a document at most.")] = 256,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of EngineConfig; may be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the widened one in WORK.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ... or cpu.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Train block heads and an EAGLE-3 head alike, widen them and measure them.

    What there is no time for is left to another run with the same WORK and OUTPUT.
    docs/benchmarks.md has more.
    """
    asked = dict(locals())
    with failures_as_messages():
        _run(_plan(asked), output, limit_seconds)


def _plan(asked: Mapping[str, Any]) -> BlocksPlan:
    """asked: the options of the command, by name."""

    def split(name: str, kind: Callable[[str], Any] = str) -> tuple[Any, ...]:
        return _split(name, asked[name], kind)

    kept = {name: asked[name] for name in ("tokens", "batch_tokens", "data", "workers")}
    device = torch.device(asked["device"]).type
    heads = HEADS._replace(methods=split("methods"), device=device, **kept)
    documents = DocumentPlan(
        engines=split("engines"),
        documents=_counts(asked["documents"]),
        workloads=split("workloads"),
        temperatures=split("temperatures", float),
        num_draft_tokens=asked["num_draft_tokens"],
        max_tokens=asked["max_tokens"],
        options=read_engine_options(asked["engine_option"]),
    )
    seconds = {"train": asked["train_seconds"]}
    where = (asked[name] for name in ("model", "device", "dtype"))
    return BlocksPlan(asked["work"], split("parts"), heads, documents, seconds, *where)


def _run(plan: BlocksPlan, output: Path | None, limit_seconds: float) -> None:
    plan.work.mkdir(parents=True, exist_ok=True)
    records: Records = {}
    if output is not None and output.is_file():
        records = json.loads(output.read_text(encoding="utf-8"))
    clock = Clock(limit_seconds)

    def report(message: str) -> None:
        stderr().print(f"{clock.left:4.0f} s left. {message}", markup=False)

    for found in run_blocks(plan, records, clock, report):
        merge(records, found)
        if output is not None:
            output.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    for part in PARTS:
        if rows := records.get(part):
            print_table(table_of(part, rows))


def _counts(text: str) -> dict[int, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return {int(batch): int(count) for batch, _, count in pairs}
    except ValueError as error:
        raise ConfigError("documents", text, "must be such as 1=16,8=32") from error


def _split(argument: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(argument, text, "must be numbers, comma-separated") from error


if __name__ == "__main__":
    app()
