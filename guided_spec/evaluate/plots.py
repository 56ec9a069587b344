"""The plots of reports: of ``guided-spec bench``, ``guided-spec eval`` and a training's log.

A ``Figure`` is one plot of measured figures, with all that a reader has to know of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from guided_spec.errors import ConfigError, reason_of

GREY, TEXT = "#b8c1cc", "#52606d"
COLOURS = (
    *("#7b8794", "#2f7ed8", "#d64545", "#3a9d5d"),
    *("#8e5ea2", "#d99a00", "#1599a8", "#a0522d"),
)
STYLE: Any = {  # matplotlib types its keys as a literal of all of them
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "guided_spec",  # the same file every time
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one plot shows, and where its numbers are from.

    style: "bars" draws a panel for each tick, with an axis of its own; "lines" joins the ticks.
    ticks: what is varied, such as the numbers of requests. unit: of the values.
    series: for each name as many values as there are ticks; None is a gap, nothing was measured.
        Lines have the colour of the part of their names before the first comma.
    highlight: the series in colour among bars, and solid among lines.
    note: what a reader has to know to read it right; the plot shows it.
    commands, machine, versions, date: how the values were measured.
    """

    title: str
    style: Literal["bars", "lines"]
    x: str
    ticks: list[str]
    unit: str
    series: Mapping[str, Sequence[float | None]]
    highlight: list[str]
    note: str
    commands: list[str]
    machine: str
    versions: str
    date: str

    def __post_init__(self) -> None:
        if self.style not in ("bars", "lines"):
            raise ConfigError("style", self.style, "must be 'bars' or 'lines'")
        for name, values in self.series.items():
            if len(values) != len(self.ticks):
                fix = f"{name!r} has {len(values)} values; give one for each of {self.ticks}"
                raise ConfigError("series", values, fix)
        if unknown := set(self.highlight) - set(self.series):
            raise ConfigError("highlight", sorted(unknown), f"choose of {list(self.series)}")


def require_matplotlib(argument: str, value: str) -> None:
    """Raise ConfigError, naming what asks for plots, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        fix = "drawing it needs matplotlib: pip install 'guided-spec[plots]'"
        raise ConfigError(argument, value, fix)


def write_figure(figure: Figure, path: Path, suffix: str = ".svg") -> Path:
    """Write the figure to ``path``, as JSON, and its plot next to it; returns the plot's path.

    suffix: of the plot, and so its format.
    """
    text = json.dumps(dataclasses.asdict(figure), indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    plot = path.with_suffix(suffix)
    draw(figure, plot)
    return plot


def draw(figure: Figure, path: Path) -> None:
    """Write the plot to ``path``, SVG or PNG, which carries the whole figure in its description."""
    require_matplotlib("figure", figure.title)
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        canvas = _draw_bars(figure) if figure.style == "bars" else _draw_lines(figure)
        canvas.suptitle(figure.title, fontweight="bold")
        canvas.supxlabel(figure.note, fontsize=8, color=TEXT)
        description = json.dumps(dataclasses.asdict(figure), ensure_ascii=False)
        metadata: dict[str, Any] = {"Title": figure.title, "Description": description}
        if path.suffix == ".svg":
            metadata["Date"] = None  # it would be that of the drawing
        canvas.savefig(path, metadata=metadata)


def _draw_bars(figure: Figure) -> Any:
    names = list(figure.series)
    colours = [COLOURS[1] if name in figure.highlight else GREY for name in names]
    canvas, panels = _panels(len(figure.ticks), 1.3 + 0.3 * len(names))
    for index, (panel, tick) in enumerate(zip(panels, figure.ticks, strict=True)):
        values = [figure.series[name][index] for name in names]
        lengths = [value or 0.0 for value in values]
        bars = panel.barh(names, lengths, color=colours)
        labels = ["" if value is None else f"{value:g}" for value in values]
        panel.bar_label(bars, labels=labels, padding=3)
        panel.set_xlim(0, 1.25 * (max(lengths) or 1.0))
        panel.set_title(f"{figure.x}: {tick}" if tick else "", fontsize=10)
        panel.set_xlabel(figure.unit)
        panel.tick_params(left=False, labelleft=index == 0)
        panel.invert_yaxis()
    return canvas


def _draw_lines(figure: Figure) -> Any:
    canvas, (panel,) = _panels(1, 3.4)
    groups = list(dict.fromkeys(name.partition(",")[0] for name in figure.series))
    for name, values in figure.series.items():
        colour = COLOURS[groups.index(name.partition(",")[0]) % len(COLOURS)]
        dashes = "-" if name in figure.highlight else "--"
        panel.plot(figure.ticks, values, dashes, color=colour, marker="o", markersize=4, label=name)
    panel.set_ylim(bottom=0)
    panel.set_xlabel(figure.x)
    panel.set_ylabel(figure.unit)
    panel.grid(visible=True, axis="y", color="#e4e7eb")
    panel.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


def _panels(count: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    canvas = Canvas(figsize=(9, height), layout=layout)
    panels = canvas.subplots(1, count, squeeze=False)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return canvas, panels


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
        """The origin of figures that ``command`` measures on this machine today."""
        found = ((name, _version(name)) for name in PACKAGES)
        versions = ", ".join(f"{name} {version}" for name, version in found)
        machine = f"{platform.processor() or platform.machine()}, {platform.system()}"
        return cls(command, machine, versions, datetime.date.today().isoformat())


def _version(package: str) -> str:
    """What is installed; a clone on the path is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def draw_all(
    figures: Mapping[str, Figure], folder: Path, *, option: str = "--plot", suffix: str = ".svg"
) -> list[Path]:
    """Write ``figures`` by their names to ``folder``; returns where they are.

    Next to each is its figure as JSON, from which ``draw`` makes it again. Raises ConfigError,
    naming the option, where the folder cannot be made, and where matplotlib is missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"must be a folder that can be written to ({reason_of(error)})"
        raise ConfigError(option, str(folder), fix) from error
    return [
        write_figure(figure, folder / f"{name}.json", suffix) for name, figure in figures.items()
    ]


def acceptance_figures(report: Report, origin: Origin) -> dict[str, Figure]:
    """Figures by file name; report: rows of ``guided-spec eval --output``."""
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
    """Figures by file name: the loss and the acceptance of a run, by step.

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
    """Means of what was logged in the steps up to each of ``ends``; None where nothing was."""
    found: list[float | None] = []
    for before, end in zip([-1, *ends], ends, strict=False):
        values = [line[key] for line in lines if key in line and before < line["step"] <= end]
        found.append(sum(values) / len(values) if values else None)
    return found


def bench_figures(report: Report, origin: Origin) -> dict[str, Figure]:
    """Figures by file name; none for what was not measured.

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
    "Host time. With the target on a GPU, most of it overlaps with its forward.",
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
