"""Links between the pages lead somewhere: to a file, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

LINK = re.compile(r"\]\((?!https?://)([^)\s#]*)(?:#([^)\s]*))?\)")
ACTIONS = "../../actions/"  # pages of GitHub, beside those of the files
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
PAGE_NAME = re.compile(r"\bdocs/[\w/]+\.md\b")


def anchors(text: str) -> set[str]:
    """The headings of a page as GitHub links to them; a second one of a name ends with -1."""
    found: list[str] = []
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    before = [found[:index].count(slug) for index, slug in enumerate(found)]
    return {f"{slug}-{n}" if n else slug for slug, n in zip(found, before, strict=True)}


def dead_links(path: Path, text: str) -> list[str]:
    """The links of ``text``, as the page at ``path``, whose file or heading is not there."""
    dead = []
    for target, anchor in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if target.startswith(ACTIONS):
            continue
        other = path.parent / target if target else path
        is_found = other.exists()
        if is_found and anchor:
            is_found = anchor in anchors(text if other == path else other.read_text())
        if not is_found:
            dead.append(f"{target}#{anchor}" if anchor else target)
    return dead


def test_anchors_are_those_of_github() -> None:
    page = """
# `Draft`: what goes out
```
# no heading
```
## Limits
## Limits
### [A link](gpu.md), and K = 5
"""
    assert anchors(page) == {"draft-what-goes-out", "limits", "limits-1", "a-link-and-k--5"}


def test_dead_links_are_found() -> None:
    page = ROOT / "docs" / "gpu.md"
    text = "## Here\n[a](no.md) [b](gpu.md) [c](#here) [d](#there) [e](exactness.md#nowhere)\n"
    text += "[f](../guided_spec) `[g](no.md)` [`h`](none.md) `i` [h](https://example.org/no.md)\n"
    assert dead_links(page, text) == ["no.md", "#there", "exactness.md#nowhere", "none.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path, path.read_text()) == []


def test_every_page_is_reachable() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    linked = {Path(target).name for target, _ in LINK.findall(text)}
    pages = {path.name for path in PAGES if path.parent == ROOT / "docs"} - {"index.md"}
    assert sorted(pages - linked) == [], "docs/index.md does not link to"


def test_pages_that_the_code_names_exist() -> None:
    sources = [*(ROOT / "guided_spec").rglob("*.py"), *(ROOT / "guided_spec").rglob("*.md")]
    named = {name for path in sources for name in PAGE_NAME.findall(path.read_text())}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
