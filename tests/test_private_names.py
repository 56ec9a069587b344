"""Tests use public names; the private ones that are left stand in tests/private_names.md.

There each has the seam that is missing. A new one needs a public name, or a row of that table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "private_names.md"
RECORDS = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples: public, for all that


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None and name not in RECORDS


@cache
def private_names() -> frozenset[str]:
    """What the package defines: functions, classes, attributes and constants."""
    found: set[str] = set()
    for path in (ROOT / "guided_spec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(filter(is_private, found))


def used_names(source: str) -> Iterator[str]:
    """Names that are read of another object, imported, or named in a text for ``setattr``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("guided_spec"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
            yield str(node.value).rpartition(".")[2]


def test_what_counts_as_a_use() -> None:
    source = """
from guided_spec.step import _commit_row, commit
class Own:
    def method(self): return self._own, other._theirs._replace(a=1)
patch.setattr("guided_spec.engine.Engine._own_plan", 3)
patch.setattr(Engine, "_own_launch", 3)
text = "not _a name"
"""
    used = {name for name in used_names(source) if is_private(name)}
    assert used == {"_commit_row", "_theirs", "_own_plan", "_own_launch"}


@pytest.mark.slow
def test_private_names_that_tests_use_are_listed() -> None:
    table = PAGE.read_text()
    listed = set(re.findall(r"`(_\w+)`", table))
    used: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in used_names(path.read_text()):
            if is_private(name) and name in private_names():
                used.setdefault(name, path.relative_to(ROOT).as_posix())
    new = {name: path for name, path in used.items() if name not in listed}
    assert not new, "use a public name, or list it in tests/private_names.md with the missing seam"
    assert listed <= set(used), "no test uses these any more: take them out of the list"
