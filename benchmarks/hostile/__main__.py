"""Our server under normal and hostile clients, by turns: ``python -m benchmarks.hostile``.

Rounds with hostile clients alternate with rounds of the same traffic without them. The exit code
says whether every small request was answered with what it asked for, and every hostile one as it
should be; with ``--most-slowdown`` also whether small ones waited no longer. What the server's
processes hold behind each round is printed, not judged.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from benchmarks.hostile.clients import HOSTILE, Clients, Outcome
from benchmarks.serving.servers import DEFAULT, Subject, served
from benchmarks.serving.traffic import Pattern
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, print_table, stderr

_MEGABYTE = 2**20
_REST_SECONDS = 8.0  # behind each round: what was left alone ends

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


class Held(NamedTuple):
    """What the server and all its processes hold: resident bytes, and file descriptors."""

    bytes: int
    descriptors: int


class Round(NamedTuple):
    """One of them, and what was held behind it."""

    is_hostile: bool
    outcomes: list[Outcome]
    held: Held


@app.command()
def hostile(
    requests: Annotated[int, typer.Option(help="Of all rounds.")] = 5000,
    rounds: Annotated[int, typer.Option(help="Without and with hostile ones, by turns.")] = 10,
    request_rate: Annotated[float, typer.Option(help="A second.")] = 8.0,
    hostile_share: Annotated[float, typer.Option(help="In every second round.")] = 0.02,
    cancelled_share: Annotated[float, typer.Option(help="Of the others.")] = 0.2,
    output_len: Annotated[int, typer.Option(help="Tokens of a small answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    seed: Annotated[int, typer.Option()] = 0,
    server: Annotated[str, typer.Option(help="A proposer, or a URL.")] = DEFAULT,
    model: Annotated[str | None, typer.Option(help="Folder; default: the bundled one.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder of a draft model or head.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    most_slowdown: Annotated[float | None, typer.Option(help="Of the p99 of small ones.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write all figures here as JSON.")] = None,
) -> None:
    """Send normal and hostile requests to a server, and judge how it serves the normal ones."""
    with failures_as_messages():
        subject = Subject(model or bundled_asset("target"), draft, device=device)
        pattern = Pattern(request_rate, max_tokens=output_len, temperature=temperature, seed=seed)
        found = list[Round]()
        with served(server, subject) as (url, pid):
            clients = Clients(url, seed, hostile_share, cancelled_share)
            for number in range(rounds):
                is_hostile = number % 2 == 1
                count = requests // rounds
                outcomes = asyncio.run(_round(clients, count, pattern, is_hostile=is_hostile))
                found.append(Round(is_hostile, outcomes, _held(pid)))
                _tell(found[-1], number)
        figures = _figures(found)
        if output is not None:
            output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        _print(figures)
        slowdown = figures["slowdown_p99"]
        too_slow = most_slowdown is not None and slowdown is not None and slowdown > most_slowdown
        if too_slow or figures["faults"]:
            raise typer.Exit(1)


async def _round(
    clients: Clients, count: int, pattern: Pattern, *, is_hostile: bool
) -> list[Outcome]:
    outcomes = await clients.send(count, pattern, is_hostile=is_hostile)
    await asyncio.sleep(_REST_SECONDS)
    return outcomes


def _held(pid: int | None) -> Held:
    """Of a process and all that it started; nothing where that is not known."""
    found = Held(0, 0)
    for one in [] if pid is None else _with_children(pid):
        with suppress(OSError, StopIteration, ValueError):
            folder = Path(f"/proc/{one}")
            lines = (folder / "status").read_text(encoding="ascii").splitlines()
            resident = next(line for line in lines if line.startswith("VmRSS:"))
            own = int(resident.split()[1]) * 1024
            found = Held(found.bytes + own, found.descriptors + len([*(folder / "fd").iterdir()]))
    return found


def _with_children(pid: int) -> list[int]:
    found, index = [pid], 0
    while index < len(found):
        with suppress(OSError):
            for task in Path(f"/proc/{found[index]}/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="ascii").split())
        index += 1
    return found


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """All figures. Seconds of small requests: p50 and p99 without and with hostile ones."""
    kinds = {False: "without", True: "with"}
    seconds: dict[str, list[float]] = {name: [] for name in kinds.values()}
    said: dict[str, Counter[str]] = {name: Counter() for name in HOSTILE}
    for one in rounds:
        for outcome in one.outcomes:
            if outcome.answer is not None and outcome.fault is None:
                seconds[kinds[one.is_hostile]].append(outcome.seconds)
            if outcome.kind in said:
                said[outcome.kind][outcome.said] += 1
    spread = {
        name: dict(zip(("p50", "p99", "max"), np.percentile(values, (50, 99, 100)), strict=True))
        for name, values in seconds.items()
        if values
    }
    both = [spread[name]["p99"] for name in kinds.values() if name in spread]
    return {
        "small": {name: len(values) for name, values in seconds.items()},
        "cancelled": sum(o.kind == "cancelled" for one in rounds for o in one.outcomes),
        "hostile": {name: dict(counts) for name, counts in said.items()},
        "seconds": spread,
        "slowdown_p99": both[1] / both[0] if len(both) == 2 else None,
        "megabytes": [one.held.bytes / _MEGABYTE for one in rounds],
        "descriptors": [one.held.descriptors for one in rounds],
        "faults": [
            f"{o.kind}: {o.fault}" for one in rounds for o in one.outcomes if o.fault is not None
        ],
    }


def _tell(one: Round, number: int) -> None:
    faults = sum(outcome.fault is not None for outcome in one.outcomes)
    kind = "hostile" if one.is_hostile else "calm"
    held = f"{one.held.bytes / _MEGABYTE:.0f} MB, {one.held.descriptors} descriptors"
    text = f"round {number} ({kind}): {len(one.outcomes)} requests, {faults} faults; {held}"
    stderr().print(text, markup=False)


def _print(figures: dict[str, Any]) -> None:
    table = Table(
        Column("small requests"), *_right("number", "p50 s", "p99 s", "max s"), box=SIMPLE
    )
    for name, spread in figures["seconds"].items():
        cells = (f"{spread[key]:.2f}" for key in ("p50", "p99", "max"))
        table.add_row(f"{name} hostile ones", str(figures["small"][name]), *cells)
    print_table(table)
    table = Table("hostile", "answers", box=SIMPLE)
    for name, said in figures["hostile"].items():
        table.add_row(name, ", ".join(f"{count} x {text}" for text, count in said.items()))
    print_table(table)
    for fault in figures["faults"][:20]:
        stderr().print(fault, markup=False)


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


if __name__ == "__main__":
    app()
