"""The timeline holds the named parts of what ran, on whatever thread."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.cli.profile import profiling
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.host import named_range
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, tiny_model


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def named(path: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in events(path) if event.get("name") == name]


def test_other_threads_are_in_it(tmp_path: Path) -> None:
    begin, path = threading.Event(), tmp_path / "trace.json"

    def work() -> None:
        begin.wait()
        with named_range("elsewhere"):
            torch.ones(2) + 1

    thread = threading.Thread(target=work)
    thread.start()  # before the profiler, as the engine's
    with profiling(path), named_range("here"):
        begin.set()
        thread.join()
    (here,) = named(path, "guided: here")
    (elsewhere,) = named(path, "guided: elsewhere")
    assert here["tid"] != elsewhere["tid"]
    (add,) = named(path, "aten::add")
    assert add["tid"] == elsewhere["tid"]
    assert elsewhere["ts"] <= add["ts"] <= elsewhere["ts"] + elsewhere["dur"]


def test_an_engine_names_its_parts(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    params = SamplingParams(max_tokens=8, grammar=GrammarSpec.regex("[a-z]{6}"))
    path = tmp_path / "trace.json"
    with make_llm(model, "ngram") as llm:
        with profiling(path):
            llm.generate("The name", params)
        kept = path.read_bytes()
        llm.generate("The name", params)
    assert path.read_bytes() == kept
    assert len(named(path, "guided: fill masks")) > 1


def test_without_a_path_nothing_is_profiled() -> None:
    with profiling(None):
        assert named_range("a") is named_range("b")  # the one that does nothing


def test_a_path_that_cannot_be_written_fails_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="profile="),
        profiling(tmp_path / "absent" / "trace.json"),
    ):
        pytest.fail("it has begun")
