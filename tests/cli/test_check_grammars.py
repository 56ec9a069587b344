"""``guided-spec check`` of grammars that are no JSON schemas."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from guided_spec.cli.main import app

GRAMMARS = {"own.gbnf": 'root ::= "a"+\n', "own.lark": 'start: "a"+\n'}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_compiles(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(GRAMMARS[name])
    result = CliRunner().invoke(app, ["check", str(tmp_path / name)])
    assert result.exit_code == 0, result.output
    assert "compiles with" in result.stdout


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    "option",
    [
        ["--strict"],
        ["--key-order", "any"],
        ["--unsupported", "warn"],
        ["--additional-properties", "schema"],
        ["--resource", "types.json"],
    ],
    ids=lambda option: option[0],
)
def test_options_of_schemas_are_refused(tmp_path: Path, name: str, option: list[str]) -> None:
    """A grammar has no keywords, keys or references, so the option would do nothing."""
    (tmp_path / name).write_text(GRAMMARS[name])
    result = CliRunner().invoke(app, ["check", str(tmp_path / name), *option])
    assert result.exit_code == 1
    message = " ".join(result.output.split())
    assert option[0] in message
    assert f"{name} is a grammar: leave it out" in message
