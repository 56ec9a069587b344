"""Documents behind long prompts, here and in what stands for vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import long_prompts
from benchmarks.gpu.peers import VllmEnvironment
from benchmarks.gpu.subject import Subject, load_subject
from benchmarks.long_prompts import CASES, Case, Work
from guided_spec.bundled import bundled_asset
from tests.benchmarks.vllm_stand_in import write_stand_in


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject(bundled_asset("target"), None, device="cpu", dtype="float32")


@pytest.mark.slow
def test_shared_tokens_are_read_once(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(CASES, "shared", Case(150, 0, 3, 1))
    work = long_prompts._work(subject, CASES["shared"], 1.0)
    assert len({tuple(prompt[:150]) for prompt in work.prompts}) == 1
    on, off = long_prompts._measure(subject, "none", "shared", work)
    assert (on.prefix_cache, off.prefix_cache) == ("on", "off")
    assert on.prompt_tokens == off.prompt_tokens == sum(map(len, work.prompts))
    assert on.cached_tokens == 2 * 128  # whole blocks of what the first one left
    assert off.cached_tokens == 0
    write_stand_in(tmp_path)
    where = VllmEnvironment(site=str(tmp_path))
    (theirs,) = long_prompts._measure_vllm(subject, "none", {"shared": work}, where)
    assert (theirs.engine, theirs.problem) == ("vllm none", None)
    assert theirs.seconds is not None
    (failed,) = long_prompts._measure_vllm(subject, "ngram", {"shared": work}, where)
    assert failed.problem is not None
    assert "no such thing as ngram" in failed.problem


def test_own_tokens_differ(subject: Subject) -> None:
    work: Work = long_prompts._work(subject, CASES["long"], 0.01)
    assert all(len(prompt) > 160 for prompt in work.prompts)
    assert len({tuple(prompt[:160]) for prompt in work.prompts}) == len(work.prompts)
