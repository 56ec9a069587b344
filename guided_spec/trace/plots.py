"""Small plots as inline SVG, coloured by the page's style sheet, with their figures as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Bars", "Curve", "bar_plot", "curve_plot"]

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 36


class Bars(NamedTuple):
    """One run's bars: for each place a height between 0 and 1, and what a table says of it."""

    name: str
    heights: list[float]
    labels: list[str]


class Curve(NamedTuple):
    """One run's points, from left to right."""

    name: str
    points: list[tuple[float, float]]


def bar_plot(title: str, x: str, runs: Sequence[Bars]) -> str:
    """A ``<figure>``: shares by place, the runs' bars side by side."""
    places = max((len(run.heights) for run in runs), default=0)
    frame = _Frame(max(places, 1), 1.0)
    width = 0.8 / len(runs)
    drawn = []
    for number, run in enumerate(runs):
        for place, height in enumerate(run.heights):
            left = frame.x(place + 0.1 + number * width)
            size = frame.x(place + 0.1 + (number + 1) * width) - left
            top = frame.y(height)
            box = f'x="{left:.1f}" y="{top:.1f}" width="{size:.1f}" height="{frame.y(0) - top:.1f}"'
            drawn.append(f'<rect class="bar run-{number}" {box}/>')
    numbers = [(place + 0.5, str(place + 1)) for place in _thinned(places)]
    shares = [(share, f"{share:.0%}") for share in (0, 0.5, 1)]
    svg = frame.svg(title, x, drawn, numbers, shares)
    rows = [[str(at + 1), *(_at(run.labels, at) for run in runs)] for at in range(places)]
    return _figure(title, svg, [x, *(run.name for run in runs)], rows)


def curve_plot(title: str, x: str, y: str, runs: Sequence[Curve]) -> str:
    """A ``<figure>``: a line with points for each run, from 0 on both axes."""
    points = [point for run in runs for point in run.points]
    frame = _Frame(
        max((x for x, _ in points), default=0) or 1, max((y for _, y in points), default=0) or 1
    )
    drawn = []
    for number, run in enumerate(runs):
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in run.points)
        dots = "".join(
            f'<circle class="point" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5"/>'
            for x, y in run.points
        )
        line = f'<polyline class="curve" points="{path}"/>'
        drawn.append(f'<g class="run-{number}">{line}{dots}</g>')
    xs, ys = ([(tick, f"{tick:g}") for tick in _ticks(most)] for most in (frame.wide, frame.high))
    svg = frame.svg(title, x, drawn, xs, ys)
    rows = [[run.name, f"{at:.4g}", f"{value:.4g}"] for run in runs for at, value in run.points]
    return _figure(f"{title}, {y}", svg, ["proposer", x, y], rows)


class _Frame(NamedTuple):
    """The axes: what stands at the right end, and at the top."""

    wide: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.wide

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.high

    def svg(
        self,
        title: str,
        x: str,
        drawn: Sequence[str],
        xs: Sequence[tuple[float, str]],
        ys: Sequence[tuple[float, str]],
    ) -> str:
        """What is drawn, with ticks and the name of the lower axis."""
        parts = []
        for value, text in ys:
            at = self.y(value)
            ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
            parts.append(f'<line class="grid" {ends}/>')
            parts.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
        parts += drawn
        low = HEIGHT - BOTTOM
        for value, text in xs:
            place = f'x="{self.x(value):.1f}" y="{low + 15}"'
            parts.append(f'<text {place} text-anchor="middle">{text}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x)}</text>')
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        return head + "".join(parts) + "</svg>"


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at most ``most``: three to six of them."""
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(unit * part for part in (0.2, 0.5, 1, 2) if most / (unit * part) < 6)
    return [number * step for number in range(int(most / step + 1e-9) + 1)]


def _thinned(places: int) -> range:
    """At most a dozen of them, so that their numbers do not touch."""
    return range(0, places, max(1, math.ceil(places / 12)))


def _at(labels: Sequence[str], place: int) -> str:
    return labels[place] if place < len(labels) else ""


def _figure(title: str, svg: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
    details = f'<details><summary>As a table</summary><div class="scroll">{table}</div></details>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{details}</figure>"
