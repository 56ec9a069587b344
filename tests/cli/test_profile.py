"""``generate --profile`` writes the timeline of its run."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from guided_spec.cli.main import app


def test_generate_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ["generate", "The name", "--regex", "[a-z]{4}", "--profile", str(path)]
    result = CliRunner().invoke(app, [*arguments, "--compare"])
    assert result.exit_code == 0, result.output
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "guided: fill masks" in names


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    path = str(tmp_path / "absent" / "trace.json")
    result = CliRunner().invoke(app, ["generate", "A", "--regex", "a", "--profile", path])
    assert result.exit_code != 0
    assert "ConfigError: profile=" in result.output
    assert "Traceback" not in result.output
