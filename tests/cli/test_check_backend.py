"""``guided-spec check`` says which backend took the schema."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from guided_spec.cli.main import app

TWO_PATTERNS = {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 4}
NEEDS_LLGUIDANCE = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed"
)


@pytest.mark.parametrize(
    ("schema", "backend", "took"),
    [
        ({"type": "integer"}, "auto", "xgrammar"),
        ({"type": "integer"}, "xgrammar", "xgrammar"),
        (TWO_PATTERNS, "xgrammar", None),
        pytest.param({"type": "integer"}, "llguidance", "llguidance", marks=NEEDS_LLGUIDANCE),
        pytest.param(TWO_PATTERNS, "auto", "llguidance", marks=NEEDS_LLGUIDANCE),
    ],
)
def test_check_names_the_backend(
    tmp_path: Path, schema: object, backend: str, took: str | None
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    arguments = ["check", str(path), "--grammar-backend", backend]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (report["compiles"], report["backend"]) == (took is not None, took)
    assert bool(report["findings"]) == (took is None)
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == (0 if took else 1)
    assert took is None or f"compiles with {took} in" in printed.stdout


def test_check_refuses_an_unknown_backend(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["check", str(path), "--grammar-backend", "outlines"])
    assert result.exit_code == 1
    assert "grammar_backend='outlines'" in " ".join(result.stderr.split())
