"""The plots of a ``guided-spec bench`` report: speed, acceptance by position, and mask cost."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.evaluate.figure import Figure, draw

__all__ = ["Origin", "bench_figures", "draw_bench"]

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


def draw_bench(report: Report, folder: Path, origin: Origin) -> list[Path]:
    """Write the plots of ``bench_figures`` to ``folder``, as SVG; returns where they are.

    Raises ConfigError where matplotlib is missing, or the folder cannot be made.
    """
    figures = bench_figures(report, origin)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"must be a folder that can be written to ({error.strerror})"
        raise ConfigError("--plot", str(folder), fix) from error
    for name, figure in figures.items():
        draw(figure, folder / f"{name}.svg")
    return [folder / f"{name}.svg" for name in figures]


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
