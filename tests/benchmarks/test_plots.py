"""The plots of the pages are drawn from their figures, and carry them."""

from __future__ import annotations

import dataclasses
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.plots import draw_all, main, read_figure
from guided_spec.errors import ConfigError
from guided_spec.evaluate.plots import Figure, draw

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
FIGURE = Figure(
    title="Speed",
    style="bars",
    x="requests",
    ticks=["1", "8"],
    unit="tokens/s",
    series={"plain": [1.5, 7.0], "drafted": [3.0, 11.0]},
    highlight=["drafted"],
    note="A toy.",
    commands=["python -m toy"],
    machine="none",
    versions="none",
    date="2026-11-23",
)


def texts(path: Path) -> set[str]:
    return {(element.text or "").strip() for element in ET.parse(path).iter()}


def description(path: Path) -> Any:
    (element,) = ET.parse(path).iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(element.text or "")


def test_every_plot_is_drawn_from_its_figure(tmp_path: Path) -> None:
    plots = draw_all(FIGURES, tmp_path)
    assert [plot.name for plot in plots] == sorted(path.name for path in FIGURES.glob("*.svg"))
    for plot in plots:
        figure = read_figure(FIGURES / f"{plot.stem}.json")
        assert description(plot) == dataclasses.asdict(figure)
        assert {figure.title, *figure.series} <= texts(plot)
        assert description(FIGURES / plot.name) == description(plot), "draw docs/figures again"


@pytest.mark.parametrize("style", ["bars", "lines"])
def test_a_plot_shows_all_of_its_figure(style: Any, tmp_path: Path) -> None:
    figure = dataclasses.replace(FIGURE, style=style)
    path, again = tmp_path / "speed.svg", tmp_path / "again.svg"
    draw(figure, path)
    draw(figure, again)
    assert {"Speed", "plain", "drafted", "tokens/s", "A toy."} <= texts(path)
    assert style == "lines" or {"1.5", "11", "requests: 8"} <= texts(path)
    assert path.read_bytes() == again.read_bytes()


def test_a_bar_that_was_not_measured_has_no_number(tmp_path: Path) -> None:
    path = tmp_path / "speed.svg"
    draw(dataclasses.replace(FIGURE, series={"plain": [1.5, None], "drafted": [3.0, 11.0]}), path)
    assert {"plain", "1.5", "3", "11"} <= texts(path)
    assert "None" not in texts(path)
    empty = dataclasses.replace(FIGURE, series={"plain": [None, 2.0]}, highlight=[])
    draw(empty, path)


@pytest.mark.parametrize(
    "change",
    [{"series": {"plain": [1.0]}}, {"style": "pie"}, {"highlight": ["fast"]}, {"colour": "red"}],
)
def test_what_is_no_figure_is_refused_by_its_file(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(dataclasses.asdict(FIGURE) | change))
    with pytest.raises(ConfigError, match=r"speed\.json"):
        read_figure(path)


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"guided-spec\[plots\]"):
        draw(FIGURE, tmp_path / "speed.svg")


def test_the_command_names_what_it_drew(tmp_path: Path) -> None:
    app = Typer()
    app.command()(main)
    assert CliRunner().invoke(app, [str(tmp_path)]).exit_code == 1
    (tmp_path / "speed.json").write_text(json.dumps(dataclasses.asdict(FIGURE)))
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout.strip().endswith("speed.svg")
