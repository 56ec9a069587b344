"""Models that run one text at a time, or keep states of texts in slots, on a CUDA device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from guided_spec import GrammarSpec, SamplingParams
from tests.models.tiny import build
from tests.tiny_llm import make_llm

pytestmark = pytest.mark.gpu

PROMPTS = ["The name is Ada. ", "Bob: ", "An error, and the age: ", "1, 2, 1, 2, 1, "]
GRAMMARS = [
    GrammarSpec.json_schema(
        {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    ),
    GrammarSpec.regex("[a-f]{3,20}"),
    None,
    GrammarSpec.choice(["cat", "dog", "cattle"]),
]


ALONE = ["zamba", "llama4_scaled"]
STATES = ["jamba", "mamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "kimi_linear"]


@pytest.mark.parametrize("name", [*ALONE, *STATES])
def test_drafts_do_not_change_greedy_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts at a time, of four: one waits, and takes a slot that another one has left."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the convolutions
    tiny: Any = copy.deepcopy(build(name, vocab_size=403))
    model = tiny.to("cuda")
    params = [SamplingParams(max_tokens=24, temperature=0.0, grammar=one) for one in GRAMMARS]
    texts = []
    for proposer in ("none", "ngram", "chain:grammar_forced+ngram"):
        with make_llm(model, proposer, max_batch_size=3) as llm:
            texts.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1] == texts[2]
    assert all(texts[0])
