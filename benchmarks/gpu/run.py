"""Kernels, engine steps, whole documents and other engines, measured in one run.

See docs/benchmarks.md for what each figure means.
"""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE
from rich.table import Column, Table

from benchmarks.gpu.documents import DocumentPlan, DocumentRun, measure_documents
from benchmarks.gpu.kernels import measure_kernels
from benchmarks.gpu.peers import VllmEnvironment, measure_transformers, measure_vllm
from benchmarks.gpu.plugins import PluginRun, load_outline, measure_plugins
from benchmarks.gpu.steps import StepPlan, StepTime, measure_steps
from benchmarks.gpu.subject import Subject, load_subject, without_weights
from benchmarks.widening.models import write_wide
from guided_spec.config import EngineConfig
from guided_spec.errors import ConfigError
from guided_spec.ops.host import free_memory


def step_table(times: Sequence[StepTime]) -> Table:
    """A cell holds the figure without a grammar above the one with it; then what medians say."""
    heads = ("median\nms", "p90\nms", "mean\nms", "tokens\n/step", "drafted\n/step", "grammar")
    table = _table("proposer", *heads)
    pairs: dict[tuple[str, int, float], dict[bool, StepTime]] = {}
    for time in times:
        name = time.proposer if time.tables is None else f"{time.proposer}, tables: {time.tables}"
        key = (name, time.batch, time.temperature)
        pairs.setdefault(key, {})[time.grammar] = time
    for key, pair in pairs.items():
        figures = zip(_figures(pair.get(False)), _figures(pair.get(True)), strict=True)
        cells = [f"{off}\n{on}" for off, on in figures]
        problems = sorted({time.problem for time in pair.values() if time.problem})
        _add_row(table, key, [*cells, _overhead(pair)], "; ".join(problems))
    return _with_caption(table, "figures: without a grammar, and with it below")


def document_table(runs: Sequence[DocumentRun]) -> Table:
    """One engine and workload a row."""
    heads = ("tokens\n/s", "limit", "tokens\n/forward", "drafted", "accepted", "valid")
    table = _table("engine", *heads, "same\ntext", "failed")
    for run in runs:
        m = run.measurement
        figures: Iterable[str] = ()
        if m is not None:
            figures = (
                f"{m.tokens_per_second:.0f}",
                "" if run.limit is None else f"{run.limit:.0f}",
                f"{m.acceptance_length:.2f}",
                str(m.drafted),
                str(m.accepted),
                f"{m.valid:.0%}",
                f"{m.same_text:.0%}",
                str(m.failed),
            )
        _add_row(table, (run.engine, run.batch, run.temperature), figures, run.problem)
    return table


def plugin_table(runs: Sequence[PluginRun]) -> Table:
    """One configuration and workload a row."""
    heads = ("tokens\n/s", "tokens\n/forward", "drafts", "tokens\n/draft", "accepted", "valid")
    table = _table("engine", *heads, "finished")
    for run in runs:
        m, length = run.run.measurement, run.mean_draft_length
        figures: Iterable[str] = ()
        if m is not None:
            figures = (
                f"{m.tokens_per_second:.0f}",
                f"{m.acceptance_length:.2f}",
                str(run.drafts),
                "" if length is None else f"{length:.2f}",
                f"{m.accepted / m.drafted:.0%}" if m.drafted else "",
                f"{m.valid:.0%}",
                f"{run.finished}/{m.requests}",
            )
        key = (run.run.engine, run.run.batch, run.run.temperature)
        _add_row(table, key, figures, run.run.problem)
    return table


def _table(first: str, *heads: str) -> Table:
    """Within 80 columns."""
    columns = (Column(head, justify="right", no_wrap=True) for head in ("batch", "T", *heads))
    return Table(Column(first, overflow="fold"), *columns, box=SIMPLE, padding=0)


def _add_row(
    table: Table, key: tuple[str, int, float], figures: Iterable[str], problem: str | None
) -> None:
    """key: what was measured, how many requests together, at which temperature."""
    name, batch, temperature = key
    table.add_row(name, str(batch), f"{temperature:g}", *figures)
    if problem:
        _with_caption(table, f"{name}, {batch}, {temperature:g}: {problem}")


def _with_caption(table: Table, line: str) -> Table:
    table.caption = f"{table.caption}\n{line}" if table.caption else line
    table.caption_justify = "left"
    return table


def _figures(time: StepTime | None) -> list[str]:
    if time is None:
        return [""] * 5
    values = (time.median_ms, time.p90_ms, time.mean_ms, time.tokens, time.drafted)
    return ["" if value is None else f"{value:.2f}" for value in values]


def _overhead(pair: dict[bool, StepTime]) -> str:
    off, on = (pair[g].median_ms if g in pair else None for g in (False, True))
    return "" if not off or on is None else f"{on / off - 1:+.1%}"


SECTIONS = ("kernels", "steps", "end-to-end", "peers", "plugins")
PACKAGES = ("guided-spec", "torch", "transformers", "triton", "xgrammar")


