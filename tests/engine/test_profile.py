"""A torch profiler sees the named parts of what runs, on whatever thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.host import named_range
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, tiny_model


def test_an_engine_names_its_parts(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    params = SamplingParams(max_tokens=8, grammar=GrammarSpec.regex("[a-z]{6}"))
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # the engine runs in its own
    with make_llm(model, "ngram") as llm:
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as found:
            llm.generate("The name", params)
        llm.generate("The name", params)
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("guided: fill masks") > 1
    for name in ("draft", "verify", "sample", "commit"):
        assert f"guided: {name}" in names


def test_without_a_profiler_nothing_is_named() -> None:
    assert named_range("a") is named_range("b")  # the one that does nothing
