"""Pictures on a CUDA device: rows of the table in graphs, and positions of three axes in slots."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.pictures.sighted import Sighted, ask, picture, sighted
from tests.pictures.test_texts import LENGTH, PROMPTS, texts

pytestmark = pytest.mark.gpu

GRAPHED = ["idefics3", "llava", "internvl", "mistral3"]
AXES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def on_cuda(family: str) -> tuple[Sighted, Sighted]:
    """The model on the CPU, and on the device. Heads have 16 dimensions: kernels take no fewer."""
    own = sighted(family, head_dim=16) if family in GRAPHED else sighted(family)
    model: Any = copy.deepcopy(own.model)
    return own, Sighted(model.to("cuda"), own.processor)


@pytest.mark.parametrize("proposer", ["none", "chain:grammar_forced+ngram"])
@pytest.mark.parametrize("family", [*GRAPHED, *AXES])
def test_texts_are_those_of_transformers(family: str, proposer: str) -> None:
    own, on_device = on_cuda(family)
    expected = [own.expected(prompt, LENGTH) for prompt in PROMPTS]
    with on_device.llm(proposer) as llm:
        assert ("blocks" in repr(llm)) == (family in GRAPHED)
        assert texts(llm, PROMPTS) == expected
        assert texts(llm, PROMPTS) == expected


def test_rows_change_under_a_graph() -> None:
    """Pictures take the rows of others, which the graphs that were captured read."""
    own, on_device = on_cuda("llava")
    prompts = [ask(picture(seed), "What is it?") for seed in range(6)]
    expected = [own.expected(prompt, LENGTH) for prompt in prompts]
    with on_device.llm("ngram", picture_tokens=40, max_batch_size=2) as llm:
        assert texts(llm, prompts) == expected