class GpuPlan(NamedTuple):
    """What ``python -m benchmarks.gpu`` is to do.

    sections: of ``SECTIONS``, in that order whatever theirs is. model, eagle3: folders; None for
    both is the bundled pair in the shape of Llama-3.1-8B. work: where that is written, and found
    by the next run; None is a temporary folder. device, dtype: as for ``load_model``.
    kernels: the arguments of ``measure_kernels``.
    """

    sections: Sequence[str] = SECTIONS
    model: str | None = None
    eagle3: str | None = None
    work: Path | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    kernels: Mapping[str, Mapping[str, Any]] | None = None
    steps: StepPlan = StepPlan()
    documents: DocumentPlan = DocumentPlan()
    vllm: VllmEnvironment = VllmEnvironment()


class Section(NamedTuple):
    """A section's results: records for JSON, and tables (or text) by their headings."""

    name: str
    records: dict[str, Any]
    tables: dict[str, Table | str]


def run_gpu(plan: GpuPlan, report: Callable[[str], None]) -> Iterator[Section]:
    """Measure section by section; the first one, "machine", says where.

    "steps", "end-to-end" and "plugins" come again after each engine, with all records so far, and
    their tables the last time. ``report`` is told what is measured next. Raises ConfigError for an
    unknown section or configuration, ModelError for a model that cannot be loaded. What fails
    inside a section is a record with its problem.
    """
    unknown = [name for name in plan.sections if name not in SECTIONS]
    if unknown or not plan.sections:
        raise ConfigError("sections", ",".join(plan.sections), f"must be of {', '.join(SECTIONS)}")
    yield Section("machine", _machine(plan), {})
    if "kernels" in plan.sections:
        texts = measure_kernels(plan.device, report, plan.kernels)
        yield Section("kernels", dict(texts), dict(texts))
    if set(plan.sections) == {"kernels"}:
        return
    with folders(plan, report) as paths:
        if set(plan.sections) <= {"kernels", "plugins"}:
            yield from _measure_plugins(load_outline(*paths), plan, report)
            return
        subject = load_subject(*paths, device=plan.device, dtype=plan.dtype)
        yield from _measure_here(subject, plan, report)
        runs: list[DocumentRun] = []
        if "peers" in plan.sections:
            runs += measure_transformers(subject, plan.documents, report)
        # Other processes want the memory that the weights take here.
        subject = without_weights(subject)
        free_memory(torch.device(plan.device))
        if "peers" in plan.sections:
            runs += measure_vllm(subject, plan.documents, plan.vllm, report)
            yield Section("peers", _records(runs), {"Other engines": document_table(runs)})
        if "plugins" in plan.sections:
            yield from _measure_plugins(subject, plan, report)


def _measure_here(
    subject: Subject, plan: GpuPlan, report: Callable[[str], None]
) -> Iterator[Section]:
    if "steps" in plan.sections:
        times = measure_steps(subject, plan.steps, report)
        yield from _growing("steps", "Engine steps", times, step_table)
    if "end-to-end" in plan.sections:
        runs = measure_documents(subject, plan.documents, report)
        yield from _growing("end-to-end", "Whole documents", runs, document_table)


def _measure_plugins(
    subject: Subject, plan: GpuPlan, report: Callable[[str], None]
) -> Iterator[Section]:
    runs = measure_plugins(subject, plan.documents, plan.vllm, report)
    yield from _growing("plugins", "vLLM, plugin off and on", runs, plugin_table)


def _growing(
    name: str, heading: str, measured: Iterable[list[Any]], table: Callable[[list[Any]], Table]
) -> Iterator[Section]:
    """A section after each piece of it: whoever stops the run keeps what was measured."""
    rows: list[Any] = []
    for more in measured:
        rows += more
        yield Section(name, _records(rows), {})
    yield Section(name, _records(rows), {heading: table(rows)})


def _records(rows: Sequence[Any]) -> dict[str, Any]:
    return {"rows": [row.as_dict() for row in rows]}


@contextmanager
def folders(plan: GpuPlan, report: Callable[[str], None]) -> Iterator[tuple[str, str | None]]:
    """The target's folder and the head's; written first if the plan names none."""
    if plan.model is not None:
        yield plan.model, plan.eagle3
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = plan.work or Path(scratch)
        found = (folder / "target", folder / "eagle3")
        if not all((path / "config.json").is_file() for path in found):
            report(f"writing the widened models to {folder}")
            write_wide(folder)
        target, head = found
        yield str(target), plan.eagle3 or str(head)


def read_engine_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Settings of an engine from NAME=VALUE. Raises ConfigError for what is none."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if name not in {field.name for field in fields(EngineConfig)} or not separator:
            raise ConfigError("engine_option", pair, "must be NAME=VALUE of an engine's setting")
        found[name] = int(value) if value.isdigit() else value
    return found


def _machine(plan: GpuPlan) -> dict[str, Any]:
    versions = {name: _version(name) for name in PACKAGES}
    device = platform.processor() or platform.machine()
    if torch.device(plan.device).type == "cuda":
        device = torch.cuda.get_device_name(torch.device(plan.device))
    own = {"device": device, "dtype": plan.dtype, "python": platform.python_version()}
    return own | {"versions": versions}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
