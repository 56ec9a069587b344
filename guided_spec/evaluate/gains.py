"""What a proposer gains by task, as tables of Markdown: of ``guided-spec bench --tasks``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from guided_spec.evaluate.kinds import KindCount
from guided_spec.evaluate.measurement import Measurement
from guided_spec.evaluate.plots import Origin

PLAIN = "none"


class _Row(NamedTuple):
    """What a row of the first table is of."""

    proposer: str
    temperature: float
    batch_size: int


def gains_markdown(found: Sequence[Measurement], model: str, origin: Origin) -> str:
    """Two tables: a row a proposer, and a row for each of its tasks.

    found: of one model, those of ``none`` among them, to which speeds are compared. model: its
    name. In the first table a cell is the speed over plain decoding and the tokens a forward; in
    the second, shares of drafts are those that were accepted, by kind of token.
    """
    parts = [f"Model: {model}. {origin.machine}; {origin.versions}; {origin.date}."]
    parts += [f"`{origin.command}`", _gains(found), _details(found)]
    return "\n\n".join(parts) + "\n"


def _gains(found: Sequence[Measurement]) -> str:
    tasks = list(dict.fromkeys(one.task for one in found))
    rows: dict[_Row, dict[str, Measurement]] = {}
    for one in found:
        key = _Row(label(one), one.temperature, one.batch_size)
        rows.setdefault(key, {})[one.task] = one
    lines = []
    for row, cells in rows.items():
        plain = rows.get(row._replace(proposer=PLAIN), {})
        shown = [_gain(cells.get(task), plain.get(task)) for task in tasks]
        lines.append([f"`{row.proposer}`", f"{row.temperature:g}", str(row.batch_size), *shown])
    heads = ["proposer", "temperature", "requests at a time", *(task or "all" for task in tasks)]
    return _table(heads, lines, left=1)


def _gain(one: Measurement | None, plain: Measurement | None) -> str:
    if one is None:
        return ""
    length = f"({one.acceptance_length:.2f})"
    if plain is None or not plain.tokens_per_second:
        return length
    return f"{one.tokens_per_second / plain.tokens_per_second:.2f} {length}"


def _details(found: Sequence[Measurement]) -> str:
    heads = ["task", "temperature", "requests", "proposer", "tokens/s", "tokens/forward"]
    heads += ["drafts accepted", "forced", "constrained", "free", "written forced", "valid", "same"]
    heads += ["failed"]
    lines = []
    for one in found:
        kinds = one.kinds
        by_kind = [""] * 4
        if kinds is not None:
            by_kind = [_accepted(kind) for kind in kinds]
            written = sum(kind.written for kind in kinds)
            by_kind.append(_share(kinds.forced.written, written))
        lines.append(
            [
                *(one.task, f"{one.temperature:g}", str(one.batch_size), f"`{label(one)}`"),
                *(f"{one.tokens_per_second:.0f}", f"{one.acceptance_length:.2f}"),
                _share(one.accepted, one.drafted),
                *by_kind,
                *(one.percent_valid, f"{one.same_text:.0%}", str(one.failed)),
            ]
        )
    return _table(heads, lines, left=4)


def label(one: Measurement) -> str:
    """The proposer, and the folder of a draft of its own."""
    return f"{one.name}={Path(one.draft).name}" if one.draft else one.name


def _accepted(kind: KindCount) -> str:
    return _share(kind.accepted, kind.drafted)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], *, left: int) -> str:
    """left: columns, from the first on, that are text."""
    rule = ["---" if at < left else "---:" for at in range(len(heads))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines))
