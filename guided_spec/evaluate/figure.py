"""One plot of measured figures, with all that a reader has to know of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from guided_spec.errors import ConfigError

__all__ = ["Figure", "draw", "read_figure", "require_matplotlib", "write_figure"]

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
        Lines have the colour of what stands before the first comma of their names.
    highlight: the series in colour among bars, and solid among lines.
    note: what a reader has to know to read it right; it stands in the plot.
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


def read_figure(path: Path) -> Figure:
    """The figure in a JSON file, as ``write_figure`` wrote it.

    Raises ConfigError, with the file's name, when it holds no figure.
    """
    try:
        return Figure(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(Figure))
        raise ConfigError("figure", path.name, f"{error}; its keys are {names}") from error


def write_figure(figure: Figure, path: Path, suffix: str = ".svg") -> Path:
    """Write the figure to ``path``, as JSON, and its plot beside it; returns where that is.

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
        canvas = _bars(figure) if figure.style == "bars" else _lines(figure)
        canvas.suptitle(figure.title, fontweight="bold")
        canvas.supxlabel(figure.note, fontsize=8, color=TEXT)
        description = json.dumps(dataclasses.asdict(figure), ensure_ascii=False)
        metadata: dict[str, Any] = {"Title": figure.title, "Description": description}
        if path.suffix == ".svg":
            metadata["Date"] = None  # it would be that of the drawing
        canvas.savefig(path, metadata=metadata)


def _bars(figure: Figure) -> Any:
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


def _lines(figure: Figure) -> Any:
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
