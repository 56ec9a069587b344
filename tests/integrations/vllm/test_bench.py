"""``guided-spec bench --engine vllm``: each proposer loads a vLLM of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from guided_spec.cli.main import app
from tests.integrations.vllm import fake
from tests.integrations.vllm.fake import MODEL, FakeEngine, World, install

PROMPT, ANSWER = "JSON: ", '{"name": "Ada"}'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
}


class Knowing(FakeEngine):
    """It knows the one answer from its start."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        written = self._tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
        self.answers[PROMPT] = [*written, self._tokenizer.eos_token_id]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    monkeypatch.setattr(fake, "FakeEngine", Knowing)
    return install(monkeypatch, tmp_path)


def bench(tmp_path: Path, *arguments: str) -> Result:
    workload = tmp_path / "workload.jsonl"
    workload.write_text(json.dumps({"prompt": PROMPT, "schema": SCHEMA}) + "\n")
    common = ("bench", "--engine", "vllm", "--workload", str(workload))
    return CliRunner().invoke(app, [*common, *arguments])


@pytest.mark.slow
def test_each_proposer_is_measured_by_a_vllm_of_its_own(world: World, tmp_path: Path) -> None:
    options = ("--engine-options", '{"enforce_eager": true}', "--batch-size", "1,2")
    result = bench(tmp_path, "--draft", str(MODEL), "--proposers", "eagle3", *options, "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["name"], row["batch_size"]) for row in rows] == [
        *(("none", 1), ("eagle3", 1)),
        *(("none", 2), ("eagle3", 2)),
    ]
    assert all(row["valid"] == row["same_text"] == 1.0 for row in rows)
    plain, drafting, *_ = world.engines
    assert plain.args.speculative_config is None
    assert drafting.args.speculative_config["method"] == "eagle3"
    assert drafting.args.enforce_eager is True
    assert [engine.args.max_num_seqs for engine in world.engines] == [1, 1, 2, 2]
    assert all(engine.is_shut_down for engine in world.engines)


@pytest.mark.slow
def test_by_default_it_looks_up_and_asks_the_draft(world: World, tmp_path: Path) -> None:
    result = bench(tmp_path, "--draft", str(MODEL), "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["none", "chain:grammar_forced+ngram", "auto"]
    assert len(world.engines) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--by-kind",), "leave out --by-kind"),
        (("--engine-options", "[1]"), "must be a JSON object"),
        (("--verifier", "coupled"), "vLLM verifies by rejection"),
        (("--engine", "sglang"), "guided_spec, vllm"),
        (("--engine", "guided_spec", "--engine-options", "{}"), "pass --engine vllm"),
    ],
)
def test_what_it_cannot_do_is_named(
    world: World, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = bench(tmp_path, *arguments)
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.stderr.split())
    assert world.engines == []
