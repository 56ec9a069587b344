"""Traces as one page of HTML that needs nothing else: no network, no fonts, no libraries.

Its plots are inline SVG, coloured by the style sheet, with their figures as a table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.trace.record import FORCED, StepTrace, TokenTrace, Trace

__all__ = ["SIGNS", "StepMarkup", "asset", "legend", "render_page", "summary"]

_MOST_TRACES = 2  # side by side, each in a colour of its own
_TITLE = "What speculation did, step by step"

_WIDTH, _HEIGHT = 360, 200  # of a plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 10, 36  # of its axes


def render_page(traces: Sequence[Trace], *, title: str = _TITLE, prompt: str = "") -> str:
    """A page with every step of one trace, or of two side by side.

    prompt: to show; "" shows none.

    Raises ConfigError for another number of traces.
    """
    if not 1 <= len(traces) <= _MOST_TRACES:
        fix = f"pass one trace, or {_MOST_TRACES} to compare"
        raise ConfigError("traces", f"{len(traces)} of them", fix)
    return Template(asset("page.html")).substitute(
        title=escape(title),
        style=asset("page.css"),
        script=asset("page.js"),
        prompt=_prompt(prompt),
        summary=summary(traces),
        plots="\n".join(_plots(traces)),
        legend=legend(),
        runs="\n".join(_run(number, trace) for number, trace in enumerate(traces)),
    )


def asset(name: str) -> str:
    """One of the files of the page: ``page.css``, ``page.js`` (keys and details), its template."""
    return (files("guided_spec") / "trace" / name).read_text(encoding="utf-8")


def _prompt(prompt: str) -> str:
    if not prompt:
        return ""
    return f"<details><summary>Prompt</summary><pre>{escape(prompt)}</pre></details>"


def summary(traces: Sequence[Trace]) -> str:
    """A table of their figures, a column for each."""
    heads = [
        f'<th scope="col" class="run-{number}"><span class="dot"></span> {_name(t)}</th>'
        for number, t in enumerate(traces)
    ]
    columns = [_figures(trace) for trace in traces]
    rows = [
        f'<tr><th scope="row">{name}</th>'
        + "".join(f"<td>{escape(column[name])}</td>" for column in columns)
        + "</tr>"
        for name in columns[0]
    ]
    return (
        f"<table><thead><tr><td></td>{''.join(heads)}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _name(trace: Trace) -> str:
    """The proposer's, with places to break the line."""
    return re.sub("([:+])", r"\1<wbr>", escape(trace.proposer))


def _figures(trace: Trace) -> dict[str, str]:
    """What the summary says of one text."""
    tokens, steps, seconds = len(trace.token_ids), len(trace.steps), trace.seconds
    drafted, accepted = sum(trace.drafted_at()), sum(trace.accepted_at())
    forced = sum(token.source == FORCED for step in trace.steps for token in step.tokens)
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    return {
        "output tokens": str(tokens),
        "target forwards": str(steps),
        "tokens per forward": f"{tokens / steps:.2f}" if steps else "",
        "drafted tokens accepted": f"{accepted} of {drafted}{share}",
        "forced by the grammar": str(forced),
        "time, while traced": f"{seconds * 1e3:.1f} ms",
        "host time on masks": f"{sum(s.mask_seconds for s in trace.steps) * 1e3:.1f} ms",
        "temperature, verifier": f"{trace.temperature:g}, {trace.verifier}",
        "grammar": trace.grammar or "none",
        "finish reason": trace.finish_reason,
    }


def _plots(traces: Sequence[Trace]) -> list[str]:
    bars, growth, steps = [], [], []
    for trace in traces:
        pairs = list(zip(trace.accepted_at(), trace.drafted_at(), strict=True))
        labels = [f"{accepted} of {drafted}" for accepted, drafted in pairs]
        bars.append(_Bars(trace.proposer, [a / d for a, d in pairs], labels))
        ends = [(s.at * 1e3, float(s.start + s.num_kept)) for s in trace.steps]
        growth.append(_Curve(trace.proposer, [(0.0, 0.0), *ends]))
        spent = [(float(n), s.seconds * 1e3) for n, s in enumerate(trace.steps, 1)]
        steps.append(_Curve(trace.proposer, spent))
    return [
        _bar_plot("Accepted share by draft position", "position in the draft", bars),
        _curve_plot("Text over time", "milliseconds", "tokens", growth),
        _curve_plot("Time of each step", "step", "milliseconds", steps),
    ]


def _run(number: int, trace: Trace) -> str:
    """One trace on the page, the ``number``-th one."""
    label = f"run-{number}"
    markup = StepMarkup(number, trace.vocab_size, trace.stop_token_ids)
    steps = "".join(markup.step(at, step) for at, step in enumerate(trace.steps))
    return (
        f'<section class="run {label}" aria-labelledby="{label}">'
        f'<h3 id="{label}"><span class="dot"></span> {_name(trace)}</h3>'
        f"<pre>{escape(trace.text)}</pre>"
        f'<ol class="steps">{steps}</ol></section>'
    )


class _Bars(NamedTuple):
    """One run's bars: for each place a height between 0 and 1, and what a table says of it."""

    name: str
    heights: list[float]
    labels: list[str]


class _Curve(NamedTuple):
    """One run's points, from left to right."""

    name: str
    points: list[tuple[float, float]]


def _bar_plot(title: str, x: str, runs: Sequence[_Bars]) -> str:
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


