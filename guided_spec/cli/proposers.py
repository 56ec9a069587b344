"""``guided-spec proposers``: what is registered."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from guided_spec.cli.console import Json, Verbose, print_json, print_table
from guided_spec.proposers import ENTRY_POINT_GROUP, PROPOSERS

__all__ = ["proposers"]


class _Row(NamedTuple):
    name: str
    source: str
    summary: str


def proposers(as_json: Json = False, _verbose: Verbose = False) -> None:
    """List the proposers that --proposer takes."""
    rows = [_Row(name, _source(name), _summary(name)) for name in sorted(PROPOSERS)]
    rows += [
        _Row(point.name, point.value, f"entry point {point.value}")
        for point in entry_points(group=ENTRY_POINT_GROUP)
        if point.name not in PROPOSERS
    ]
    if as_json:
        for row in rows:
            print_json(row._asdict())
        return
    table = Table("name", "what it does")
    for row in rows:
        table.add_row(row.name, row.summary)
    print_table(table)


def _source(name: str) -> str:
    factory = PROPOSERS[name]
    return factory if isinstance(factory, str) else f"{factory.__module__}:{factory.__qualname__}"


def _summary(name: str) -> str:
    """The first line of its docstring, which is read from its file: importing it is slow."""
    factory = PROPOSERS[name]
    text = _read_docstring(factory) if isinstance(factory, str) else inspect.getdoc(factory)
    return (text or "").partition("\n")[0].replace("``", "")


def _read_docstring(path: str) -> str | None:
    module, _, attribute = path.partition(":")
    found = find_spec(module)
    if found is None or found.origin is None:
        return None
    for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute:
            return ast.get_docstring(node)
    return None
