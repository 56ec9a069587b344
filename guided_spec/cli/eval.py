"""``guided-spec eval``: how long a draft is accepted, by source, with and without grammars."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from guided_spec.cli.console import Json, Verbose, print_json, print_table, stderr, working
from guided_spec.cli.options import Device, Dtype, Model, NumDraftTokens
from guided_spec.evaluate.plots import require_matplotlib
from guided_spec.training.options import read_device_map
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # these load torch
    from guided_spec.evaluate.measurement import Acceptance

__all__ = ["evaluate"]

SHOWN = 8  # positions in a table


def evaluate(
    data: Annotated[list[str], typer.Option(help="As of guided-spec train; repeat it.")],
    draft: Annotated[str | None, typer.Option(help="Draft model or head: hub id, folder.")] = None,
    model: Model = None,
    proposers: Annotated[
        str, typer.Option(help="Names, comma-separated; NAME=DRAFT for a draft of its own.")
    ] = "none,ngram,auto",
    num_draft_tokens: NumDraftTokens = 5,
    batch_size: Annotated[int, typer.Option(help="Requests that decode together.")] = 8,
    limit: Annotated[int, typer.Option(help="Prompts of each source.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens per request at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    device_map: Annotated[str | None, typer.Option(help="As of guided-spec train.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    output: Annotated[Path | None, typer.Option(help="Write a JSON list here too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw plots into this folder: SVG.")] = None,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Measure how many draft tokens are accepted, position by position.

    The target answers the prompts of the data, under their grammars and without.
    """
    load: dict[str, Any] = {"device": device, "dtype": dtype, "draft": draft}
    load |= {"num_draft_tokens": num_draft_tokens, "max_batch_size": batch_size}
    load |= {"device_map": None if device_map is None else read_device_map(device_map)}
    load |= {"trust_remote_code": trust_remote_code or None}
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    if plot is not None:
        require_matplotlib("--plot", str(plot))  # before anything runs
    found = _measure(data, model, load, proposers.split(","), params, limit)
    report = [acceptance.as_dict() for acceptance in found]
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        _draw(report, plot)
    if as_json:
        for record in report:
            print_json(record)
    else:
        print_table(_table(found))


def _measure(
    data: list[str],
    model: str | None,
    load: dict[str, Any],
    proposers: list[str],
    params: SamplingParams,
    limit: int,
) -> list[Acceptance]:
    from guided_spec.engine.llm import LLM
    from guided_spec.evaluate.measurement import measure_acceptance, read_asked
    from guided_spec.training.data.records import check_sources

    check_sources(data)
    with working("loading the model"):
        llm = LLM(model, "none", **{name: v for name, v in load.items() if v is not None})
    with llm:
        asked = read_asked(data, llm, limit=limit)
        llm.close()  # its thread would share the cores with those that are measured
        results = []
        for proposer in proposers:
            name, _, draft = proposer.partition("=")
            stderr().print(f"running {name}")
            results += measure_acceptance(llm.with_proposer(name, draft or None), asked, params)
    return results


def _draw(report: list[dict[str, Any]], folder: Path) -> None:
    from guided_spec.evaluate.plots import Origin, acceptance_figures, draw_all

    origin = Origin.here(shlex.join(["guided-spec", *sys.argv[1:]]))
    for path in draw_all(acceptance_figures(report, origin), folder):
        stderr().print(str(path))


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
