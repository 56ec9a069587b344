"""The site: links that leave the pages, lists of fields, and an entry for every public name."""

from __future__ import annotations

import re

import pytest

import guided_spec
from tests.docs.pages import DOCS
from tools.site.fields import with_lists
from tools.site.links import rewritten

REPOSITORY = "https://example.org/us/guided_spec"


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("[a](../guided_spec/core.py)", f"[a]({REPOSITORY}/blob/main/guided_spec/core.py)"),
        ("[a](../CHANGELOG.md#x)", f"[a]({REPOSITORY}/blob/main/CHANGELOG.md#x)"),
        ("[a](../gpu.md)", "[a](../gpu.md)"),  # from a folder, it stays in docs/
        ("![a](../figures/b.svg)", "![a](../figures/b.svg)"),
        ("[a](gpu.md#b) [c](https://d.org)", "[a](gpu.md#b) [c](https://d.org)"),
    ],
)
def test_links_out_of_the_pages(markdown: str, expected: str) -> None:
    page = "performance/cpu.md" if "gpu" in markdown or "figures" in markdown else "api.md"
    assert rewritten(markdown, page, REPOSITORY) == expected


def test_links_without_a_repository_are_text() -> None:
    assert rewritten("See [`core`](../guided_spec/core.py#x).", "api.md", None) == "See `core`."


def test_fields_become_lists() -> None:
    docstring = """What it is.

    Raises nothing: it is a sentence.

name: of it, and
    more of that.
first, second: both
third: in one line; fourth: too."""
    assert (
        with_lists(docstring)
        == """What it is.

    Raises nothing: it is a sentence.

- `name`: of it, and
    more of that.
- `first`, `second`: both
- `third`: in one line; fourth: too."""
    )


def test_every_public_name_has_an_entry() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    entries = re.findall(r"^::: guided_spec\.(\w+)$", text, re.MULTILINE)
    assert sorted(entries) == sorted(guided_spec.__all__)
