"""The section ``plugins``: configurations, the plugin in vLLM's process, and what is reported."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import vllm_peer
from benchmarks.gpu.documents import DocumentPlan
from benchmarks.gpu.peers import VllmEnvironment, start_vllm, vllm_plan
from benchmarks.gpu.plugins import (
    CONFIGURATIONS,
    Configuration,
    install_beside,
    load_outline,
)
from benchmarks.gpu.plugins_worker import replaced_functions
from benchmarks.gpu.run import GpuPlan, Section, run_gpu
from benchmarks.gpu.subject import load_subject
from guided_spec.errors import ConfigError
from guided_spec.integrations.vllm.proposer import show_requests
from tests.benchmarks.small_llama import Folders, write_small
from tests.benchmarks.vllm_stand_in import write_stand_in

DOCUMENTS = DocumentPlan(batches=(2,), temperatures=(0.0,), max_tokens=200, requests=4)
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_small(tmp_path_factory.mktemp("small"))


def nobody(message: str) -> None:
    assert message


def plugin_sections(folders: Folders, place: VllmEnvironment) -> list[Section]:
    plan = GpuPlan(
        sections=("plugins",),
        model=str(folders.target),
        eagle3=str(folders.eagle3),
        device="cpu",
        documents=DOCUMENTS,
        vllm=place,
    )
    return [section for section in run_gpu(plan, nobody) if section.name == "plugins"]


def test_configurations() -> None:
    """Each default can be read back, and asks vLLM for what it says."""
    assert len(set(CONFIGURATIONS)) == len(CONFIGURATIONS)
    for name in CONFIGURATIONS:
        one = Configuration.parse(name)
        assert "+".join([":".join([one.method, *one.options]), *one.features]) == name
    one = Configuration.parse("eagle3:sampled:sync:v1+exact+schemas")
    assert one.variables == {
        "GUIDED_SPEC_VLLM": "exact,schemas",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    plan = {"model": "m", "eagle3": "e", "num_draft_tokens": 5, "max_model_len": 2048}
    plan |= {"memory_share": 0.75, "cells": [{"batch": 8}], "method": one.method}
    found = vllm_peer.engine_arguments({**plan, **one.arguments})
    assert found["async_scheduling"] is False
    assert found["speculative_config"]["draft_sample_method"] == "probabilistic"
    plain = Configuration.parse("guided")
    assert plain.variables == {"GUIDED_SPEC_VLLM": ""}
    found = vllm_peer.engine_arguments({**plan, "method": "guided", **plain.arguments})
    assert "async_scheduling" not in found
    assert found["speculative_config"] == {
        "method": "custom_class",
        "model": "guided_spec.integrations.vllm.proposer.GuidedProposer",
        "num_speculative_tokens": 5,
    }


@pytest.mark.parametrize(
    ("text", "wrong"), [("eagle4", "eagle4"), ("eagle3:fast", "fast"), ("eagle3+speed", "speed")]
)
def test_a_wrong_configuration(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"{wrong}' must be of ") as caught:
        Configuration.parse(text)
    assert f"vllm_methods='{text}'" in str(caught.value)


def test_the_section(folders: Folders, tmp_path: Path) -> None:
    """It grows by each configuration; one that does not start has its problem."""
    write_stand_in(tmp_path)
    names = ("none", "eagle3:sync:v1", "eagle3+exact", "ngram")
    place = VllmEnvironment(site=str(tmp_path), logs=tmp_path / "logs", methods=names)
    sections = plugin_sections(folders, place)
    assert [len(section.records["rows"]) for section in sections] == [1, 2, 3, 4, 4]
    assert [bool(section.tables) for section in sections] == [False] * 4 + [True]
    rows = json.loads(json.dumps(sections[-1].records["rows"]))
    assert [row["engine"] for row in rows] == [f"vllm {name}" for name in names]
    plain, eagle3, exact, ngram = rows
    assert (plain["tokens"], plain["failed"], plain["finished"]) == (3 * 200, 1, 3)
    assert (plain["acceptance_length"], plain["drafts"], plain["mean_draft_length"]) == (1, 0, None)
    assert (eagle3["drafts"], eagle3["drafted"], eagle3["accepted"]) == (150, 750, 450)
    assert (eagle3["acceptance_length"], eagle3["mean_draft_length"]) == (4.0, 4.0)
    assert plain["vllm"]["plugin"] == {
        "replaced": [],
        "replaced_here": [],
        "model_runner": 2,
        "asynchronous": True,
    }
    assert eagle3["vllm"]["plugin"]["model_runner"] == 1
    assert eagle3["vllm"]["plugin"]["asynchronous"] is False
    assert "no such thing as ngram" in ngram["problem"]
    # The stand-in has nothing that the feature uses: what refuses it was loaded, and asked.
    assert "fit it: there is no v1.core.sched.scheduler" in exact["problem"]
    assert "guided_spec: {" in (tmp_path / "logs" / "vllm_none.log").read_text()
    kept = json.loads((tmp_path / "logs" / "vllm_eagle3-sync-v1.json").read_text())
    assert kept["version"] == "stand-in"


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    """With the processes that it started, and with its problem in the report."""
    write_sleeper(tmp_path)
    place = VllmEnvironment(site=str(tmp_path), logs=tmp_path, limit=1.0)
    result = start_vllm({}, place, "slow")
    assert result["problem"].startswith("ended with -9")


@pytest.mark.slow
def test_an_interrupt_ends_the_engine(tmp_path: Path) -> None:
    """It runs in a session of its own, where Ctrl-C does not arrive."""
    write_sleeper(tmp_path)
    code = (  # a shell's background jobs ignore interrupts, and so would what they start
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from benchmarks.gpu.peers import VllmEnvironment, start_vllm;"
        f"start_vllm({{}}, VllmEnvironment(site={str(tmp_path)!r}), 'slow')"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    note = tmp_path / "pid"
    while not note.is_file() and starter.poll() is None:
        time.sleep(0.05)
    engine = int(note.read_text())
    starter.send_signal(signal.SIGINT)
    _, errors = starter.communicate()
    assert b"KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def write_sleeper(folder: Path) -> None:
    """A package ``vllm`` that says which process it is in, and never gets further."""
    lines = (
        "import os, pathlib, time",
        "here = pathlib.Path(__file__).parent.parent",
        "(here / 'part').write_text(str(os.getpid()))",
        "(here / 'part').rename(here / 'pid')",
        "time.sleep(3600)",
    )
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("\n".join(lines))


def test_without_vllm(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = property(lambda _: False)
    monkeypatch.setattr(VllmEnvironment, "is_there", absent)
    (row,) = plugin_sections(folders, VllmEnvironment(logs=tmp_path))[-1].records["rows"]
    assert "--vllm-site" in row["problem"]
    assert list(tmp_path.iterdir()) == []


def test_the_entry_point(tmp_path: Path) -> None:
    """An interpreter that has not installed the package finds the plugin that it declares."""
    install_beside(tmp_path)
    question = (
        "from importlib.metadata import entry_points;"
        "(one,) = entry_points(group='vllm.general_plugins');"
        "print(one.value); one.load()()"
    )
    # -S: none of the installed packages is on the path.
    command = [sys.executable, "-S", "-P", "-c", question]
    answer = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    assert answer.stdout.strip() == declared["vllm.general_plugins"]["guided_spec"]


def test_replaced_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of this package counts, in a module or a class; nobody else's does."""
    other = functools.wraps(json.loads)(lambda text: text)
    module = make_module(show_requests, other)
    monkeypatch.setitem(sys.modules, "invented.runner", module)
    assert replaced_functions("invented") == [
        "invented.runner.Runner.propose",
        "invented.runner.propose",
    ]


def make_module(ours: Callable[[Any], Any], other: Any) -> types.ModuleType:
    module = types.ModuleType("invented.runner")
    source = "def propose(self): pass\nclass Runner:\n    def propose(self): pass\n"
    exec(source, module.__dict__)
    runner: Any = module.__dict__["Runner"]
    runner.propose = ours(runner.propose)
    runner.verify = other
    module.__dict__["propose"] = ours(module.__dict__["propose"])
    module.__dict__["verify"] = other
    return module


def test_an_outline_is_the_subject_without_weights(folders: Folders) -> None:

    texts = [str(folder) for folder in folders]
    plans = [
        vllm_plan(subject, DOCUMENTS, "eagle3", VllmEnvironment())
        for subject in (
            load_outline(*texts),
            load_subject(*texts, device="cpu", dtype="float32"),
        )
    ]
    assert plans[0] == plans[1]
