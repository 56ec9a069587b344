"""``guided-spec train``: its options by algorithm, and one run."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner, Result

from guided_spec.cli.main import app
from guided_spec.config import option
from guided_spec.errors import ConfigError
from guided_spec.training.options import TrainOptions
from guided_spec.training.registry import ALGORITHMS, algorithm_names, find_algorithm
from guided_spec.training.run import TrainingReport
from tests.training.toy_algorithm import ToyTraining, write_documents, write_target

TRAIN = sys.modules["guided_spec.cli.train"]  # in its package, the name is the command's
COMMON = ("--algorithm", "toy", "--target", "absent", "--data", "absent.jsonl", "--output", "out")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run makes its output folder before it finds out what is wrong."""
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["train", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_help_lists_algorithms_and_common_options() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert ", ".join(algorithm_names()) in " ".join(result.stdout.split())
    for name in ("--batch-tokens", "--grammar-masks", "--resume"):
        assert name in result.stdout
    assert "--aux-layer" not in result.stdout


@pytest.mark.parametrize("spelling", [("--algorithm", "toy"), ("--algorithm=toy",)])
def test_help_of_an_algorithm_shows_its_own_options(spelling: tuple[str, ...]) -> None:
    result = run(*spelling, "--help")
    assert result.exit_code == 0
    assert "--aux-layer" in result.stdout
    assert "The layer it reads.  [default: 1]" in result.stdout
    assert "--batch-tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Missing option '--algorithm'"),
        (("--algorithm",), 2, "'--algorithm' requires an argument"),
        (("--algorithm", "toy"), 2, "Missing option '--target'"),
        ((*COMMON, "--nonsense", "3"), 2, "No such option: --nonsense"),
        ((*COMMON, "--batch_tokens", "3"), 2, "No such option: --batch_tokens"),
        ((*COMMON, "--epochs", "many"), 2, "Invalid value for '--epochs'"),
        ((*COMMON, "--grammar-masks", "some"), 2, "Invalid value for '--grammar-masks'"),
        ((*COMMON, "--epochs", "0"), 1, "ConfigError: --epochs=0: must be at least 1"),
        ((*COMMON, "--heldout-share", "1"), 1, "--heldout-share=1.0: must be at least 0, below 1"),
        ((*COMMON, "--learning-rate", "nan"), 1, "--learning-rate=nan: must be above 0"),
        (("--algorithm", "none"), 1, "algorithm='none': must be one of dflash, draft_model,"),
        (COMMON, 1, "ConfigError: --data='absent.jsonl': cannot be read: there is no such file"),
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
        "--batch-tokens": "1024",
        "--draft-vocab-size": "100",
        "--decode-limit": "0",
        "--workers": "1",
        "--aux-layer": "2",
    }
    more = ("--data", write_documents(tmp_path / "more.jsonl", 2))
    result = run(*(part for pair in arguments.items() for part in pair), *more)
    assert result.exit_code == 0, result.stderr
    estimate = "held-out tokens per forward, estimated on the documents"
    for row in ("draft", "steps", estimate):
        assert row in result.stdout
    report = json.loads((output / "training.json").read_text())
    assert report["steps"] == 2
    assert report["options"]["draft_vocab_size"] == 100
    assert [Path(path).name for path in report["options"]["data"]] == [
        "documents.jsonl",
        "more.jsonl",
    ]
    assert report["algorithm_options"]["aux_layer"] == 2
    assert (output / "model.safetensors").is_file()


def test_types_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of field that the algorithms have comes through, given or not."""

    @dataclass
    class Kinds:
        numbers: list[int] | None = option("Repeat it.", default=None)
        form: Literal["a", "b"] = option("One of two.", default="a")
        is_on: bool = option("A switch.", default=False)
        is_off: bool = option("A switch that is on.", default=True)
        names: list[str] = field(default_factory=lambda: ["x"], metadata={"help": "Repeat it."})

    class Typed(ToyTraining):
        config_class: Any = Kinds

    seen: list[dict[str, Any]] = []
    monkeypatch.setitem(ALGORITHMS, "typed", Typed)
    monkeypatch.setattr(TRAIN, "_train", lambda _, own, **__: seen.append(own))
    common = ("--algorithm", "typed", *COMMON[2:])
    assert run(*common).exit_code == 0
    given = ("--numbers", "1", "--numbers", "3", "--form", "b", "--is-on", "--no-is-off")
    assert run(*common, *given, "--names", "y").exit_code == 0
    assert seen == [
        {"numbers": None, "form": "a", "is_on": False, "is_off": True, "names": ["x"]},
        {"numbers": [1, 3], "form": "b", "is_on": True, "is_off": False, "names": ["y"]},
    ]


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_has_its_help(name: str) -> None:
    result = run("--algorithm", name, "--help")
    assert result.exit_code == 0
    shown = set(re.findall(r"--[a-z0-9-]+", result.stdout))
    own = fields(find_algorithm(name).config_class)
    assert {f"--{each.name.replace('_', '-')}" for each in (*fields(TrainOptions), *own)} <= shown


def test_memory_is_shown_beside_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    report = TrainingReport(
        draft="head",
        layout="plain",
        steps=1,
        tokens=1,
        seconds=1.0,
        tokens_per_second=1.0,
        peak_cuda_bytes=3 * 2**30,
        expected_cuda_bytes=2 * 2**30,
        metrics={},
        heldout={},
        best_step=0,
        options={"regenerate": False},
        algorithm_options={},
    )
    TRAIN._print(report)
    assert "3.0 GiB, expected 2.0 GiB" in capsys.readouterr().out
