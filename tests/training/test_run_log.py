"""What a run reports: lines where there is no terminal, and trackers of other packages."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate.utils import LoggerType

from guided_spec.errors import ConfigError
from guided_spec.training.options import TrainOptions
from guided_spec.training.run import train
from guided_spec.training.run_log import RunLog
from tests.training.toy_algorithm import make_options, write_documents, write_target

NAMES = ("tensorboard", "trackio")
# Notes what it is called with, as the package does on a server of its own.
TRACKIO = """
import json, os
def note(kind, *args, **values):
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps([kind, values or args[0]]), file=file)
class Run:
    def log(self, values, step=None):
        note("log", {"step": step, **values})
    def finish(self):
        note("finish", {})
class Config:
    update = staticmethod(lambda values, **_: note("config", values))
config = Config()
def init(**values):
    if "REFUSED" in os.environ:
        raise RuntimeError("no such server")
    note("init", **values)
    return Run()
"""


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    (tmp_path / "target").mkdir()
    target = write_target(tmp_path / "target")
    data = write_documents(tmp_path / "documents.jsonl", 12)
    trackers = ["trackio", "tensorboard", "trackio"]
    settings: dict[str, Any] = {"max_steps": 2, "tracker": trackers, "project": "drafts"}
    return make_options(target, data, tmp_path / "head", **settings)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package writes that is written here."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr("accelerate.tracking._available_trackers", list(map(LoggerType, NAMES)))
    importlib.invalidate_caches()
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def test_each_tracker_gets_what_the_log_has(options: TrainOptions, notes: Path) -> None:
    train(options, {})
    kinds = [(kind, values) for kind, values in map(json.loads, notes.read_text().splitlines())]
    assert kinds[0] == ("init", {"project": "drafts", "name": "head"})
    assert kinds[1][0] == "config"
    assert kinds[1][1]["tracker"] == "trackio, tensorboard, trackio"
    assert kinds[1][1]["max_steps"] == 2
    logged = [values for kind, values in kinds if kind == "log"]
    lines = (Path(options.output) / "logs" / "metrics.jsonl").read_text().splitlines()
    assert logged == [json.loads(line) for line in lines]
    assert [kind for kind, _ in kinds].count("finish") == 1
    assert any((Path(options.output) / "logs" / "drafts").glob("events.out.tfevents.*"))


def test_a_tracker_that_is_missing_or_does_not_start(
    options: TrainOptions, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr("accelerate.tracking._available_trackers", [LoggerType("tensorboard")])
        with pytest.raises(ConfigError, match="tracker='trackio': is not installed: pip install"):
            train(options, {})
    monkeypatch.setenv("REFUSED", "1")
    with pytest.raises(ConfigError, match="tracker='trackio, tensorboard': cannot start: no such"):
        train(options, {})
    assert not notes.exists()


def test_a_line_a_minute_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Mock(is_main_process=True, trackers=[])
    clock = iter([0.0, 20.0, 60.0, 70.0, 80.0, 120.0, 130.0])  # made; steps 2, 3, 3, 4, 5, 5
    monkeypatch.setattr("guided_spec.training.run_log.time.monotonic", lambda: next(clock))
    options = make_options("target", "data", tmp_path)
    with RunLog(accelerator, tmp_path, options, done=1, total=5) as log:
        for step in range(2, 6):
            log.write(step, {"loss": 1 / step})
            log.advance(step)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("loss")[0].split()[1] for line in lines] == ["3/5", "5/5"]
    assert lines[0].endswith("loss 0.3333]")
