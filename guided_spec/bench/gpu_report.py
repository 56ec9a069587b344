"""Tables of what ``guided-spec bench gpu`` measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Column, Table

from guided_spec.bench.gpu_end_to_end import DocumentRun
from guided_spec.bench.gpu_plugins import PluginRun
from guided_spec.bench.gpu_steps import StepTime

__all__ = ["document_table", "plugin_table", "step_table"]


def step_table(times: Sequence[StepTime]) -> Table:
    """A cell holds the figure without a grammar and the one with it; then what the medians say."""
    heads = ("median ms", "p90 ms", "mean ms", "tokens/step", "drafted/step", "grammar", "problem")
    first = Column("proposer", no_wrap=True)
    table = Table(first, "requests", "T", *heads, caption="figures: off → on")
    pairs: dict[tuple[str, int, float], dict[bool, StepTime]] = {}
    for time in times:
        key = (time.proposer, time.batch, time.temperature)
        pairs.setdefault(key, {})[time.grammar] = time
    for (proposer, batch, temperature), pair in pairs.items():
        off, on = _figures(pair.get(False)), _figures(pair.get(True))
        cells = [f"{a} → {b}" if a or b else "" for a, b in zip(off, on, strict=True)]
        problems = {time.problem for time in pair.values() if time.problem}
        ends = (_overhead(pair), "; ".join(sorted(problems)))
        table.add_row(proposer, str(batch), f"{temperature:g}", *cells, *ends)
    return table


def document_table(runs: Sequence[DocumentRun]) -> Table:
    """One engine and workload a row."""
    heads = ("tokens/s", "tokens/forward", "drafted", "accepted", "valid", "same text", "failed")
    table = Table(Column("engine", no_wrap=True), "requests", "T", *heads, "problem")
    for run in runs:
        m = run.measurement
        figures: Iterable[str] = [""] * len(heads)
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
        place = (run.engine, str(run.batch), f"{run.temperature:g}")
        table.add_row(*place, *figures, run.problem or "")
    return table


def plugin_table(runs: Sequence[PluginRun]) -> Table:
    """One configuration and workload a row."""
    heads = ("tokens/s", "tokens/forward", "drafts", "drafted", "accepted", "a draft", "valid")
    table = Table(Column("engine", no_wrap=True), "requests", "T", *heads, "finished", "problem")
    for run in runs:
        m, length = run.run.measurement, run.mean_draft_length
        figures: Iterable[str] = [""] * (len(heads) + 1)
        if m is not None:
            figures = (
                f"{m.tokens_per_second:.0f}",
                f"{m.acceptance_length:.2f}",
                str(run.drafts),
                str(m.drafted),
                str(m.accepted),
                "" if length is None else f"{length:.2f}",
                f"{m.valid:.0%}",
                f"{run.finished} of {m.requests}",
            )
        place = (run.run.engine, str(run.run.batch), f"{run.run.temperature:g}")
        table.add_row(*place, *figures, run.run.problem or "")
    return table


def _figures(time: StepTime | None) -> list[str]:
    if time is None:
        return [""] * 5
    values = (time.median_ms, time.p90_ms, time.mean_ms, time.tokens, time.drafted)
    return ["" if value is None else f"{value:.2f}" for value in values]


def _overhead(pair: dict[bool, StepTime]) -> str:
    off, on = (pair[g].median_ms if g in pair else None for g in (False, True))
    return "" if not off or on is None else f"{on / off - 1:+.1%}"
