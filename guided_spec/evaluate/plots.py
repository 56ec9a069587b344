"""The plots of reports: of ``guided-spec bench``, ``guided-spec eval`` and a training's log."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.evaluate.figure import Figure, draw

__all__ = ["Origin", "acceptance_figures", "bench_figures", "draw_all", "training_figures"]

MOST_POSITIONS = 16
BASELINES = ("none", "transformers")
PACKAGES = ("guided-spec", "torch", "transformers", "xgrammar")
Report = Sequence[Mapping[str, Any]]


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

    Raises ConfigError, naming the option, where the folder cannot be made, and where matplotlib is
    missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"must be a folder that can be written to ({error.strerror})"
        raise ConfigError(option, str(folder), fix) from error
    paths = {folder / f"{name}{suffix}": figure for name, figure in figures.items()}
    for path, figure in paths.items():
        draw(figure, path)
    return [*paths]


def acceptance_figures(report: Report, origin: Origin) -> dict[str, Figure]:
    """By file name; report: rows of ``guided-spec eval --output``."""
    named = {
        f"{row['proposer']}, {row['source']}{', with grammars' if row['grammars'] else ''}": row
        for row in report
    }
    figure = _acceptance(named, origin)
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
        rows = {_name(report, at): row for at, row in enumerate(report)}
        figures = {
            "tokens_per_second": _speed(rows, origin),
            "acceptance_by_position": _acceptance(rows, origin),
            "mask_cost": _masks(rows, origin),
        }
    except (KeyError, TypeError) as error:
        fix = f"must be what guided-spec bench --output wrote ({type(error).__name__}: {error})"
        raise ConfigError("report", report, fix) from error
    return {name: figure for name, figure in figures.items() if figure is not None}


def _name(report: Report, at: int) -> str:
    """Of one row; a proposer that was measured twice gets its number."""
    name: str = report[at]["name"]
    before = sum(row["name"] == name for row in report[:at])
    return f"{name} ({before + 1})" if before else name


def _speed(rows: Mapping[str, Any], origin: Origin) -> Figure | None:
    values = {name: round(row["tokens_per_second"], 1) for name, row in rows.items()}
    note = "Output tokens by wall time, prompts and drafts included."
    return _bars("Tokens per second", "tokens/s", values, note, origin)


def _masks(rows: Mapping[str, Any], origin: Origin) -> Figure | None:
    costs = {name: row["mask_microseconds"] for name, row in rows.items()}
    values = {name: round(cost, 1) for name, cost in costs.items() if cost is not None}
    note = "Host time; where the target runs on a GPU, most of it passes beside its forward."
    return _bars("What masks cost", "µs per output token", values, note, origin)


def _bars(
    title: str, unit: str, values: Mapping[str, float], note: str, origin: Origin
) -> Figure | None:
    if not any(values.values()):
        return None
    return Figure(
        title=title,
        style="bars",
        x="",
        ticks=[""],
        unit=unit,
        series={name: [value] for name, value in values.items()},
        highlight=[name for name in values if name not in BASELINES],
        note=note,
        **_measured(origin),
    )


def _acceptance(rows: Mapping[str, Any], origin: Origin) -> Figure | None:
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
