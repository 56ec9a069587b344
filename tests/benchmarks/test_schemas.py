"""The benchmark of schemas counts what is right and names what is not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.schemas import files
from benchmarks.schemas.corpus import Instance, SchemaCase, load_cases
from benchmarks.schemas.enforced import main
from benchmarks.schemas.judge import KeyOrder
from guided_spec.errors import ConfigError

INTEGER = {"type": "integer"}
OBJECT = {"properties": {"a": INTEGER, "b": {"properties": {"d": True, "c": True}}}}
LINES = [
    {
        "id": "order",
        "split": "x",
        "schema": {**OBJECT, "type": "object", "additionalProperties": False},
        "tests": [{"data": {"b": {"c": 1, "d": 2}, "a": 1}, "valid": True}],
    },
    {"id": "refused", "split": "x", "schema": {"$ref": "y.json"}, "tests": []},
    {"id": "empty", "split": "z", "schema": False, "tests": [{"data": 1, "valid": False}]},
    {"schema": INTEGER, "reference": 3},
    {"split": "z", "schema": INTEGER, "tests": [{"data": 3, "valid": False}]},
]


def test_keys_are_sorted_as_the_schema_lists_them() -> None:
    value = {"b": {"e": 0, "c": 1, "d": [{"b": 1, "a": 2}]}, "a": 1}
    ordered = KeyOrder(OBJECT).sort(value)
    assert ordered == value
    assert json.dumps(ordered) == '{"a": 1, "b": {"d": [{"a": 2, "b": 1}], "c": 1, "e": 0}}'


def test_a_corpus_is_read_from_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "part"
    folder.mkdir()
    tests = [{"description": "d", "data": 1, "valid": True}]
    (folder / "type.json").write_text(json.dumps([{"schema": INTEGER, "tests": tests}] * 2))
    text = "\n".join(map(json.dumps, LINES)) + "\n\n"
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    cases = load_cases([folder])
    assert [case.id for case in cases] == [
        "order",
        "refused",
        "empty",
        "4",
        "5",
        "type/0",
        "type/1",
    ]
    assert cases[3] == SchemaCase("4", "more", INTEGER, (Instance(3, valid=True),))
    assert cases[-1].split == "part"
    assert len(load_cases([folder / "type.json"], limit=1)) == 1
    for path in (tmp_path / "absent.json", tmp_path / "part" / "broken.jsonl"):
        if path.parent == folder:
            path.write_text("{")
        with pytest.raises(ConfigError, match="paths"):
            load_cases([path])
    with pytest.raises(ConfigError, match="no schemas"):
        load_cases([])


def test_the_table_and_the_exceptions(tmp_path: Path) -> None:
    path, output = tmp_path / "cases.jsonl", tmp_path / "report.json"
    path.write_text("\n".join(map(json.dumps, LINES)))
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(path), "--walks", "2", "--output", str(output)])
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    splits = {row["split"]: row for row in report["splits"]}
    assert splits["x"]["accepted"] == splits["x"]["in order"] == 1
    assert splits["x"]["all right"] == 0
    assert splits["z"]["unsatisfiable"] == splits["z"]["false accepts"] == 1
    assert splits["all"]["schemas"] == 5
    assert splits["all"]["texts"] == 6
    assert splits["all"]["invalid"] == 0
    assert [e["id"] for e in report["exceptions"]] == ["order", "refused", "empty", "5"]
    assert "y.json" in report["exceptions"][1]["reason"]


def test_verdicts_are_recorded_and_compared(tmp_path: Path) -> None:
    path, record = tmp_path / "cases.jsonl", tmp_path / "verdicts.json"
    path.write_text("\n".join(map(json.dumps, LINES)))
    app = typer.Typer()
    app.command()(main)
    arguments = [str(path), "--walks", "1"]
    assert CliRunner().invoke(app, [*arguments, "--record", str(record)]).exit_code == 0
    verdicts = json.loads(record.read_text())
    assert verdicts["x/order"] == "right in order"
    assert verdicts["x/refused"] == "unsupported"
    assert verdicts["z/empty"] == "unsatisfiable"
    assert CliRunner().invoke(app, [*arguments, "--compare", str(record)]).exit_code == 0
    record.write_text(json.dumps({**verdicts, "x/order": "right", "gone": "right"}))
    result = CliRunner().invoke(app, [*arguments, "--compare", str(record)])
    assert result.exit_code == 1
    assert "x/order: right, now right in order" in result.output
    assert "gone: right, now not there" in result.output


def test_files_are_judged_in_processes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"$id": "https://example.com/a", "type": "null"}))
    (tmp_path / "b.json").write_text(json.dumps({"$ref": "https://example.com/a"}))
    (tmp_path / "c.json").write_text(json.dumps({"$ref": "https://example.com/gone"}))
    (tmp_path / "d.json").write_text("no JSON")
    output = tmp_path / "verdicts.jsonl"
    app = typer.Typer()
    app.command()(files.main)
    result = CliRunner().invoke(app, [str(tmp_path), "--output", str(output)])
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert [found[name]["outcome"] for name in "abcd"] == [
        *("compiles", "compiles", "UnsupportedSchemaError", "GrammarCompileError")
    ]
    assert found["a"]["row_p99"] > 0
    assert found["c"]["row_p99"] is None
    assert "gone" in found["c"]["reason"]
    missing = CliRunner().invoke(app, [str(tmp_path / "absent")])
    assert missing.exit_code == 1
    assert "ConfigError: paths=" in missing.output
