"""``guided-spec bench``: a workload file in, a table and JSON out; ``bench gpu`` for a machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from guided_spec.cli.console import (
    Json,
    Verbose,
    print_json,
    print_table,
    stderr,
    stdout,
    working,
)
from guided_spec.config import EngineConfig
from guided_spec.errors import ConfigError
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # these load torch
    from guided_spec.bench.gpu import GpuPlan
    from guided_spec.bench.measurement import Measurement

__all__ = ["bench_app"]

DEFAULT_PROPOSERS = (
    "ngram,grammar_forced,draft_model,chain:grammar_forced+ngram,chain:grammar_forced+draft_model"
)

SECTIONS = "kernels, steps, end-to-end, peers, plugins"  # of ``bench.gpu``, not imported for help

bench_app = typer.Typer(invoke_without_command=True)


@bench_app.callback()
def bench(
    context: typer.Context,
    workload: Annotated[Path | None, typer.Option(help="JSON Lines; see the docs.")] = None,
    proposers: Annotated[
        str | None, typer.Option(help="Names, comma-separated; NAME=DRAFT for a draft of its own.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model or head: hub id, folder.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    batch_size: Annotated[int, typer.Option(help="Requests that decode together.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Requests to run at most.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per request at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    verifier: Annotated[str, typer.Option(help="rejection or coupled.")] = "rejection",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write a JSON list here too.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a timeline here: a Chrome trace.")
    ] = None,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Compare proposers on a workload.

    Plain constrained decoding and transformers' own generate are measured beside them; the latter
    at batch size 1 and temperature 0 only, where it does the same work. Without --workload the
    held-out documents that come with the package are used.

    `gpu` is another benchmark, with options of its own.
    """
    if context.invoked_subcommand is not None:
        return
    load: dict[str, Any] = {"device": device, "dtype": dtype, "draft": draft}
    load |= {"num_draft_tokens": num_draft_tokens, "max_batch_size": batch_size}
    load["verifier"] = verifier
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    asked = _Asked(workload, limit, (proposers or _default_proposers(model)).split(","), params)
    measurements = _compare(asked, model, load, profile)
    report = [measurement.as_dict() for measurement in measurements]
    _write(output, report)
    if as_json:
        for record in report:
            print_json(record)
    else:
        print_table(_table(measurements))


class _Asked(NamedTuple):
    """A workload's file, None for the bundled one, how much of it, and how it is to be run."""

    workload: Path | None
    limit: int | None
    proposers: list[str]
    params: SamplingParams


def _compare(
    asked: _Asked, model: str | None, load: dict[str, Any], profile: Path | None
) -> list[Measurement]:
    from guided_spec.bench.compare import Plan, run_plan
    from guided_spec.bench.workload import load_workload
    from guided_spec.engine.llm import LLM
    from guided_spec.engine.profile import profiling
    from guided_spec.engine.setup import bundled_asset

    items = load_workload(asked.workload or Path(bundled_asset("heldout.jsonl")), asked.limit)
    with_transformers = load["max_batch_size"] == 1 and asked.params.temperature == 0
    plan = Plan(items, asked.proposers, asked.params, with_transformers)
    with working("loading the model"):
        llm = LLM(model, "none", **{name: v for name, v in load.items() if v is not None})
    with llm, profiling(profile):
        return run_plan(llm, plan, lambda name: stderr().print(f"running {name}"))


