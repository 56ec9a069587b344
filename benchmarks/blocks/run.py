"""The parts of the benchmark of block heads, one after another, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Column, Table

from benchmarks.blocks.clock import Clock
from benchmarks.blocks.documents import DocumentPlan, RunKey, measure_blocks
from benchmarks.blocks.heads import HeadPlan, head_folders, train_heads, widen
from benchmarks.gpu.subject import Subject, load_subject
from guided_spec.errors import ConfigError

PARTS = ("train", "widen", "documents")
Record = dict[str, Any]
Records = dict[str, list[Record]]

KEYS: dict[str, tuple[str, ...]] = {
    "train": ("method",),
    "widen": ("head",),
    "documents": RunKey._fields,
}
COLUMNS: dict[str, tuple[str, ...]] = {
    "train": ("steps", "tokens", "seconds", "tokens_per_second", "acceptance_length"),
    "widen": ("folder",),
    "documents": (
        *("tokens_per_second", "tokens_per_forward", "step_ms", "steps", "drafted", "accepted"),
        *("starved", "device_steps", "valid", "same_text", "failed"),
    ),
}


class BlocksPlan(NamedTuple):
    """What to run.

    work: where heads and models are kept. parts: of ``PARTS``, in that order whatever theirs is.
    seconds: of a part at most. model: folder of the target; None is the widened one in ``work``.
    device, dtype: as for ``load_model``.
    """

    work: Path
    parts: Sequence[str] = PARTS
    heads: HeadPlan = HeadPlan()
    documents: DocumentPlan = DocumentPlan()
    seconds: Mapping[str, float] = MappingProxyType({"train": 240.0})
    model: str | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"

    def load(self) -> Subject:
        """The target, in memory."""
        return load_subject(
            self.model or self.work / "target", None, device=self.device, dtype=self.dtype
        )


class Found(NamedTuple):
    """Records of a part, as soon as they are there."""

    part: str
    records: list[Record]


def run_blocks(
    plan: BlocksPlan,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    clock: Clock,
    report: Callable[[str], None],
) -> Iterator[Found]:
    """What there is time for; ``report`` is told what comes next.

    records: of earlier runs, by part: what they have of documents is not run again. Raises
    ConfigError for an unknown part.
    """
    if unknown := [name for name in plan.parts if name not in PARTS]:
        raise ConfigError("parts", ",".join(unknown), f"must be of {', '.join(PARTS)}")
    if "train" in plan.parts:
        heads = train_heads(plan.work, plan.heads, _part(plan, clock, "train"), report)
        yield Found("train", [head._asdict() for head in heads])
    if "widen" in plan.parts and clock.left > 0:
        folders = widen(plan.work, plan.heads, clock, report)
        yield Found("widen", [{"head": n, "folder": str(path)} for n, path in folders.items()])
    if clock.left > 0 and "documents" in plan.parts:
        yield from _measure(plan, records, clock, report)


def merge(records: Records, found: Found) -> None:
    """Add what was found; what is known by the same key is replaced."""
    keys = KEYS[found.part]
    kept = {tuple(row[name] for name in keys): row for row in records.get(found.part, [])}
    kept |= {tuple(row[name] for name in keys): row for row in found.records}
    records[found.part] = list(kept.values())


def table_of(part: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line a record, and below them what went wrong."""
    keys, columns = KEYS[part], COLUMNS[part]
    heads = (Column(name.replace("_", "\n"), justify="right") for name in columns)
    table = Table(*(Column(name) for name in keys), *heads, box=SIMPLE, padding=0, title=part)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in (*keys, *columns)))
    problems = [
        f"{', '.join(str(row[name]) for name in keys)}: {row['problem']}"
        for row in rows
        if row.get("problem")
    ]
    table.caption, table.caption_justify = "\n".join(problems) or None, "left"
    return table


def _part(plan: BlocksPlan, clock: Clock, name: str) -> Clock:
    return clock.part(plan.seconds.get(name, clock.left))


def _measure(
    plan: BlocksPlan,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    clock: Clock,
    report: Callable[[str], None],
) -> Iterator[Found]:
    subject = plan.load()
    rows = [row for row in records.get("documents", ()) if not row["problem"]]
    done = {RunKey(*(row[name] for name in RunKey._fields)) for row in rows}
    folders = head_folders(plan.work, plan.heads.methods)
    for run in measure_blocks(subject, folders, plan.documents, done, clock, report):
        report(f"  {run.tokens_per_second:.0f} tokens/s, {run.tokens_per_forward:.2f}: {run.key}")
        yield Found("documents", [run.as_dict()])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
