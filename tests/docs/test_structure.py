"""The pages agree with the package: modules and names are listed, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import guided_spec
from guided_spec import (
    LLM,
    ChatCompletion,
    ChatOutput,
    ChoiceOutput,
    Chunk,
    Completion,
    EngineConfig,
    GrammarSpec,
    RequestOutput,
    RequestStats,
    SamplingParams,
    TokenLogprobs,
    ToolCall,
    TopLogprob,
    errors,
)
from guided_spec.engine.chat import ChatOptions
from guided_spec.engine.setup import Options
from guided_spec.grammar.limits import GrammarLimits
from tests.docs.pages import PAGES, ROOT

PACKAGE = ROOT / "guided_spec"
ENTRY = re.compile(r"^- `[\w/]+\.py`: .*(?:\n  \S.*)*", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
RECORDS: tuple[Any, ...] = (
    *(ChatCompletion, ChatOutput, ChoiceOutput, Chunk, Completion, RequestOutput, RequestStats),
    *(TokenLogprobs, ToolCall, TopLogprob),
)


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


def anchors(path: Path) -> set[str]:
    """Those that GitHub makes of a page's headings."""
    titles = HEADING.findall(FENCED.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_anchors_lead_somewhere(path: Path) -> None:
    found = ANCHOR.findall(FENCED.sub("", path.read_text()))
    places = [(path.parent / name if name else path, anchor) for name, anchor in found]
    broken = [f"{place.name}#{anchor}" for place, anchor in places if anchor not in anchors(place)]
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


@pytest.mark.parametrize("record", [SamplingParams, EngineConfig, GrammarLimits])
def test_api_page_has_every_option_and_its_default(record: Any) -> None:
    rows = [f"| `{f.name}` | `{f.default!r}` |" for f in dataclasses.fields(record)]
    assert [row for row in rows if row not in page("api.md")] == []


def signature(name: str, function: Any) -> str:
    """As the page spells it: without annotations, in double quotes."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    shown = found.replace(
        parameters=[p for p in parameters if p.name != "self"], return_annotation=found.empty
    )
    return f"`{name}{shown}`".replace("'", '"')


@pytest.mark.parametrize("kind", [LLM, GrammarSpec])
def test_api_page_has_every_method_as_it_is_called(kind: type) -> None:
    methods = inspect.getmembers(kind, inspect.isroutine)
    shown = [signature(name, method) for name, method in methods if name[0] != "_"]
    text = page("api.md").replace("`spec.", "`")
    assert len(shown) > 5
    assert [one for one in shown if one not in text] == []


@pytest.mark.parametrize("record", RECORDS)
def test_api_page_has_every_field_and_property_of_what_comes_back(record: Any) -> None:
    names = {*inspect.get_annotations(record)}
    names |= {name for name, _ in inspect.getmembers(record, inspect.isdatadescriptor)}
    results = page("api.md").partition("\n## Results")[2].partition("\n## EngineConfig")[0]
    results += page("api.md").partition("\n### Choices")[2].partition("\n## ")[0]
    shown = re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", FENCED.sub("", results))))
    assert sorted({name for name in names if name[0] != "_"} - {*shown}) == []


def test_pages_have_every_option_of_loading_and_of_chat() -> None:
    assert [name for name in Options.LOAD_NAMES if f"`{name}`" not in page("api.md")] == []
    chat = page("chat_and_tools.md")
    assert [n for n in ChatOptions.__annotations__ if not re.search(rf"\b{n}\b", chat)] == []
