"""The plots of reports: of ``guided-spec bench``, ``guided-spec eval`` and a training's log."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.evaluate.figure import Figure, write_figure

__all__ = ["Origin", "acceptance_figures", "bench_figures", "draw_all", "training_figures"]

MOST_POSITIONS = 16
BASELINES = ("none", "transformers")
PACKAGES = ("guided-spec", "torch", "transformers", "xgrammar")
Report = Sequence[Mapping[str, Any]]
_Rows = dict[int, dict[str, Mapping[str, Any]]]


class Origin(NamedTuple):
    """Where a report is from: the command, the machine, the versions and the day."""

    command: str
    machine: str
    versions: str
    date: str

    @classmethod
    def here(cls, command: str) -> Origin:
        """This machine, today."""
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
        machine = f"{platform.processor() or platform.machine()}, {platform.system()}"
        return cls(command, machine, versions, datetime.date.today().isoformat())


def draw_all(
    figures: Mapping[str, Figure], folder: Path, *, option: str = "--plot", suffix: str = ".svg"
) -> list[Path]:
    """Write ``figures`` by their names to ``folder``; returns where they are.

    Beside each lies its figure as JSON, from which ``draw`` makes it again. Raises ConfigError,
    naming the option, where the folder cannot be made, and where matplotlib is missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"must be a folder that can be written to ({error.strerror})"
        raise ConfigError(option, str(folder), fix) from error
    return [
        write_figure(figure, folder / f"{name}.json", suffix) for name, figure in figures.items()
    ]


def acceptance_figures(report: Report, origin: Origin) -> dict[str, Figure]:
    """By file name; report: rows of ``guided-spec eval --output``."""
    named = {
        f"{row['proposer']}, {row['source']}{', with grammars' if row['grammars'] else ''}": row
        for row in report
    }
    figure = _acceptance({1: named}, origin)
    return {} if figure is None else {"acceptance_by_position": figure}


MOST_POINTS = 20
SERIES = {  # of a log: title, unit, note
    "loss": ("Loss", "loss", "Means over the steps up to each point, depths weighted."),
    "acceptance_length": (
        "Acceptance length",
        "tokens per forward",
        "An estimate: greedy drafts, on the text of the documents.",
    ),
}


def training_figures(lines: Report, origin: Origin) -> dict[str, Figure]:
    """By file name: the loss and the acceptance of a run, by step.

    lines: of the run's log. A metric that it does not hold has no figure.
    """
    steps = sorted({line["step"] for line in lines})
    ends = steps[:: -max(1, -(-len(steps) // MOST_POINTS))][::-1]
    figures = {}
    for name, (title, unit, note) in SERIES.items():
        labels = {"training": name, "held out": f"heldout_{name}"}
        series = {label: _means(lines, key, ends) for label, key in labels.items()}
        shown = {label: values for label, values in series.items() if any(values)}
        if shown:
            figures[name] = Figure(
                title=title,
                style="lines",
                x="step",
                ticks=[str(step) for step in ends],
                unit=unit,
                series=shown,
                highlight=[*shown],
                note=note,
                **_measured(origin),
            )
    return figures


def _means(lines: Report, key: str, ends: Sequence[int]) -> list[float | None]:
    """Of what was logged up to each of ``ends``, from the one before; None where nothing was."""
    found: list[float | None] = []
    for before, end in zip([-1, *ends], ends, strict=False):
        values = [line[key] for line in lines if key in line and before < line["step"] <= end]
        found.append(sum(values) / len(values) if values else None)
    return found


def bench_figures(report: Report, origin: Origin) -> dict[str, Figure]:
    """By file name; what nothing was measured of has no figure.

    report: the rows of ``guided-spec bench --output``: ``Measurement.as_dict`` of each.

    Raises ConfigError for a report that holds something else.
    """
    try:
        rows = _by_batch(report)
        figures = {
            "tokens_per_second": _bars(_SPEED, rows, origin),
            "tokens_per_forward": _bars(_FORWARDS, rows, origin),
            "acceptance_by_position": _acceptance(rows, origin),
            "mask_cost": _bars(_MASKS, rows, origin),
        }
    except (KeyError, TypeError) as error:
        fix = f"must be what guided-spec bench --output wrote ({type(error).__name__}: {error})"
        raise ConfigError("report", report, fix) from error
    return {name: figure for name, figure in figures.items() if figure is not None}


def _by_batch(report: Report) -> _Rows:
    """Each batch size's rows by name; a proposer that was measured twice gets its number."""
    rows: _Rows = {}
    for row in report:
        found, name = rows.setdefault(row["batch_size"], {}), row["name"]
        before = sum(other["name"] == name for other in found.values())
        found[f"{name} ({before + 1})" if before else name] = row
    return rows


class _Bars(NamedTuple):
    """One figure of each row, as a bar. column: of the report."""

    title: str
    unit: str
    column: str
    digits: int
    note: str


_SPEED = _Bars(
    *("Tokens per second", "tokens/s", "tokens_per_second", 1),
    "Output tokens by wall time, prompts and drafts included.",
)
_FORWARDS = _Bars(
    *("Tokens per forward pass of the target", "tokens/forward", "acceptance_length", 2),
    "How many output tokens one pass brings to a request; plain decoding has 1.",
)
_MASKS = _Bars(
    *("What masks cost", "µs per output token", "mask_microseconds", 1),
    "Host time; where the target runs on a GPU, most of it passes beside its forward.",
)


def _bars(what: _Bars, rows: _Rows, origin: Origin) -> Figure | None:
    """A panel for each batch size."""
    names = list(dict.fromkeys(name for found in rows.values() for name in found))
    series = {name: [_rounded(found.get(name), what) for found in rows.values()] for name in names}
    series = {name: values for name, values in series.items() if any(values)}
    if not series:
        return None
    return Figure(
        title=what.title,
        style="bars",
        x="requests at a time",
        ticks=[str(size) for size in rows],
        unit=what.unit,
        series=series,
        highlight=[name for name in series if name not in BASELINES],
        note=what.note,
        **_measured(origin),
    )


def _rounded(row: Mapping[str, Any] | None, what: _Bars) -> float | None:
    value = None if row is None else row[what.column]
    return None if value is None else round(value, what.digits)


def _acceptance(by_batch: _Rows, origin: Origin) -> Figure | None:
    """At the first batch size: it changes what is accepted by no more than rounding."""
    rows = next(iter(by_batch.values()), {})
    drafted = {name: row["drafted_at"] for name, row in rows.items() if row["drafted_at"]}
    if not drafted:
        return None
    longest = max(map(len, drafted.values()))
    shown = min(longest, MOST_POSITIONS)
    cut = f", the first {shown} of {longest} positions" if shown < longest else ""
    series = {
        name: _shares(rows[name]["accepted_at"], counts, shown) for name, counts in drafted.items()
    }
    return Figure(
        title="Acceptance by position in the draft",
        style="lines",
        x="position in the draft",
        ticks=[str(at + 1) for at in range(shown)],
        unit="accepted, %",
        series=series,
        highlight=list(series),
        note=f"Share of the drafts that reach so far{cut}; forced tokens count as drafted.",
        **_measured(origin),
    )


def _shares(accepted: Sequence[int], drafted: Sequence[int], shown: int) -> list[float | None]:
    shares: list[float | None] = [None] * shown
    for at, count in enumerate(drafted[:shown]):
        shares[at] = round(100 * (accepted[at] if at < len(accepted) else 0) / count, 2)
    return shares


def _measured(origin: Origin) -> dict[str, Any]:
    found = origin._asdict()
    return {"commands": [found.pop("command")], **found}
