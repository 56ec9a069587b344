"""Our server under normal and hostile clients, few of each: the soak at its smallest size."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.hostile.__main__ import app
from benchmarks.hostile.clients import HOSTILE


def test_no_bystander_fails(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    options = {
        "requests": 120,
        "rounds": 2,
        "request-rate": 4,
        "hostile-share": 0.8,
        "output": output,
    }
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    result = CliRunner().invoke(app, arguments)
    figures = json.loads(output.read_text(encoding="utf-8"))
    assert figures["faults"] == []
    assert result.exit_code == 0, result.output
    assert [name for name in HOSTILE if not figures["hostile"][name]] == []  # all of them came
    assert min(figures["small"].values()) > 5
    assert figures["cancelled"] > 5
