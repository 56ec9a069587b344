"""Tables of what ``guided-spec bench gpu`` measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.table import Column, Table

from guided_spec.bench.gpu_end_to_end import DocumentRun
from guided_spec.bench.gpu_plugins import PluginRun
from guided_spec.bench.gpu_steps import StepTime

__all__ = ["document_table", "plugin_table", "step_table"]


def step_table(times: Sequence[StepTime]) -> Table:
    """A cell holds the figure without a grammar above the one with it; then what medians say."""
    heads = ("median\nms", "p90\nms", "mean\nms", "tokens\n/step", "drafted\n/step", "grammar")
    table = _table("proposer", *heads)
    pairs: dict[tuple[str, int, float], dict[bool, StepTime]] = {}
    for time in times:
        key = (time.proposer, time.batch, time.temperature)
        pairs.setdefault(key, {})[time.grammar] = time
    for key, pair in pairs.items():
        figures = zip(_figures(pair.get(False)), _figures(pair.get(True)), strict=True)
        cells = [f"{off}\n{on}" for off, on in figures]
        problems = sorted({time.problem for time in pair.values() if time.problem})
        _add_row(table, key, [*cells, _overhead(pair)], "; ".join(problems))
    return _with_caption(table, "figures: without a grammar, and with it below")


def document_table(runs: Sequence[DocumentRun]) -> Table:
    """One engine and workload a row."""
    heads = ("tokens\n/s", "tokens\n/forward", "drafted", "accepted", "valid", "same\ntext")
    table = _table("engine", *heads, "failed")
    for run in runs:
        m = run.measurement
        figures: Iterable[str] = ()
        if m is not None:
            figures = (
                f"{m.tokens_per_second:.0f}",
                f"{m.acceptance_length:.2f}",
                str(m.drafted),
                str(m.accepted),
                f"{m.valid:.0%}",
                f"{m.same_text:.0%}",
                str(m.failed),
            )
        _add_row(table, (run.engine, run.batch, run.temperature), figures, run.problem)
    return table


def plugin_table(runs: Sequence[PluginRun]) -> Table:
    """One configuration and workload a row."""
    heads = ("tokens\n/s", "tokens\n/forward", "drafts", "tokens\n/draft", "accepted", "valid")
    table = _table("engine", *heads, "finished")
    for run in runs:
        m, length = run.run.measurement, run.mean_draft_length
        figures: Iterable[str] = ()
        if m is not None:
            figures = (
                f"{m.tokens_per_second:.0f}",
                f"{m.acceptance_length:.2f}",
                str(run.drafts),
                "" if length is None else f"{length:.2f}",
                f"{m.accepted / m.drafted:.0%}" if m.drafted else "",
                f"{m.valid:.0%}",
                f"{run.finished}/{m.requests}",
            )
        key = (run.run.engine, run.run.batch, run.run.temperature)
        _add_row(table, key, figures, run.run.problem)
    return table


def _table(first: str, *heads: str) -> Table:
    """Within 80 columns."""
    columns = (Column(head, justify="right", no_wrap=True) for head in ("batch", "T", *heads))
    return Table(Column(first, overflow="fold"), *columns, box=SIMPLE, padding=0)


def _add_row(
    table: Table, key: tuple[str, int, float], figures: Iterable[str], problem: str | None
) -> None:
    """key: what was measured, how many requests together, at which temperature."""
    name, batch, temperature = key
    table.add_row(name, str(batch), f"{temperature:g}", *figures)
    if problem:
        _with_caption(table, f"{name}, {batch}, {temperature:g}: {problem}")


def _with_caption(table: Table, line: str) -> Table:
    table.caption = f"{table.caption}\n{line}" if table.caption else line
    table.caption_justify = "left"
    return table


def _figures(time: StepTime | None) -> list[str]:
    if time is None:
        return [""] * 5
    values = (time.median_ms, time.p90_ms, time.mean_ms, time.tokens, time.drafted)
    return ["" if value is None else f"{value:.2f}" for value in values]


def _overhead(pair: dict[bool, StepTime]) -> str:
    off, on = (pair[g].median_ms if g in pair else None for g in (False, True))
    return "" if not off or on is None else f"{on / off - 1:+.1%}"
