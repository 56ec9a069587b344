"""Traces as one page of HTML that needs nothing else: no network, no fonts, no libraries.

Its plots are bars, drawn by the style sheet, with their figures as a table.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import zip_longest
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.trace.record import FORCED, StepTrace, TokenTrace, Trace

if TYPE_CHECKING:
    from PIL import Image

_THUMBNAIL = 160  # pixels, of the longer side
_MOST_TRACES = 2  # side by side, each in a colour of its own
_TITLE = "What speculation did, step by step"


def render_page(
    traces: Sequence[Trace],
    *,
    title: str = _TITLE,
    prompt: str = "",
    pictures: Sequence[Image.Image] = (),
) -> str:
    """A page with every step of one trace, or of two side by side.

    prompt: to show; "" shows none. pictures: of the prompt, PIL's in RGB, to show as thumbnails.

    Raises ConfigError for another number of traces.
    """
    if not 1 <= len(traces) <= _MOST_TRACES:
        fix = f"pass one trace, or {_MOST_TRACES} to compare"
        raise ConfigError("traces", f"{len(traces)} of them", fix)
    return Template(asset("page.html")).substitute(
        title=escape(title),
        style=asset("page.css"),
        script=asset("page.js"),
        prompt=_prompt(prompt, pictures),
        summary=summary(traces),
        plots="\n".join(_plots(traces)),
        legend=legend(),
        runs="\n".join(_run(number, trace) for number, trace in enumerate(traces)),
    )


def asset(name: str) -> str:
    """One of the files of the page: ``page.css``, ``page.js`` (keys and details), its template."""
    return (files("guided_spec") / "trace" / name).read_text(encoding="utf-8")


def _prompt(prompt: str, pictures: Sequence[Image.Image]) -> str:
    if not prompt and not pictures:
        return ""
    shown = "".join(_thumbnail(number, one) for number, one in enumerate(pictures, 1))
    return f"<details><summary>Prompt</summary>{shown}<pre>{escape(prompt)}</pre></details>"


def _thumbnail(number: int, picture: Image.Image) -> str:
    small, data = picture.copy(), io.BytesIO()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    small.save(data, "JPEG")
    source = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
    size = f"{picture.width} x {picture.height}"
    return f'<img alt="Picture {number}, {size}" title="{size}" src="{source}"> '


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
    """The proposer's, with line-break opportunities."""
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
    shares, growth, times = [], [], []
    for trace in traces:
        pairs = zip(trace.accepted_at(), trace.drafted_at(), strict=True)
        shares.append([_Bar(1.0, a / d, f"{a} of {d}") for a, d in pairs])
        ends = [(step, step.start + step.num_kept) for step in trace.steps]
        labels = [f"{end} tokens in {step.at * 1e3:.4g} ms" for step, end in ends]
        growth.append([_Bar(s.seconds, e, t) for (s, e), t in zip(ends, labels, strict=True)])
        times.append([_Bar(1.0, s.seconds, f"{s.seconds * 1e3:.4g} ms") for s in trace.steps])
    names = [trace.proposer for trace in traces]
    longest = max((bar.height for run in times for bar in run), default=0.0)
    most = max((bar.height for run in growth for bar in run), default=0.0)
    seconds = max((sum(bar.width for bar in run) for run in growth), default=0.0)
    positions, steps = (str(max(map(len, runs), default=0)) for runs in (shares, times))
    by_position = _Axes("1", "position in the draft", positions, "100 %")
    over_time = _Axes("0 ms", "time", f"{seconds * 1e3:.4g} ms", f"{most:.0f}")
    by_step = _Axes("1", "step", steps, f"{longest * 1e3:.3g} ms")
    return [
        _plot("Accepted share by draft position", by_position, names, shares, most=1.0),
        _plot("Tokens over time, a bar for each step", over_time, names, growth, column="step"),
        _plot("Time of each step", by_step, names, times),
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


class _Bar(NamedTuple):
    """One bar: its width and height relative to the others, and its row in the table."""

    width: float
    height: float
    label: str


class _Axes(NamedTuple):
    """The numbers at the ends of both axes: the lower end of the vertical one is 0."""

    first: str
    name: str
    last: str
    top: str


def _plot(
    title: str,
    axes: _Axes,
    names: Sequence[str],
    runs: Sequence[Sequence[_Bar]],
    *,
    most: float = 0.0,
    column: str = "",
) -> str:
    """A ``<figure>``: a strip of bars for each run, on common axes, and all of it as a table.

    most: the height of the plot; 0 for that of the highest bar. column: what numbers the rows of
    the table; "" for what the horizontal axis shows.
    """
    most = most or max((bar.height for run in runs for bar in run), default=0) or 1.0
    widest = max(sum(bar.width for bar in run) for run in runs) or 1.0
    strips = ""
    for number, run in enumerate(runs):
        rest = _Bar(widest - sum(bar.width for bar in run), 0.0, "")
        bars = "".join(
            f'<i style="flex-grow:{bar.width / widest:.5f};height:{bar.height / most:.1%}"></i>'
            for bar in (*run, rest)
        )
        ends = f'<span class="ends"><span>{axes.top}</span><span>0</span></span>'
        strips += f'<div class="strip">{ends}<div class="bars run-{number}">{bars}</div></div>'
    ends = "".join(f"<span>{end}</span>" for end in axes[:3])
    strips += f'<div class="strip"><span></span><div class="ends">{ends}</div></div>'
    heads = "".join(
        f'<th scope="col">{escape(name)}</th>' for name in (column or axes.name, *names)
    )
    rows = zip_longest(*([bar.label for bar in run] for run in runs), fillvalue="")
    body = "".join(
        f'<tr><th scope="row">{at}</th>{"".join(f"<td>{label}</td>" for label in row)}</tr>'
        for at, row in enumerate(rows, 1)
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    details = f'<details><summary>As a table</summary><div class="scroll">{table}</div></details>'
    image = f'<div role="img" aria-label="{escape(title)}">{strips}</div>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{image}{details}</figure>"


SIGNS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}
UNSEEN = re.compile("[ \n\t\r]")

LEGEND = (
    ("accepted", "drafted and accepted"),
    ("accepted forced", "forced by the grammar, and accepted"),
    ("rejected", "rejected by the target"),
    ("replacement", "what the target drew instead"),
    ("unused", "drafted after a rejected token"),
    ("bonus", "drawn after a draft that was accepted whole"),
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
            "outcome": token.outcome + (", after the end of the text" * shown.is_dropped),
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
    """The tokens of a step, the drawn one right after what was accepted or rejected."""
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
