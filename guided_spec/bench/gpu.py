"""``guided-spec bench gpu``: kernels, engine steps, whole documents and other engines, in one run.

See docs/benchmarks.md for what each figure means.
"""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from guided_spec.bench.gpu_end_to_end import DocumentPlan, DocumentRun, measure_documents
from guided_spec.bench.gpu_kernels import measure_kernels
from guided_spec.bench.gpu_peers import VllmEnvironment, measure_transformers, measure_vllm
from guided_spec.bench.gpu_plugins import load_outline, measure_plugins
from guided_spec.bench.gpu_report import document_table, plugin_table, step_table
from guided_spec.bench.gpu_steps import StepPlan, measure_steps
from guided_spec.bench.gpu_subject import Subject, free_memory, load_subject, without_weights
from guided_spec.bench.widening import write_wide
from guided_spec.errors import ConfigError

__all__ = ["SECTIONS", "GpuPlan", "Section", "run_gpu"]

SECTIONS = ("kernels", "steps", "end-to-end", "peers", "plugins")
PACKAGES = ("guided-spec", "torch", "transformers", "triton", "xgrammar")


class GpuPlan(NamedTuple):
    """What ``guided-spec bench gpu`` is to do.

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
    with _folders(plan, report) as folders:
        if set(plan.sections) <= {"kernels", "plugins"}:
            yield from _measure_plugins(load_outline(*folders), plan, report)
            return
        subject = load_subject(*folders, device=plan.device, dtype=plan.dtype)
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
def _folders(plan: GpuPlan, report: Callable[[str], None]) -> Iterator[tuple[str, str | None]]:
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
