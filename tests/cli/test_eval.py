"""``guided-spec eval``: what is accepted, by source, with and without grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from guided_spec.bundled import bundled_asset
from guided_spec.cli.main import app
from guided_spec.evaluate import acceptance
from tests.evaluate.fake_vllm import FakeVllm
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_beside_the_untrained_head() -> None:
    """A head's own default; it is of the same shape, and drafts as many tokens."""
    asked = ["--model", bundled_asset("target"), "--draft", bundled_asset("eagle3"), "--json"]
    asked += ["--data", bundled_asset("heldout.jsonl"), "--limit", "1"]
    result = run(*asked)
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    free = {row["proposer"]: row for row in rows if not row["grammars"]}
    assert list(free) == ["none", "ngram", "untrained", "eagle3"]
    trained, untrained = free["eagle3"], free["untrained"]
    assert trained["tokens"] == untrained["tokens"] == free["none"]["tokens"]
    assert len(untrained["drafted_at"]) == len(trained["drafted_at"]) == 5
    assert trained["acceptance_length"] > untrained["acceptance_length"] >= 1.0
    again = run(*asked, "--proposers", "untrained")
    repeated = [json.loads(line) for line in again.stdout.splitlines()]
    assert repeated == [row for row in rows if row["proposer"] == "untrained"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "absent/report.json"), "is in no folder that exists"),
        (("--proposers", "ngram,nobody"), "--proposers='nobody': must be one of auto"),
    ],
)
def test_what_could_not_be_finished_is_not_begun(
    target: str, data: str, arguments: tuple[str, ...], message: str
) -> None:
    result = run("--model", target, "--data", data, *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "running" not in result.stderr


@pytest.mark.slow
def test_untrained_is_of_heads(target: str, data: str) -> None:
    found = run("--model", target, "--data", data, "--draft", target, "--proposers", "untrained")
    assert "is of draft heads" in found.stderr
    rows = run("--model", target, "--data", data, "--draft", target, "--limit", "1", "--json")
    names = [json.loads(line)["proposer"] for line in rows.stdout.splitlines()]
    assert list(dict.fromkeys(names)) == ["none", "ngram", "draft_model"]
    assert "the untrained draft is not measured" in rows.stderr


def test_a_vllm_server_by_its_counters(target: str, data: str) -> None:
    fake = FakeVllm()
    fake.complete({"prompt": [1]})  # it has served others before
    with fake.running() as url:
        result = run("--url", url, "--model", target, "--data", data, "--json")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["source"], row["grammars"], row["requests"]) for row in rows] == [
        ("asked", True, 2),
        ("asked", False, 2),
        ("records", False, 1),
    ]
    for row in rows:
        assert row["proposer"] == "vllm"
        assert row["tokens"] == 5 * row["requests"]
        assert row["forwards"] == 3 * row["requests"]
        assert row["drafted_at"] == [row["requests"]] * 3
        assert row["accepted_at"] == [row["requests"], row["requests"], 0]
    assert rows[0]["valid"] == 0.0  # JSON would have its quotes
    bodies = fake.bodies[1:]
    assert [json.loads(b["structured_outputs"]["json"]) for b in bodies[:2]] == [SCHEMA] * 2
    assert not any("structured_outputs" in body for body in bodies[2:])


def test_a_vllm_server_without_drafts(target: str, data: str) -> None:
    with FakeVllm(is_drafting=False).running() as url:
        result = run("--url", url, "--model", target, "--data", data)
    assert result.exit_code == 0, result.stderr
    assert "1.00" in result.stdout


def test_a_server_that_cannot_be_measured(
    target: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--model", target, "--data", data)
    with FakeVllm(foreign=3).running() as url:
        found = run(*asked, "--url", url).stderr
        assert "serve nobody else" in found
        assert "--url" in found or "url=" in found
        assert "the server's own" in run(*asked, "--url", url, "--proposers", "none").stderr
        assert "the server's own" in run(*asked, "--url", url, "--draft", target).stderr
        assert "name what the server runs" in run("--data", data, "--url", url).stderr
        monkeypatch.setattr(FakeVllm, "metrics", lambda _: "guided_spec_tokens_total 3\n")
        assert "vLLM server" in run(*asked, "--url", url).stderr
        monkeypatch.setattr(FakeVllm, "metrics", lambda _: "vllm:generation_tokens_total 3\n")
        monkeypatch.setattr(acceptance, "LATE", 0.1)
        assert "counted 0 tokens" in run(*asked, "--url", url).stderr
    assert "does not answer" in run(*asked, "--url", url).stderr


def test_data_that_cannot_be_asked(target: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    assert "holds no prompt" in run("--model", target, "--data", str(path)).stderr
    path.write_text('{"prompt": "a", "shema": {}}\n')
    assert "a.jsonl:1" in run("--model", target, "--data", str(path)).stderr
    assert "there is no such file" in run("--model", "absent", "--data", "absent").stderr
