"""``guided-spec bench``: a workload file in, a table and JSON out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from guided_spec.cli.console import Json, Verbose, print_table, report_failures, stderr, working
from guided_spec.cli.options import (
    OWN,
    VLLM,
    ModelOptions,
    ReportOptions,
    proposer_list,
    read_engine_options,
    require_writable,
    with_options,
    write_text,
)
from guided_spec.errors import ConfigError
from guided_spec.evaluate.plots import Origin, bench_figures
from guided_spec.kinds import require_one_of
from guided_spec.proposers import takes_draft

if TYPE_CHECKING:  # these load torch
    from guided_spec.engine.llm import LLM
    from guided_spec.evaluate.measurement import Measurement, Plan, WorkItem

DEFAULT_PROPOSERS = (
    "ngram,grammar_forced,draft_model,chain:grammar_forced+ngram,chain:grammar_forced+draft_model"
)

WITHOUT_DRAFT = "ngram,grammar_forced,chain:grammar_forced+ngram"
WITH_DRAFT = "auto,chain:grammar_forced+auto"


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What is measured apart, and the tables of it."""

    tasks: Annotated[
        str | None,
        typer.Option(help="Built-in prompts: extraction,tools,chat; all for all."),
    ] = None
    temperatures: Annotated[
        str | None, typer.Option(help="Several, such as 0,0.7; replaces --temperature.")
    ] = None
    by_kind: Annotated[
        bool, typer.Option("--by-kind", help="Count drafts by kind of token; generates twice.")
    ] = False
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown tables here.")] = None

    def check(self, workload: Path | None, plot: Path | None) -> None:
        """Raise ConfigError for options that exclude each other, and for a file that cannot be."""
        if self.markdown is not None:
            require_writable("--markdown", self.markdown)
        if self.tasks is not None and workload is not None:
            fix = "excludes --tasks: choose one of the two"
            raise ConfigError("--workload", str(workload), fix)
        if plot is not None and (self.tasks or self.temperatures):
            fix = "draws one workload at one temperature: leave out --tasks and --temperatures"
            raise ConfigError("--plot", str(plot), fix)

    def heats(self) -> list[float]:
        """The temperatures; none leaves that to the report. Raises ConfigError."""
        if self.temperatures is None:
            return []
        try:
            found = [float(part) for part in self.temperatures.split(",")]
        except ValueError:
            found = [-1.0]
        if not all(0 <= each < float("inf") for each in found):
            fix = "must be numbers of at least 0, comma-separated"
            raise ConfigError("--temperatures", self.temperatures, fix)
        return found

    def items(self, workload: Path | None, limit: int | None) -> list[WorkItem]:
        """The requests of the tasks, or else of the workload, or else the held-out documents."""
        from guided_spec.bundled import bundled_asset
        from guided_spec.evaluate.measurement import TASKS, load_tasks, load_workload

        if self.tasks is None:
            return load_workload(workload or Path(bundled_asset("heldout.jsonl")), limit)
        names = TASKS if self.tasks == "all" else [name.strip() for name in self.tasks.split(",")]
        return load_tasks(names, limit)

    def write(self, measurements: list[Measurement], model: str | None) -> None:
        """Write the tables, if they were asked for."""
        if self.markdown is None:
            return
        from guided_spec.bundled import BUNDLED
        from guided_spec.evaluate.gains import gains_markdown

        origin = Origin.here(shlex.join(["guided-spec", *sys.argv[1:]]))
        text = gains_markdown(measurements, model or BUNDLED, origin)
        write_text("--markdown", self.markdown, text)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What runs the model."""

    verifier: Annotated[str, typer.Option(help="rejection or coupled.")] = "rejection"
    engine: Annotated[str, typer.Option(help="guided_spec, or vllm with the plugin.")] = OWN
    engine_options: Annotated[str | None, typer.Option(help="JSON object of vLLM options.")] = None

    def check(self, apart: TaskOptions) -> None:
        """Raise ConfigError for what the engine cannot do."""
        require_one_of("--engine", self.engine, (OWN, VLLM))
        if self.engine == OWN and self.engine_options is not None:
            fix = "they are another engine's: leave them out, or pass --engine vllm"
            raise ConfigError("--engine-options", self.engine_options, fix)
        if self.engine == VLLM and apart.by_kind:
            fix = "does not say what became of each draft: leave out --by-kind"
            raise ConfigError("--engine", self.engine, fix)
        read_engine_options(self.engine_options)

    def proposers(self, load: ModelOptions) -> str:
        """Those that are measured where none are named."""
        if self.engine == OWN:
            return _default_proposers(load)
        from guided_spec.integrations.vllm.arguments import LOOKUP

        return LOOKUP if load.draft is None else f"{LOOKUP},auto"

    def measure(self, load: ModelOptions, plan: Plan) -> list[Measurement]:
        """The plan, by engines of this kind."""
        from guided_spec.evaluate.measurement import measure_engines, run_plan

        def report(name: str) -> None:
            stderr().print(f"running {name}")

        if self.engine == VLLM:
            return measure_engines(self._inside_vllm(load), plan, report)
        most = load.max_batch_size or max(plan.batch_sizes)
        with working("loading the model"):
            llm = load.load(proposer="none", verifier=self.verifier, max_batch_size=most)
        with llm:
            return run_plan(llm, plan, report)

    def _inside_vllm(self, load: ModelOptions) -> Callable[[str, str | None, int], LLM]:
        """vLLM takes its proposer when it loads: each one loads the model."""
        options = read_engine_options(self.engine_options)
        common = {"engine": VLLM, "engine_options": options, "verifier": self.verifier}

        def engine(name: str, draft: str | None, size: int) -> LLM:
            own = None if name == "none" or not takes_draft(name) else draft or load.draft
            return load.load(**common, proposer=name, draft=own, max_batch_size=size)

        return engine


@with_options
def bench(
    workload: Annotated[
        Path | None, typer.Option(help="JSON Lines; see docs/benchmarks.md.")
    ] = None,
    proposers: Annotated[
        str | None, typer.Option(help="Names, comma-separated; NAME=DRAFT for a draft of its own.")
    ] = None,
    *,
    load: ModelOptions,
    apart: TaskOptions,
    reports: ReportOptions,
    batch_size: Annotated[str, typer.Option(help="Concurrent requests, such as 1,8.")] = "1",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum requests per task.")] = None,
    chosen: EngineOptions,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Compare proposers on a workload.

    Plain constrained decoding and transformers' own generate are measured as well; the latter
    at batch size 1 and temperature 0 only, where it does the same work, and neither on tasks nor
    beside vLLM. Without --workload and --tasks the held-out documents that come with the package
    are used. The exit code is 1 if a request failed.
    """
    batches, params = _batch_sizes(batch_size), reports.params()
    apart.check(workload, reports.plot)
    chosen.check(apart)
    from guided_spec.evaluate.measurement import Plan

    names, heats = proposer_list(proposers or chosen.proposers(load)), apart.heats()
    items = apart.items(workload, limit)
    with_transformers = 0 in (heats or [params.temperature]) and apart.tasks is None
    plan = Plan(items, names, params, with_transformers, batches, heats, apart.by_kind)
    measurements = chosen.measure(load, plan)
    report = [measurement.as_dict() for measurement in measurements]
    reports.keep(report, bench_figures, as_json=as_json)
    apart.write(measurements, load.model)
    if not as_json:
        print_table(_table(measurements))
    report_failures(measurements)


