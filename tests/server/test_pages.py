"""What the pages and the examples say of the server is so."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import typer.main

from guided_spec.cli.main import app
from guided_spec.server.service import ServerSettings
from tests.docs.pages import README, ROOT, read_blocks
from tests.server.running import Running

PAGE = ROOT / "docs" / "serve.md"
REFERENCE = ROOT / "docs" / "serve_reference.md"
ADDRESS = "http://127.0.0.1:8000"


def options() -> dict[str, Any]:
    """Of the command, by their spelling."""
    command: Any = typer.main.get_command(app)
    params = command.commands["serve"].params
    return {name: p for p in params for name in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize(
    "page", [pytest.param(PAGE, marks=pytest.mark.slow), README], ids=lambda page: page.name
)
def test_snippets(served: Running, page: Any) -> None:
    blocks = [block for block in read_blocks(page.read_text()) if ADDRESS in block.code]
    python = [block for block in blocks if block.language == "python"]
    curl = [block for block in blocks if block.language == "bash"]
    assert python
    assert curl
    for block in python:
        if "import anthropic" in block.code and find_spec("anthropic") is None:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code.replace(ADDRESS, served.url), page.name, "exec"), {})
        assert printed.getvalue() == block.output
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    for block in curl:
        lines = [line for line in block.code.splitlines() if not line.startswith("guided-spec")]
        script = "\n".join(lines).replace(ADDRESS, served.url)
        run = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
        answer = json.loads(json.loads(run.stdout)["choices"][0]["message"]["content"])
        assert answer["name"] == "Maria Lopez"


def defaults(options: str, written: str) -> Iterable[tuple[str, str]]:
    """Of each option in a row: its own default, or the one that is written for all."""
    names, found = re.findall(r"`(-.*?)`", options), written.split(", ")
    return zip(names, found if len(found) == len(names) else [written] * len(names), strict=True)


def test_every_setting_has_its_row() -> None:
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", REFERENCE.read_text(), re.MULTILINE)
    written = dict(pair for row in rows for pair in defaults(*row))
    known = {*options()} - {"--verbose", "-v", "--help", "--num-draft-tokens"}
    assert {*written} == known
    for field in dataclasses.fields(ServerSettings):
        name = f"--{field.name.replace('_', '-')}"
        if name in written and field.default is not None:
            assert written[name] == str(field.default)
            assert options()[name].default == field.default
