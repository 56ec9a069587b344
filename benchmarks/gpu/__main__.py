"""``python -m benchmarks.gpu``: kernels, steps, whole documents and other engines on one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.documents import DocumentPlan
from benchmarks.gpu.peers import VllmEnvironment
from benchmarks.gpu.run import SECTIONS, GpuPlan, read_engine_options, run_gpu
from benchmarks.gpu.steps import TABLES, StepPlan
from guided_spec.cli.console import (
    Json,
    Verbose,
    failures_as_messages,
    print_json,
    print_table,
    stderr,
    stdout,
)
from guided_spec.errors import ConfigError

NAMES = ", ".join(SECTIONS)
TABLE_NAMES = ", ".join(TABLES)

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def gpu(
    sections: Annotated[str | None, typer.Option(help=f"Of {NAMES}; default: all.")] = None,
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
    tables: Annotated[str | None, typer.Option(help=f"Some of {TABLE_NAMES}; for steps.")] = None,
    draft: Annotated[list[str] | None, typer.Option(help="PROPOSER=FOLDER, for steps.")] = None,
    requests: Annotated[int | None, typer.Option(help="Whole documents of each run.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per document at most.")] = 256,
    repeats: Annotated[int, typer.Option(help="Runs of documents, by turns; the median.")] = 1,
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
    with failures_as_messages(as_json=as_json):
        where: dict[str, Any] = {"sections": (sections or NAMES).replace(" ", "").split(",")}
        where |= {"model": model, "eagle3": eagle3, "work": work, "device": device, "dtype": dtype}
        shared = _shared(batches, temperatures, proposers) | _own(engine_option, num_draft_tokens)
        timed = {"context": prompt_length, "steps": steps, **_others(warm_up, tables, draft)}
        whole = {"max_tokens": max_tokens, "requests": requests, "repeats": repeats}
        vllm: dict[str, Any] = {"python": vllm_python, "site": vllm_site, "logs": vllm_logs}
        vllm |= {"limit": vllm_limit, "methods": _split("vllm_methods", vllm_methods, str)}
        _run_gpu(_gpu_plan(where, shared | timed, shared | whole, vllm), output, as_json=as_json)


def _gpu_plan(
    where: dict[str, Any], steps: dict[str, Any], documents: dict[str, Any], vllm: dict[str, Any]
) -> GpuPlan:
    """Each holds fields of the record that is made of it."""
    plans = {"steps": StepPlan(**steps), "documents": DocumentPlan(**documents)}
    return GpuPlan(**where, **plans, vllm=VllmEnvironment(**vllm))  # type: ignore[arg-type]


def _run_gpu(plan: GpuPlan, output: Path | None, *, as_json: bool) -> None:
    report: dict[str, Any] = {}
    for section in run_gpu(plan, lambda message: stderr().print(message, markup=False)):
        report[section.name] = section.records
        for heading, table in () if as_json else section.tables.items():
            stdout().print(heading)
            stdout().print(table) if isinstance(table, str) else print_table(table)
        if output is not None:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        for name, records in report.items():
            print_json({"section": name, **records})


def _own(pairs: list[str] | None, num_draft_tokens: int) -> dict[str, Any]:
    """What steps and documents are told besides. pairs: NAME=VALUE."""
    return {"num_draft_tokens": num_draft_tokens, "options": read_engine_options(pairs)}


def _others(warm_up: int, tables: str | None, drafts: list[str] | None) -> dict[str, Any]:
    """What else steps are told. drafts: PROPOSER=FOLDER."""
    found = dict[str, str]()
    for pair in drafts or ():
        name, separator, folder = pair.partition("=")
        if not separator:
            raise ConfigError("draft", pair, "must be PROPOSER=FOLDER")
        found[name] = folder
    return {"warm_up": warm_up, "tables": _split("tables", tables, str), "drafts": found}


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


if __name__ == "__main__":
    app()