@bench_app.command()
def gpu(
    sections: Annotated[
        str | None, typer.Option(help=f"Some of {SECTIONS}, comma-separated; all by default.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder; default: the widened model.")] = None,
    eagle3: Annotated[str | None, typer.Option(help="Folder of the EAGLE-3 head.")] = None,
    work: Annotated[Path | None, typer.Option(help="Where the widened model is kept.")] = None,
    batches: Annotated[str | None, typer.Option(help="Such as 1,8,64.")] = None,
    temperatures: Annotated[str | None, typer.Option(help="Such as 0,0.7.")] = None,
    proposers: Annotated[str | None, typer.Option(help="Names, comma-separated.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of EngineConfig; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 60,
    warm_up: Annotated[int, typer.Option(help="Steps before those.")] = 16,
    prompt_length: Annotated[int, typer.Option(help="Prompt tokens when steps are timed.")] = 1000,
    requests: Annotated[int | None, typer.Option(help="Whole documents of each run.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per document at most.")] = 256,
    vllm_python: Annotated[str | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    vllm_site: Annotated[str | None, typer.Option(help="Folder that vLLM is in.")] = None,
    vllm_logs: Annotated[Path | None, typer.Option(help="Folder for vLLM's output.")] = None,
    vllm_methods: Annotated[str | None, typer.Option(help="Such as eagle3+exact.")] = None,
    vllm_limit: Annotated[float, typer.Option(help="Seconds for each of them.")] = 540.0,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ... or cpu.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="Write the JSON here, as it grows.")] = None,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Measure kernels, engine steps, whole documents and other engines on one device.

    Without --model the bundled target and its EAGLE-3 head are measured in the shape of an 8B
    Llama. docs/benchmarks.md says what each figure means.
    """
    named = SECTIONS.split(", ") if sections is None else sections.split(",")
    where: dict[str, Any] = {"sections": named, "model": model, "eagle3": eagle3, "work": work}
    where |= {"device": device, "dtype": dtype}
    shared = _shared(batches, temperatures, proposers)
    shared |= {"num_draft_tokens": num_draft_tokens, "options": _options(engine_option or [])}
    timed = {"context": prompt_length, "steps": steps, "warm_up": warm_up}
    whole = {"max_tokens": max_tokens, "requests": requests}
    vllm: dict[str, Any] = {"python": vllm_python, "site": vllm_site, "logs": vllm_logs}
    vllm |= {"limit": vllm_limit, "methods": _split("vllm_methods", vllm_methods, str)}
    _run_gpu(_gpu_plan(where, shared | timed, shared | whole, vllm), output, as_json=as_json)


def _gpu_plan(
    where: dict[str, Any], steps: dict[str, Any], documents: dict[str, Any], vllm: dict[str, Any]
) -> GpuPlan:
    """Each holds fields of the record that is made of it."""
    from guided_spec.bench.gpu import GpuPlan
    from guided_spec.bench.gpu_end_to_end import DocumentPlan
    from guided_spec.bench.gpu_peers import VllmEnvironment
    from guided_spec.bench.gpu_steps import StepPlan

    plans = {"steps": StepPlan(**steps), "documents": DocumentPlan(**documents)}
    return GpuPlan(**where, **plans, vllm=VllmEnvironment(**vllm))  # type: ignore[arg-type]


def _run_gpu(plan: GpuPlan, output: Path | None, *, as_json: bool) -> None:
    from guided_spec.bench.gpu import run_gpu

    report: dict[str, Any] = {}
    for section in run_gpu(plan, lambda message: stderr().print(message, markup=False)):
        report[section.name] = section.records
        for heading, table in () if as_json else section.tables.items():
            stdout().print(heading)
            stdout().print(table) if isinstance(table, str) else print_table(table)
        _write(output, report)
    if as_json:
        for name, records in report.items():
            print_json({"section": name, **records})


def _write(output: Path | None, report: Any) -> None:
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _options(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if name not in {field.name for field in fields(EngineConfig)} or not separator:
            raise ConfigError("engine_option", pair, "must be NAME=VALUE of an engine's setting")
        found[name] = int(value) if value.isdigit() else value
    return found


def _shared(batches: str | None, temperatures: str | None, proposers: str | None) -> dict[str, Any]:
    """What was given of the lists that steps and documents have in common."""
    lists = {
        "batches": _split("batches", batches, int),
        "temperatures": _split("temperatures", temperatures, float),
        "proposers": _split("proposers", proposers, str),
    }
    return {name: values for name, values in lists.items() if values}


def _split(argument: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(argument, text, "must be numbers, comma-separated") from error


def _default_proposers(model: str | None) -> str:
    """With the bundled model its draft heads too."""
    from guided_spec.engine.setup import bundled_asset

    if model is not None:
        return DEFAULT_PROPOSERS
    heads = [f"chain:grammar_forced+{name}={bundled_asset(name)}" for name in ("eagle3", "mtp")]
    return ",".join([DEFAULT_PROPOSERS, *heads])


def _table(measurements: list[Measurement]) -> Table:
    """Within 80 columns; ``as_dict`` has more."""
    heads = ("tokens\n/s", "tokens\n/forward", "accepted", "mask µs\n/token", "valid", "same\ntext")
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    table = Table(Column("proposer", overflow="fold"), *columns, box=SIMPLE, padding=0)
    for m in measurements:
        table.add_row(
            m.name,
            f"{m.tokens_per_second:.0f}",
            f"{m.acceptance_length:.2f}",
            f"{m.accepted / m.drafted:.0%}" if m.drafted else "",
            "" if m.mask_microseconds is None else f"{m.mask_microseconds:.0f}",
            f"{m.valid:.0%}",
            f"{m.same_text:.0%}",
        )
    return table
