"""``guided-spec proposers``: what is registered."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.table import Table

from guided_spec.cli.console import print_json, stdout
from guided_spec.proposers import ENTRY_POINT_GROUP, PROPOSERS

__all__ = ["proposers"]


def proposers(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the proposers that --proposer takes, and where each comes from."""
    rows = [(name, _source(name), _summary(name)) for name in sorted(PROPOSERS)]
    rows += [
        (point.name, point.value, "entry point")
        for point in entry_points(group=ENTRY_POINT_GROUP)
        if point.name not in PROPOSERS
    ]
    if as_json:
        print_json([{"name": n, "source": s, "summary": t} for n, s, t in rows])
        return
    table = Table("name", "what it does", "source")
    for name, source, summary in rows:
        table.add_row(name, summary, source)
    stdout().print(table)


def _source(name: str) -> str:
    factory = PROPOSERS[name]
    return factory if isinstance(factory, str) else f"{factory.__module__}:{factory.__qualname__}"


def _summary(name: str) -> str:
    module = importlib.import_module(_source(name).partition(":")[0])
    return (module.__doc__ or "").strip().partition("\n")[0]
