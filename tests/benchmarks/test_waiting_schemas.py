from __future__ import annotations

import sys

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.schemas.waiting import main


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = list[float]()
    monkeypatch.setattr(sys, "setswitchinterval", turns.append)
    app = typer.Typer()
    app.command()(main)
    arguments = ["--clients", "2", "--schemas", "3", "--turns", "5,1", "--repeats", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "schemas/s" in result.output
    assert turns == [0.005, 0.001, 0.005, 0.001]
