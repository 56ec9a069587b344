"""Traces as one page of HTML that needs nothing else: no network, no fonts, no libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from guided_spec.errors import ConfigError
from guided_spec.trace.plots import Bars, Curve, bar_plot, curve_plot
from guided_spec.trace.record import FORCED, Trace
from guided_spec.trace.steps import StepMarkup, legend

__all__ = ["asset", "render_page", "summary"]

MOST_TRACES = 2  # side by side, each in a colour of its own
TITLE = "What speculation did, step by step"


def render_page(traces: Sequence[Trace], *, title: str = TITLE, prompt: str = "") -> str:
    """A page with every step of one trace, or of two side by side.

    prompt: to show; "" shows none.

    Raises ConfigError for another number of traces.
    """
    if not 1 <= len(traces) <= MOST_TRACES:
        fix = f"pass one trace, or {MOST_TRACES} to compare"
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
        bars.append(Bars(trace.proposer, [a / d for a, d in pairs], labels))
        ends = [(s.at * 1e3, float(s.start + s.num_kept)) for s in trace.steps]
        growth.append(Curve(trace.proposer, [(0.0, 0.0), *ends]))
        spent = [(float(n), s.seconds * 1e3) for n, s in enumerate(trace.steps, 1)]
        steps.append(Curve(trace.proposer, spent))
    return [
        bar_plot("Accepted share by draft position", "position in the draft", bars),
        curve_plot("Text over time", "milliseconds", "tokens", growth),
        curve_plot("Time of each step", "step", "milliseconds", steps),
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
