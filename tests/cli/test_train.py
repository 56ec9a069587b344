"""``guided-spec train``: what argparse says, and one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from guided_spec.cli.main import app
from guided_spec.errors import ConfigError
from guided_spec.training.registry import ALGORITHMS, algorithm_names
from tests.training.toy_algorithm import ToyTraining, write_documents, write_target

COMMON = ("--algorithm", "toy", "--target", "absent", "--data", "absent.jsonl", "--output", "out")


def run(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["train", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_help_lists_algorithms_and_common_options() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert ", ".join(algorithm_names()) in " ".join(result.stdout.split())
    for name in ("--batch-tokens", "--grammar_masks", "--resume"):
        assert name in result.stdout
    assert "--aux-layer" not in result.stdout


@pytest.mark.parametrize("spelling", [("--algorithm", "toy"), ("--algorithm=toy",)])
def test_help_of_an_algorithm_shows_its_own_options(spelling: tuple[str, ...]) -> None:
    result = run(*spelling, "--help")
    assert result.exit_code == 0
    assert "--aux-layer" in result.stdout
    assert "The layer it reads. (default: 1)" in result.stdout
    assert "--batch-tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "required: --algorithm, --target, --data, --output"),
        (("--algorithm",), 2, "argument --algorithm: expected one argument"),
        (("--algorithm", "toy"), 2, "required: --target, --data, --output"),
        ((*COMMON, "--nonsense", "3"), 2, "error: unknown: --nonsense 3"),
        ((*COMMON, "--epochs", "many"), 2, "argument --epochs: invalid int value: 'many'"),
        ((*COMMON, "--grammar-masks", "some"), 2, "--grammar-masks: invalid choice: 'some'"),
        ((*COMMON, "--epochs", "0"), 1, "ConfigError: epochs=0: must be at least 1"),
        ((*COMMON, "--heldout-share", "1"), 1, "heldout_share=1.0: must be at least 0, below 1"),
        ((*COMMON, "--learning_rate", "nan"), 1, "learning_rate=nan: must be above 0"),
        (("--algorithm", "none"), 1, "algorithm='none': must be one of draft_model,"),
        (COMMON, 1, "ModelError: model='absent'"),
    ],
)
def test_bad_options_give_messages(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())


def test_an_option_of_both_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Taken:
        seed: int = 0

    class Clashing(ToyTraining):
        config_class: Any = Taken

    monkeypatch.setitem(ALGORITHMS, "clashing", Clashing)
    result = run("--algorithm", "clashing", "--help")
    assert result.exit_code == 1
    text = " ".join(result.stderr.split())
    assert str(ConfigError("algorithm", "clashing", "its options seed")) in text


def test_a_run(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    output = tmp_path / "draft"
    arguments = {
        "--algorithm": "toy",
        "--target": write_target(tmp_path / "target"),
        "--data": write_documents(tmp_path / "documents.jsonl", 12),
        "--output": str(output),
        "--device": "cpu",
        "--max-steps": "2",
        "--batch_tokens": "1024",
        "--draft-vocab-size": "100",
        "--decode-limit": "0",
        "--workers": "1",
        "--aux_layer": "2",
    }
    result = run(*(part for pair in arguments.items() for part in pair))
    assert result.exit_code == 0, result.stderr
    for row in ("draft", "steps", "held-out acceptance length"):
        assert row in result.stdout
    report = json.loads((output / "training.json").read_text())
    assert report["steps"] == 2
    assert report["options"]["draft_vocab_size"] == 100
    assert report["algorithm_options"]["aux_layer"] == 2
    assert (output / "model.safetensors").is_file()
