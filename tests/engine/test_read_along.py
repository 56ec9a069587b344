"""Prompts that the verify forward of other requests reads: the texts are what they were."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from guided_spec.engine import engine
from guided_spec.engine.outputs import Completion
from guided_spec.engine.target import SlotTarget, tokens_along
from guided_spec.types import SamplingParams
from tests.engine.test_equality import PARAMS, PROMPTS
from tests.learned_heads import HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm

PROPOSERS = ["none", "ngram", "eagle3", "eagle3:validate", "chain:grammar_forced+eagle3"]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> HeadedTarget:
    return write_head(tmp_path_factory.mktemp("head") / "eagle3", "eagle3", VOCAB_SIZE)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Forwards over prompts alone, and over prompts along with drafts, and how many they read."""
    calls = Counter[str]()
    forward = SlotTarget._read_line

    def reading(target: SlotTarget, tokens: Any, rows: Any, prompts: Any, *answer: Any) -> Any:
        kind = "along" if rows.slots else "alone"
        calls[kind] += bool(prompts)
        count = sum(len(prompt.token_ids) for prompt in prompts)
        calls[f"most {kind}"] = max(calls[f"most {kind}"], count)
        return forward(target, tokens, rows, prompts, *answer)

    monkeypatch.setattr(SlotTarget, "_read_line", reading)
    return calls


def write(
    headed: HeadedTarget, proposer: str, params: list[SamplingParams], **options: Any
) -> list[list[Completion]]:
    """More requests than slots, so that prompts come while others decode."""
    with make_llm(headed.target, proposer, headed.draft, max_batch_size=3, **options) as llm:
        outputs = llm.generate(PROMPTS, params, on_error="return")
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [list(output.completions) for output in outputs]


def tokens(found: list[list[Completion]]) -> list[list[tuple[list[int], str]]]:
    return [[(c.token_ids, c.finish_reason) for c in completions] for completions in found]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_texts_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
    headed: HeadedTarget,
    reads: Counter[str],
    proposer: str,
    temperature: float,
) -> None:
    params = [replace(p, temperature=temperature, seed=row) for row, p in enumerate(PARAMS)]
    found = write(headed, proposer, params, kernels="packed")
    assert reads["along"] > 1
    assert reads["alone"] >= 1  # the first ones: nobody decodes yet
    separate = reads["alone"]
    reads.clear()
    monkeypatch.setattr(engine, "tokens_along", lambda *_: 0)
    assert tokens(found) == tokens(write(headed, proposer, params, kernels="packed"))
    assert reads["along"] == 0
    assert reads["alone"] > separate


def test_samples_wait_for_the_prompt_they_share(headed: HeadedTarget, reads: Counter[str]) -> None:
    params = [replace(p, n=2, temperature=1.0, seed=row) for row, p in enumerate(PARAMS)]
    found = write(headed, "ngram", params, kernels="packed")
    assert reads["along"] > 1
    assert tokens(found) == tokens(write(headed, "ngram", params, kernels="stock"))


def test_long_prompts_are_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, headed: HeadedTarget, reads: Counter[str]
) -> None:
    """No text waits long for a prompt: beside others, it is read a few tokens at a time."""
    monkeypatch.setattr(engine, "tokens_along", lambda *_: 2)
    found = write(headed, "eagle3", PARAMS, kernels="packed")
    assert reads["most along"] == 2
    assert reads["most alone"] > 2
    along = reads["along"]
    monkeypatch.setattr(engine, "tokens_along", lambda *_: 512)
    reads.clear()
    assert tokens(write(headed, "eagle3", PARAMS, kernels="packed")) == tokens(found)
    assert reads["most along"] > 2
    assert reads["along"] < along
    assert tokens(write(headed, "none", PARAMS, kernels="stock")) == tokens(found)


def test_the_more_prompts_there_are_the_longer_do_texts_wait() -> None:
    assert tokens_along([1], 1, 4096) == 512
    assert tokens_along([16 * 513], 10_000, 4096) == 513
    assert tokens_along([8 * 513, 8 * 513], 10_000, 4096) == 513
    assert tokens_along([16 * 513], 1, 4096) == 2 * 513
    assert tokens_along([513] * 16, 8, 4096) == 3 * 513
    assert tokens_along([200_000], 4, 4096) == 4096
    assert tokens_along([200_000], 4, 100) == 100
