"""``guided-spec bench``: a workload file in, a table and JSON out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from guided_spec.bench.compare import Plan, run_plan
from guided_spec.bench.measurement import Measurement
from guided_spec.bench.workload import load_workload
from guided_spec.cli.console import failures_as_messages, print_json, stderr, stdout
from guided_spec.engine.llm import LLM
from guided_spec.engine.setup import bundled_asset
from guided_spec.types import SamplingParams

__all__ = ["bench"]

DEFAULT_PROPOSERS = (
    "ngram,grammar_forced,draft_model,chain:grammar_forced+ngram,chain:grammar_forced+draft_model"
)


def bench(
    workload: Annotated[Path | None, typer.Argument(help="JSON Lines; see the docs.")] = None,
    proposers: Annotated[
        str | None, typer.Option(help="Names, comma-separated; NAME=DRAFT for a draft of its own.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    batch_size: Annotated[int, typer.Option(help="Requests that decode together.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Requests to run at most.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per request at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    verifier: Annotated[str, typer.Option(help="rejection or coupled.")] = "rejection",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Compare proposers with plain constrained decoding and with transformers' own generate.

    Without WORKLOAD the held-out documents that come with the package are used. transformers is
    measured at batch size 1 and temperature 0 only, where it does the same work.
    """
    with failures_as_messages():
        items = load_workload(workload or Path(bundled_asset("heldout.jsonl")), limit)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        names = (proposers or _default_proposers(model)).split(",")
        plan = Plan(items, names, params, batch_size == 1 and temperature == 0)
        load: dict[str, Any] = {"device": device, "dtype": dtype}
        load = {name: value for name, value in load.items() if value is not None}
        load |= {"draft": draft_model, "max_batch_size": batch_size, "verifier": verifier}
        with LLM(model, "none", num_draft_tokens, **load) as llm:
            measurements = run_plan(llm, plan, lambda name: stderr().print(f"running {name}"))
    report = [measurement.as_dict() for measurement in measurements]
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_json(report) if as_json else stdout().print(_table(measurements))


def _default_proposers(model: str | None) -> str:
    """With the bundled model its draft heads too."""
    if model is not None:
        return DEFAULT_PROPOSERS
    heads = [f"chain:grammar_forced+{name}={bundled_asset(name)}" for name in ("eagle3", "mtp")]
    return ",".join([DEFAULT_PROPOSERS, *heads])


def _table(measurements: list[Measurement]) -> Table:
    table = Table(
        "proposer",
        "tokens/s",
        "forwards/token",
        "tokens/forward",
        "drafted",
        "accepted",
        "mask µs/token",
        "valid",
        "same text",
    )
    for m in measurements:
        masks = "" if m.mask_microseconds is None else f"{m.mask_microseconds:.0f}"
        table.add_row(
            m.name,
            f"{m.tokens_per_second:.0f}",
            f"{m.forwards_per_token:.3f}",
            f"{m.acceptance_length:.2f}",
            str(m.drafted),
            str(m.accepted),
            masks,
            f"{m.valid:.0%}",
            f"{m.same_text:.0%}",
        )
    return table
