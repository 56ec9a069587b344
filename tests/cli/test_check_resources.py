"""``guided-spec check`` takes the schemas that one refers to, and refuses slips where asked."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from guided_spec.cli.main import app


def test_resources_are_known_by_file_name_and_id(tmp_path: Path) -> None:
    number, root = tmp_path / "number.json", tmp_path / "root.json"
    number.write_text(json.dumps({"$id": "https://example.com/n", "type": "integer"}))
    for reference in ("number.json", "https://example.com/n"):
        root.write_text(json.dumps({"items": {"$ref": reference}, "type": "array"}))
        alone = CliRunner().invoke(app, ["check", str(root)])
        assert alone.exit_code == 1
        assert alone.output.count("or pass it with --resource\n") == 2
        result = CliRunner().invoke(app, ["check", str(root), "--resource", str(number)])
        assert result.exit_code == 0, result.output
        assert "every output will validate" in result.output


def test_a_resource_that_is_none_is_named(tmp_path: Path) -> None:
    root, broken = tmp_path / "root.json", tmp_path / "broken.json"
    root.write_text("{}")
    broken.write_text("{")
    for path in (broken, tmp_path / "absent.json"):
        result = CliRunner().invoke(app, ["check", str(root), "--resource", str(path)])
        assert result.exit_code == 1
        assert "--resource" in result.output


def test_strict_refuses_what_looks_misspelt(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"type": "object", "properites": {}}))
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 0
    result = CliRunner().invoke(app, ["check", str(path), "--strict"])
    assert result.exit_code == 1
    assert "'properties' is one" in " ".join(result.output.split())
