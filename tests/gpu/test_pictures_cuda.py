"""Pictures on a CUDA device: rows of the table, and positions of three axes, under graphs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.models.pictures.vision import split_vision
from tests.models.heads.fresh import write_mtp
from tests.models.heads.heads import write_eagle3
from tests.pictures.axes_lines import compared
from tests.pictures.sighted import Sighted, ask, picture, sighted
from tests.pictures.test_texts import AXES, CAT, DOG, LENGTH, LONG, PROMPTS, texts

pytestmark = pytest.mark.gpu

PLAIN = ("idefics3", "llava", "internvl", "mistral3", "gemma3")
# Half precision rounds, in some families more than an axis that is taken for another would change.
ERRORS = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 0.04}


# Of weights by which no two tokens of a text come within 0.001 of each other: a device rounds.
SEEDS = {"qwen3_vl": 2, "qwen3_5_moe": 1, "gemma3": 19}


def on_cuda(family: str) -> tuple[Sighted, Sighted]:
    """The model on the CPU, and on the device. Heads have 16 dimensions: kernels take no fewer."""
    own = sighted(family, SEEDS.get(family, 0), head_dim=16)
    model: Any = copy.deepcopy(own.model)
    return own, Sighted(model.to("cuda"), own.processor)


@pytest.mark.parametrize("proposer", ["none", "chain:grammar_forced+ngram"])
@pytest.mark.parametrize("family", [*PLAIN, *AXES, "qwen3_5_moe"])
def test_texts_are_those_of_transformers(
    family: str, proposer: str, caplog: pytest.LogCaptureFixture
) -> None:
    own, on_device = on_cuda(family)
    expected = [own.expected(prompt, LENGTH) for prompt in PROMPTS]
    with caplog.at_level("INFO"), on_device.llm(proposer) as llm:
        assert "packed forwards (CUDA graphs" in caplog.text
        assert texts(llm, PROMPTS) == expected
        assert texts(llm, PROMPTS) == expected


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("family", AXES)
def test_logits_are_those_of_the_stock_modules(family: str, dtype: torch.dtype) -> None:
    """Through graphs, with drafts that do not stay, next to a text without pictures."""
    for one in compared(family, "cuda", dtype):
        assert one.error < ERRORS[dtype]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "gemma3"])
def test_pieces_and_texts_that_go_on_in_other_slots(family: str) -> None:
    """Graphs read what is put into a slot later, whoever had it before."""
    own, on_device = on_cuda(family)
    prompts = [ask("The name"), ask(CAT, LONG), ask(DOG, "and", CAT), ask(LONG), ask(CAT, DOG, "?")]
    expected = [own.expected(prompt, LENGTH) for prompt in prompts]
    with on_device.llm("ngram", max_batch_size=2, prefill_tokens=24) as llm:
        assert texts(llm, prompts) == expected
        assert texts(llm, prompts[::-1]) == expected[::-1]


@pytest.mark.parametrize("head", ["mtp", "eagle3"])
@pytest.mark.parametrize("family", AXES)
def test_heads_draft_under_graphs(tmp_path: Path, family: str, head: str) -> None:
    own, on_device = on_cuda(family)
    language = split_vision(copy.deepcopy(own.model), 1).language
    if head == "mtp":
        write_mtp(tmp_path / "head", language)
    else:
        # Heads of 8 numbers in the toys, of which kernels take 16 at least.
        rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]}}
        shape = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
        options = {"draft_vocab_size": 300, "changes": {**rope, **shape}}
        write_eagle3(tmp_path / "head", language, **options)
    expected = [own.expected(prompt, LENGTH) for prompt in PROMPTS]
    with on_device.llm(head, draft=str(tmp_path / "head")) as llm:
        assert texts(llm, PROMPTS) == texts(llm, PROMPTS) == expected


def test_rows_change_under_a_graph() -> None:
    """Pictures take the rows of others, which the graphs that were captured read."""
    own, on_device = on_cuda("llava")
    prompts = [ask(picture(seed), "What is it?") for seed in range(6)]
    expected = [own.expected(prompt, LENGTH) for prompt in prompts]
    with on_device.llm("ngram", picture_tokens=40, max_batch_size=2) as llm:
        assert texts(llm, prompts) == expected
