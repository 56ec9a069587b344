"""``guided-spec bench``: a workload file in, a table and JSON out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from guided_spec.cli.console import Json, Verbose, print_table, stderr, working
from guided_spec.cli.options import ModelOptions, ReportOptions, proposer_list, with_options
from guided_spec.errors import ConfigError
from guided_spec.evaluate.plots import bench_figures

if TYPE_CHECKING:  # these load torch
    from guided_spec.evaluate.measurement import Measurement

DEFAULT_PROPOSERS = (
    "ngram,grammar_forced,draft_model,chain:grammar_forced+ngram,chain:grammar_forced+draft_model"
)


@with_options
def bench(
    workload: Annotated[Path | None, typer.Option(help="JSON Lines; see the docs.")] = None,
    proposers: Annotated[
        str | None, typer.Option(help="Names, comma-separated; NAME=DRAFT for a draft of its own.")
    ] = None,
    *,
    load: ModelOptions,
    reports: ReportOptions,
    batch_size: Annotated[str, typer.Option(help="Requests at a time, such as 1,8.")] = "1",
    limit: Annotated[int | None, typer.Option(min=1, help="Requests to run at most.")] = None,
    verifier: Annotated[str, typer.Option(help="rejection or coupled.")] = "rejection",
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Compare proposers on a workload.

    Plain constrained decoding and transformers' own generate are measured as well; the latter
    at batch size 1 and temperature 0 only, where it does the same work. Without --workload the
    held-out documents that come with the package are used.
    """
    batches, params = _batch_sizes(batch_size), reports.params()
    from guided_spec.bundled import bundled_asset
    from guided_spec.evaluate.measurement import Plan, load_workload, run_plan

    names = proposer_list(proposers or _default_proposers(load.model))
    items = load_workload(workload or Path(bundled_asset("heldout.jsonl")), limit)
    plan = Plan(items, names, params, params.temperature == 0, batches)
    with working("loading the model"):
        llm = load.load(proposer="none", verifier=verifier, max_batch_size=max(batches))
    with llm:
        measurements = run_plan(llm, plan, lambda name: stderr().print(f"running {name}"))
    report = [measurement.as_dict() for measurement in measurements]
    reports.keep(report, bench_figures, as_json=as_json)
    if not as_json:
        print_table(_table(measurements))


def _batch_sizes(text: str) -> list[int]:
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ConfigError("--batch-size", text, "must be numbers of at least 1, comma-separated")
    return sizes


def _default_proposers(model: str | None) -> str:
    """With the bundled model its draft heads too."""
    from guided_spec.bundled import bundled_asset, named_model

    if named_model(model) != bundled_asset("target"):
        return DEFAULT_PROPOSERS
    heads = [f"chain:grammar_forced+{name}={bundled_asset(name)}" for name in ("eagle3", "mtp")]
    return ",".join([DEFAULT_PROPOSERS, *heads])


def _table(measurements: list[Measurement]) -> Table:
    """Within 80 columns; ``as_dict`` has more. Several batch sizes have a column."""
    is_one_size = len({m.batch_size for m in measurements}) == 1
    heads: tuple[str, ...] = (
        "tokens\n/s",
        "tokens\n/forward",
        "accepted",
        "mask µs\n/token",
        "valid",
        "same\ntext",
    )
    heads = heads if is_one_size else ("batch", *heads)
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    table = Table(Column("proposer", overflow="fold"), *columns, box=SIMPLE, padding=0)
    for m in measurements:
        table.add_row(
            m.name,
            *(() if is_one_size else (str(m.batch_size),)),
            f"{m.tokens_per_second:.0f}",
            f"{m.acceptance_length:.2f}",
            f"{m.accepted / m.drafted:.0%}" if m.drafted else "",
            "" if m.mask_microseconds is None else f"{m.mask_microseconds:.0f}",
            f"{m.valid:.0%}",
            f"{m.same_text:.0%}",
        )
    return table
