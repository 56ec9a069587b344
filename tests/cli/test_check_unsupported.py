"""``guided-spec check --unsupported`` says what the text may break."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from guided_spec.cli.main import app

SCHEMA = {
    "oneOf": [
        {"type": "string", "pattern": "(?m)a"},
        {"const": "b"},
        {"type": "string", "minLength": 3},
    ]
}


@pytest.mark.parametrize(
    ("mode", "compiles", "validates", "says"),
    [
        ("error", False, False, "UnsupportedSchemaError"),
        ("rewrite", True, True, "every output will validate"),
        ("warn", True, False, "outputs may break"),
    ],
)
def test_each_mode(
    tmp_path: Path,
    mode: str,
    compiles: bool,  # noqa: FBT001
    validates: bool,  # noqa: FBT001
    says: str,
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    arguments = ["check", str(path), "--unsupported", mode]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    report = json.loads(result.stdout)
    assert (report["compiles"], report["validates"]) == (compiles, validates)
    assert result.exit_code == (0 if compiles else 1)
    assert "oneOf" in [finding["keyword"] for finding in report["findings"]]
    assert says in CliRunner().invoke(app, arguments).stdout


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["check", str(path), "--unsupported", "ignore"])
    assert result.exit_code == 1
    assert "unsupported='ignore'" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("keys", "says"), [(2, "every output will validate"), (70, "order")])
def test_keys_in_any_order(tmp_path: Path, keys: int, says: str) -> None:
    """Objects of too many keys are named: theirs stay in the schema's order."""
    properties = {f"k{index}": {"type": "integer"} for index in range(keys)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "s.json"), "--key-order", "any"])
    assert result.exit_code == 0, result.output
    assert says in result.output
