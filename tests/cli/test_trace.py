"""``guided-spec trace`` writes the page and the JSON of what it ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from guided_spec.cli.main import app
from guided_spec.trace.page import render_page
from guided_spec.trace.record import from_json


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", "The name", "--regex", "[a-z]{4}", *arguments])


def test_page_and_json_of_two_proposers(tmp_path: Path) -> None:
    page, record = tmp_path / "trace.html", tmp_path / "trace.json"
    proposers = ("--proposer", "grammar_forced", "--compare", "ngram")
    result = run(*proposers, "--output", str(page), "-o", str(record))
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(page), str(record)]
    traces = from_json(record.read_text(encoding="utf-8"))
    assert [trace.proposer for trace in traces] == ["grammar_forced", "ngram"]
    assert all(len(trace.text) == 4 for trace in traces)
    assert page.read_text(encoding="utf-8") == render_page(traces, prompt="The name")
    for trace in traces:
        assert f"{trace.proposer}: {len(trace.token_ids)} tokens in " in result.stderr


def test_a_page_in_this_folder_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--proposer", "none", "--chat")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "trace.html").is_file()


def test_json_on_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--proposer", "none", "--compare", "ngram", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [trace.proposer for trace in from_json(json.dumps(lines))] == ["none", "ngram"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "trace.pdf"), "must end in .html or .json"),
        (("-o", "absent/trace.html"), "is in no folder that exists"),
        (("--max-tokens", "0"), "--max-tokens=0"),
        (("--proposer", "none", "--max-tokens", "1"), "BudgetTooSmallError"),
        (("--proposer", "none", "--compare", "nobody"), "UnknownProposerError"),
    ],
)
def test_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "trace.html").mkdir()
    result = run("--proposer", "none", "-o", str(tmp_path / "trace.html"))
    assert result.exit_code != 0
    assert "must be a file that can be written" in result.stderr
