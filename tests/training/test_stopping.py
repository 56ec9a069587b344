"""A signal ends a run, and the run goes on from there as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from guided_spec.errors import TrainingStoppedError
from guided_spec.training.run import TrainingReport, train
from guided_spec.training.trainer import StopRequest, WorkerSignals
from tests.processes import run_group
from tests.training.toy_algorithm import make_options, write_documents, write_target

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "algorithm": "toy",
    "epochs": "4",
    "batch_tokens": "600",
    "max_length": "512",
    "heldout_share": "0.2",
    "log_every": "1",
    "decode_limit": "0",
    "workers": "0",
    "device": "cpu",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    target = write_target(folder / "target")
    return {"target": target, "data": write_documents(folder / "documents.jsonl", 24)}


def arguments(sources: dict[str, str], output: Path, *flags: str, **own: Any) -> list[str]:
    """``guided-spec train``, as arguments of Python."""
    settings = {**SETTINGS, **sources, "output": output, **own}
    options = [
        part
        for name, value in settings.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    return ["-m", "tests.training.toy_command", "train", *options, *flags]


def log_of(output: Path) -> list[dict[str, float]]:
    lines = (output / "logs" / "metrics.jsonl").read_text().splitlines()
    return [{n: v for n, v in json.loads(x).items() if n != "tokens_per_second"} for x in lines]


def assert_same_run(first: Path, second: Path) -> None:
    assert log_of(first) == log_of(second)
    expected, found = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def run(sources: dict[str, str], output: Path, **changes: Any) -> TrainingReport:
    """In this process. changes: options, or the toy's own."""
    own: dict[str, Any] = {}
    own |= {name: changes.pop(name) for name in ("signal_step", "signal_name") if name in changes}
    target, data = sources.values()
    settings = {"epochs": 2, "batch_tokens": 600, **changes}
    return train(make_options(target, data, output, **settings), own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_the_run_goes_on(
    sources: dict[str, str], tmp_path: Path, name: str
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    settings = {"gradient_accumulation": 2}
    run(sources, whole, **settings)
    with pytest.raises(TrainingStoppedError, match=f"{name} after step 3: saved in .*step_000003"):
        run(sources, stopped, signal_step=5, signal_name=name, **settings)
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step_000003"]
    assert not (stopped / "model.safetensors").exists()
    run(sources, stopped, resume=True, **settings)
    assert_same_run(whole, stopped)


@pytest.mark.slow
def test_a_signal_in_the_last_step_saves_too(sources: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match="after step 3"):
        run(sources, tmp_path, max_steps=3, signal_step=3)
    assert run(sources, tmp_path, max_steps=3, resume=True).steps == 3
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_the_command_says_how_to_go_on(sources: dict[str, str], tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, *arguments(sources, tmp_path, signal_step=5, workers=1)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert killed.returncode == 128 + signal.SIGTERM
    message = " ".join(killed.stderr.split())
    assert "TrainingStoppedError: SIGTERM after step 5: saved in" in message
    assert "--resume" in message
    assert "Traceback" not in killed.stderr
    assert run(sources, tmp_path, resume=True).steps > 5


@pytest.mark.slow
def test_one_process_gets_the_signal_and_all_stop(sources: dict[str, str], tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert [done.returncode for done in run_group(*arguments(sources, whole))] == [0, 0]
    own = {"signal_step": 3, "signal_rank": 1}
    for killed in run_group(*arguments(sources, stopped, **own)):
        assert killed.returncode == 128 + signal.SIGTERM
        assert killed.errors.count("SIGTERM after step 3: saved in") == 1
        assert "Gloo" not in killed.errors
    resumed = run_group(*arguments(sources, stopped, "--resume"))
    assert [done.returncode for done in resumed] == [0, 0]
    assert_same_run(whole, stopped)


class Alone:
    """As much of an accelerator as is asked."""

    num_processes = 1


def test_a_second_interrupt_ends_a_run_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(Alone()) as stop:
        assert stop.agreed() is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed() == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_thread_takes_no_signals() -> None:
    found: list[Any] = []

    def enter() -> None:
        with StopRequest(Alone()) as stop:
            found.append((stop.agreed(), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(None, before)]


def test_workers_leave_signals_to_the_trainer() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        WorkerSignals()(0)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_workers_end_with_a_trainer_that_ends_with_an_error() -> None:
    code = """
        from torch.utils.data import DataLoader
        from guided_spec.training.trainer import WorkerSignals
        signals = WorkerSignals()
        options = dict(num_workers=1, persistent_workers=True, worker_init_fn=signals)
        with signals:
            batches = iter(DataLoader(range(4), **options))
            next(batches)
        raise SystemExit(7)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, timeout=120)
    assert done.returncode == 7