def _batch_sizes(text: str) -> list[int]:
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ConfigError("--batch-size", text, "must be numbers of at least 1, comma-separated")
    return sizes


def _default_proposers(load: ModelOptions) -> str:
    """With the bundled model its draft heads too; with another what its draft, if any, can be."""
    from guided_spec.bundled import bundled_asset, named_model
    from guided_spec.engine.setup import BUNDLED_HEADS

    if named_model(load.model) != bundled_asset("target"):
        return WITHOUT_DRAFT if load.draft is None else f"{WITHOUT_DRAFT},{WITH_DRAFT}"
    heads = [f"chain:grammar_forced+{name}={bundled_asset(name)}" for name in BUNDLED_HEADS]
    return ",".join([DEFAULT_PROPOSERS, *heads])


def _table(measurements: list[Measurement]) -> Table:
    """Within 80 columns; ``as_dict`` has more. What differs among the rows has a column."""
    about = {
        "task": [m.task for m in measurements],
        "temp.": [f"{m.temperature:g}" for m in measurements],
        "batch": [str(m.batch_size) for m in measurements],
    }
    about = {head: cells for head, cells in about.items() if len(set(cells)) > 1}
    if any(m.failed for m in measurements):
        about["failed"] = [str(m.failed) for m in measurements]
    heads = ("tokens\n/s", "tokens\n/forward", "accepted", "mask µs\n/token", "valid", "same\ntext")
    columns = (Column(head, justify="right", no_wrap=True) for head in (*about, *heads))
    table = Table(Column("proposer", overflow="fold"), *columns, box=SIMPLE, padding=0)
    for at, m in enumerate(measurements):
        table.add_row(
            m.name,
            *(cells[at] for cells in about.values()),
            f"{m.tokens_per_second:.0f}",
            f"{m.acceptance_length:.2f}",
            f"{m.accepted / m.drafted:.0%}" if m.drafted else "",
            "" if m.mask_microseconds is None else f"{m.mask_microseconds:.0f}",
            m.percent_valid,
            f"{m.same_text:.0%}",
        )
    return table
