"""The pages agree with the package: modules and names are listed, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import guided_spec
from guided_spec import EngineConfig, SamplingParams, errors
from tests.docs.pages import PAGES, ROOT

PACKAGE = ROOT / "guided_spec"
ENTRY = re.compile(r"^- `[\w/]+\.py`: .*(?:\n  \S.*)*", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, as Markdown on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")


def test_every_module_has_its_line() -> None:
    entries = [" ".join(entry.split()) for entry in ENTRY.findall(page("structure.md"))]
    listed = set(entries)
    assert len(entries) == len(listed), "docs/structure.md lists modules twice"
    expected = {
        f"- `{path.relative_to(PACKAGE).as_posix()}`: {summary(path)}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or path.parent.name in ("guided_spec", "proposers")
    }
    assert sorted(expected - listed) == [], "these lines are not in docs/structure.md"
    assert sorted(listed - expected) == [], "these lines of docs/structure.md fit no module"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = LINK.findall(path.read_text())
    broken = [target for target in targets if not (path.parent / target).exists()]
    assert not broken


def test_every_page_is_reachable() -> None:
    linked = {Path(target).name for target in LINK.findall(page("index.md"))}
    pages = {path.name for path in PAGES if path.parent.name == "docs"} - {"index.md"}
    assert sorted(pages - linked) == [], "docs/index.md does not link to"


def test_api_page_has_every_public_name() -> None:
    text = page("api.md")
    missing = [name for name in guided_spec.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing, "not in docs/api.md"


def test_api_page_draws_the_error_tree() -> None:
    tree = (errors.__doc__ or "").split("\n\n", 1)[1].strip()
    assert tree in page("api.md")


@pytest.mark.parametrize("record", [SamplingParams, EngineConfig])
def test_api_page_has_every_option_and_its_default(record: Any) -> None:
    rows = [f"| `{f.name}` | `{f.default!r}` |" for f in dataclasses.fields(record)]
    assert [row for row in rows if row not in page("api.md")] == []