def _curve_plot(title: str, x: str, y: str, runs: Sequence[_Curve]) -> str:
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
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.wide

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.high

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
            ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
            parts.append(f'<line class="grid" {ends}/>')
            parts.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
        parts += drawn
        low = _HEIGHT - _BOTTOM
        for value, text in xs:
            place = f'x="{self.x(value):.1f}" y="{low + 15}"'
            parts.append(f'<text {place} text-anchor="middle">{text}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(x)}</text>'
        )
        head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
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


SIGNS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}
UNSEEN = re.compile("[ \n\t\r]")

LEGEND = (
    ("accepted", "drafted and accepted"),
    ("accepted forced", "forced by the grammar, and accepted"),
    ("rejected", "rejected by the target"),
    ("replacement", "what the target drew in its place"),
    ("unused", "drafted behind a rejected token"),
    ("bonus", "drawn behind a draft that was accepted whole"),
)


def legend() -> str:
    """The kinds of tokens, as a list."""
    items = [
        f'<li><span class="chip {kind}" aria-hidden="true">abc</span>{words}</li>'
        for kind, words in LEGEND
    ]
    return f'<ul class="legend" aria-label="Kinds of tokens">{"".join(items)}</ul>'


class StepMarkup(NamedTuple):
    """How the steps of one text are shown: each an ``<li>``, whose ids are the page's own.

    run: number of the text on the page. vocab_size, stop_token_ids: see ``Trace``.
    """

    run: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]

    def step(self, number: int, step: StepTrace) -> str:
        """The ``number``-th step, from 0."""
        kept, requests = step.num_kept, step.num_requests
        head = [
            f"<strong>Step {number + 1}</strong>",
            f"{kept} token{'' if kept == 1 else 's'}",
            f"{step.seconds * 1e3:.1f} ms",
        ]
        if requests > 1:
            head.append(f"{requests} requests together")
        chips, place = [], ""
        for at, shown in enumerate(_shown(step)):
            name = f"{self.run}-{number}-{at}"
            is_new = shown.token.place not in (None, "", place)
            chips.append(self._chip(shown, name, shown.token.place if is_new else None))
            place = shown.token.place or place
        spans = "".join(f"<span>{part}</span>" for part in head)
        return (
            f'<li class="step"><p class="step-head">{spans}</p>'
            f'<ol class="chips">{"".join(chips)}</ol></li>'
        )

    def _chip(self, shown: _Shown, name: str, place: str | None) -> str:
        token = shown.token
        kinds: list[str] = [token.outcome]
        kinds += ["forced"] * (token.source == FORCED) + ["dropped"] * shown.is_dropped
        label = f"{', '.join(kinds)}: {token.text or self._unwritten(token)}"
        likely = "" if token.target_prob is None else f' style="--likely:{token.target_prob:.3f}"'
        where = "" if place is None else f'<span class="place">{escape(place)}</span>'
        return (
            f'<li>{where}<button type="button" class="chip {" ".join(kinds)}"{likely} '
            f'aria-label="{escape(label)}" aria-describedby="tip-{name}">{self._text(token)}'
            f'</button><div class="tip" role="tooltip" id="tip-{name}">'
            f"<dl>{self._details(shown)}</dl></div></li>"
        )

    def _text(self, token: TokenTrace) -> str:
        """What a chip shows, white space by signs."""
        if not token.text:
            return f'<span class="unseen">{self._unwritten(token)}</span>'
        return UNSEEN.sub(
            lambda found: f'<span class="unseen">{SIGNS[found[0]]}</span>', escape(token.text)
        )

    def _unwritten(self, token: TokenTrace) -> str:
        return "end" if token.id in self.stop_token_ids else f"#{token.id}"

    def _details(self, shown: _Shown) -> str:
        token, vocab_size = shown.token, self.vocab_size
        rows = {
            "token": f"{token.text!r}, id {token.id}",
            "output position": str(shown.position),
            "by": "the grammar" if token.source == FORCED else token.source,
            "outcome": token.outcome + (", behind the end of the text" * shown.is_dropped),
            "draft probability": _percent(token.draft_prob),
            "target probability": _percent(token.target_prob),
            "with temperature, filters": _percent(token.processed_prob),
        }
        if token.allowed is not None:
            rows["allowed tokens"] = f"{token.allowed:,} of {vocab_size:,}"
        if token.place is not None:
            rows["place in the JSON"] = token.place or "the whole text"
        return "".join(
            f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in rows.items() if value
        )


class _Shown(NamedTuple):
    """A token of a step as the page shows it. position: in the output. is_dropped: not in it."""

    token: TokenTrace
    position: int
    is_dropped: bool


def _shown(step: StepTrace) -> list[_Shown]:
    """The tokens of a step, the drawn one right behind what was accepted or rejected."""
    num_accepted = sum(token.outcome == "accepted" for token in step.drafted)
    drafted = [
        _Shown(token, step.start + at, step.num_kept <= at < num_accepted)
        for at, token in enumerate(step.drafted)
    ]
    if step.drawn is None:
        return drafted
    drawn = _Shown(step.drawn, step.start + num_accepted, step.num_kept <= num_accepted)
    split = num_accepted + 1
    return [*drafted[:split], drawn, *drafted[split:]]


def _percent(probability: float | None) -> str:
    if probability is None:
        return ""
    percent = 100 * probability
    return f"{percent:.2f} %" if percent >= 0.01 or percent == 0 else f"{percent:.1e} %"
