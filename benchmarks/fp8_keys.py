"""What keys and values in fp8 cost: ``python -m benchmarks.fp8_keys``.

Writes greedy texts with keys in the model's dtype and in fp8, plain and with drafts, and compares
each text with the plain one in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.table import Table

from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import stdout
from guided_spec.config import KvDtype
from guided_spec.engine.llm import LLM
from guided_spec.evaluate.measurement import (
    TASKS,
    WorkItem,
    load_tasks,
    load_workload,
    measure_completions,
    time_items,
    valid_share,
)
from guided_spec.types import SamplingParams

COLUMNS = ("kv_dtype", "proposer", "tokens/forward", "accepted", "valid", "same text")


def main(  # noqa: PLR0913 - options of a command
    model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None,
    proposers: Annotated[str, typer.Option(help="Separated by commas.")] = "eagle3,draft_model",
    tasks: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(TASKS)}; else held-out documents.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Requests of each task.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of a text.")] = 160,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...")] = None,
) -> None:
    """Tokens a forward, accepted drafts and equal texts, by dtype of the keys and proposer."""
    named: dict[str, Any] = {"device": device, "dtype": dtype}
    with LLM(model, "none", **{k: v for k, v in named.items() if v is not None}) as llm:
        path = Path(bundled_asset("heldout.jsonl"))
        items = load_tasks(tasks.split(","), limit) if tasks else load_workload(path, limit)
    stdout().print(compare(llm, ["none", *proposers.split(",")], items, max_tokens))


def compare(llm: LLM, proposers: Sequence[str], items: Sequence[WorkItem], length: int) -> Table:
    """A row for each dtype and proposer; the first one is compared with. ``llm`` is closed."""
    table, params = Table(*COLUMNS), SamplingParams(max_tokens=length)
    first: list[str] | None = None
    for kv_dtype in get_args(KvDtype):
        for name in proposers:
            with llm.with_proposer(name, kv_dtype=kv_dtype, drafting="always") as engine:
                completions, seconds = time_items(engine, items, params)
            texts = [one.text for one in completions]
            first = texts if first is None else first
            same = sum(map(str.__eq__, texts, first)) / len(texts)
            valid = valid_share(completions, items)
            found = measure_completions(name, completions, seconds, valid=valid, same_text=same)
            taken = f"{found.accepted / found.drafted:.1%}" if found.drafted else ""
            shown = [f"{found.acceptance_length:.2f}", taken, f"{valid:.0%}", f"{same:.1%}"]
            table.add_row(kv_dtype, name, *shown)
    return table


if __name__ == "__main__":
    typer.run(main)
