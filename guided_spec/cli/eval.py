"""``guided-spec eval``: how long a draft is accepted, by source, with and without grammars."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from guided_spec.cli.console import Json, Verbose, print_table, stderr, working
from guided_spec.cli.options import ModelOptions, ReportOptions, with_options
from guided_spec.evaluate.plots import acceptance_figures
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # these load torch
    from guided_spec.engine.llm import LLM
    from guided_spec.evaluate.measurement import Acceptance

__all__ = ["evaluate"]

SHOWN = 8  # positions in a table


@with_options
def evaluate(
    data: Annotated[list[str], typer.Option(help="As of guided-spec train; repeat it.")],
    load: ModelOptions,
    reports: ReportOptions,
    proposers: Annotated[
        str, typer.Option(help="Names, comma-separated; NAME=DRAFT for a draft of its own.")
    ] = "none,ngram,auto",
    batch_size: Annotated[int, typer.Option(help="Requests that decode together.")] = 8,
    limit: Annotated[int, typer.Option(help="Prompts of each source.")] = 64,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Measure how many draft tokens are accepted, position by position.

    The target answers the prompts of the data, under their grammars and without.
    """
    params = reports.params()
    opened = partial(load.load, max_batch_size=batch_size)
    found = _measure(data, opened, proposers.split(","), params, limit)
    report = [acceptance.as_dict() for acceptance in found]
    reports.keep(report, acceptance_figures, as_json=as_json)
    if not as_json:
        print_table(_table(found))


def _measure(
    data: list[str],
    load: Callable[..., LLM],
    proposers: list[str],
    params: SamplingParams,
    limit: int,
) -> list[Acceptance]:
    from guided_spec.evaluate.measurement import measure_acceptance, read_asked
    from guided_spec.training.data.records import check_sources

    check_sources(data)
    with working("loading the model"):
        llm = load(proposer="none")
    with llm:
        asked = read_asked(data, llm, limit=limit)
        llm.close()  # its thread would share the cores with those that are measured
        results = []
        for proposer in proposers:
            name, _, draft = proposer.partition("=")
            stderr().print(f"running {name}")
            results += measure_acceptance(llm.with_proposer(name, draft or None), asked, params)
    return results


def _table(found: list[Acceptance]) -> Table:
    heads = ("tokens\n/forward", "accepted, % of drafts\nby position", "valid")
    table = Table("proposer", "source", "grammars", *(Column(h) for h in heads), box=SIMPLE)
    for source, grammars, measured in found:
        shares = zip(measured.drafted_at[:SHOWN], measured.accepted_at, strict=False)
        table.add_row(
            measured.name,
            source,
            "yes" if grammars else "no",
            f"{measured.acceptance_length:.2f}",
            " ".join(f"{100 * accepted / drafted:.0f}" for drafted, accepted in shares if drafted),
            f"{measured.valid:.0%}" if grammars else "",
        )
    return table
