"""Commands that the pages name are there, with the options that the pages give them."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import warnings
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import PAGES

COMMAND = re.compile(
    r"python3? -m (?P<module>(?:benchmarks|tools|tests)(?:\.\w+)+)(?P<arguments>[^\n`|]*)"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def read_commands(text: str) -> dict[str, set[str]]:
    """The options that a page gives to each module that it runs, in blocks and between them."""
    found: dict[str, set[str]] = defaultdict(set)
    for match in COMMAND.finditer(text):
        found[match["module"]] |= {*OPTION.findall(match["arguments"])}
    return dict(found)


def help_of(module: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``python -m module --help`` prints."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.setenv("COLUMNS", "300")  # else options are cut short
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore", RuntimeWarning)  # another test may have imported it
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    return printed.getvalue()


def test_commands_of_a_page() -> None:
    page = """
Run `python -m tools.house`, or
```bash
python3 -m benchmarks.gpu --work wide --sections a-b
```
"""
    assert read_commands(page) == {"tools.house": set(), "benchmarks.gpu": {"--work", "--sections"}}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_are_known(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, options in read_commands(page.read_text()).items():
        assert find_spec(module) is not None, module
        if options:
            assert sorted(options.difference(OPTION.findall(help_of(module, monkeypatch)))) == []
