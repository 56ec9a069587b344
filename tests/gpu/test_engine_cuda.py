"""The whole engine on a CUDA device, over tiny random models."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
import torch

from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.steps import planner
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy, tiny_model

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
GRAMMARS = [
    GrammarSpec.json_schema(SCHEMA),
    GrammarSpec.regex(r"[0-9]{3}-[a-z]{4,8}"),
    None,
    GrammarSpec.choice(["cat", "dog", "cattle"]),
]
PROMPTS = ["The name of the cat is", "A", "An error is not an end. " * 8, "1, 2.5, "]
PROPOSERS = [
    "ngram",
    "chain:grammar_forced+ngram",
    "draft_model",
    "chain:grammar_forced+draft_model",
]


def _generate(
    name: str, proposer: str, *, temperature: float, dtype: torch.dtype
) -> list[RequestOutput]:
    model: Any = copy.deepcopy(tiny_model(name))
    draft: Any = copy.deepcopy(near_copy(name))
    model, draft = model.to("cuda", dtype), draft.to("cuda", dtype)
    params = [
        SamplingParams(max_tokens=60, temperature=temperature, seed=3, grammar=grammar)
        for grammar in GRAMMARS
    ]
    with make_llm(model, proposer, draft=draft, prefill_tokens=24, max_batch_size=3) as llm:
        return llm.generate(PROMPTS, params)


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3", "qwen3_5"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_greedy_equals_plain(name: str, proposer: str) -> None:
    plain = _generate(name, "none", temperature=0.0, dtype=torch.float32)
    found = _generate(name, proposer, temperature=0.0, dtype=torch.float32)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    assert [output.error for output in found] == [None] * len(PROMPTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("proposer", ["none", *PROPOSERS])
def test_sampled_outputs_are_valid(proposer: str, dtype: torch.dtype) -> None:
    outputs = _generate("llama", proposer, temperature=1.0, dtype=dtype)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    if outputs[0].finish_reason == "stop":
        jsonschema.validate(json.loads(outputs[0].text), SCHEMA)
    assert outputs[3].text in ("cat", "dog", "cattle")


@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_prompts_read_along_give_the_same_texts(
    monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    along = _generate("llama", proposer, temperature=0.0, dtype=torch.float32)
    monkeypatch.setattr(planner, "prompt_tokens_per_step", lambda *_: 0)
    apart = _generate("llama", proposer, temperature=0.0, dtype=torch.float32)
    assert [output.token_ids for output in along] == [output.token_ids for output in apart]
