"""``guided-spec eval``: what is accepted, by source, with and without grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from guided_spec.cli.main import app
from tests.training.toy_algorithm import write_target

SCHEMA = {"enum": ["yes", "no"]}
RECORDS: list[dict[str, Any]] = [
    {"prompt": "Is it? ", "response": "yes", "schema": SCHEMA, "source": "asked"},
    {"prompt": "Was it? ", "schema": SCHEMA, "source": "asked"},
    {"prompt": "So it is so it is so it", "response": " is"},
    {"text": "no prompt"},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return str(path)


def run(*arguments: str) -> Result:
    shared = ("--max-tokens", "12", "--device", "cpu", "--batch-size", "2")
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["eval", *shared, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_by_source_with_and_without_grammars(target: str, data: str, tmp_path: Path) -> None:
    output, plots = tmp_path / "eval.json", tmp_path / "plots"
    more = ("--output", str(output), "--plot", str(plots), "--proposers", "none,ngram")
    result = run("--model", target, "--data", data, *more)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(output.read_text())
    groups = [("asked", True, 2), ("asked", False, 2), ("records", False, 1)]
    found = [(row["source"], row["grammars"], row["requests"]) for row in rows]
    assert found == groups * 2
    assert [row["proposer"] for row in rows] == ["none"] * 3 + ["ngram"] * 3
    for plain, drafted in zip(rows[:3], rows[3:], strict=True):
        assert plain["acceptance_length"] == 1.0
        assert plain["tokens"] == drafted["tokens"] > 0  # greedy: the same texts
        assert not any(plain["drafted_at"])
        forwards = drafted["tokens"] - sum(drafted["accepted_at"])
        assert drafted["forwards"] <= forwards + drafted["requests"]
    assert all(row["valid"] == 1.0 for row in rows if row["grammars"])
    assert sum(rows[5]["drafted_at"]) > 0
    assert "asked" in result.stdout
    assert (plots / "acceptance_by_position.svg").is_file()
    as_json = run("--model", target, "--data", data, "--proposers", "none", "--json")
    assert [json.loads(line)["source"] for line in as_json.stdout.splitlines()] == [
        "asked",
        "asked",
        "records",
    ]


def test_data_that_cannot_be_asked(target: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    assert "holds no prompt" in run("--model", target, "--data", str(path)).stderr
    path.write_text('{"prompt": "a", "shema": {}}\n')
    assert "a.jsonl:1" in run("--model", target, "--data", str(path)).stderr
    assert "there is no such file" in run("--model", "absent", "--data", "absent").stderr
