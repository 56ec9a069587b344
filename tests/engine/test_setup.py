"""What an LLM is told about its model: options that reach it, and its own defaults."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, QuantoConfig

from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.engine.options import Options
from guided_spec.errors import ConfigError
from guided_spec.models.loading import load_model
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, tiny_model

LOAD: dict[str, Any] = {
    "attn_implementation": "eager",
    "device": "cpu",
    "device_map": "auto",
    "dtype": "bfloat16",
    "quantization_config": QuantoConfig(),
    "revision": "main",
    "tp_plan": "auto",
    "trust_remote_code": True,
}


@pytest.mark.parametrize("name", Options.LOAD_KINDS)
def test_how_to_load_is_refused_for_a_loaded_model(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*the model is loaded already"):
        make_llm("llama", **{name: LOAD[name]})


def test_an_option_left_open_is_none() -> None:
    options: dict[str, Any] = dict.fromkeys(Options.LOAD_KINDS)
    with make_llm("llama", **options) as llm:
        assert llm.model is tiny_model("llama")


def test_an_adapter_is_a_model(tmp_path: Path) -> None:
    base = load_model(bundled_asset("target"), device="cpu")
    settings = LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(base, settings)
    model.save_pretrained(str(tmp_path))
    with LLM(str(tmp_path), "none", device="cpu") as llm:
        found = llm.generate("Ada ordered", SamplingParams(max_tokens=8))
    ids = llm.encode("Ada ordered")
    merged: Any = model.merge_and_unload()
    whole = merged.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert found[0].token_ids == whole[0, len(ids) :].tolist()


RECOMMENDED = GenerationConfig(
    do_sample=True,
    temperature=0.6,
    top_k=20,
    top_p=0.95,
    repetition_penalty=1.1,
    max_new_tokens=64,
)


def test_params_from_a_generation_config() -> None:
    found = SamplingParams.from_model(RECOMMENDED, max_tokens=9, seed=1)
    assert found == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, max_tokens=9, seed=1
    )
    assert SamplingParams.from_model(RECOMMENDED).max_tokens == 64
    assert SamplingParams.from_model(GenerationConfig(do_sample=True)).temperature == 1.0
    greedy = GenerationConfig(temperature=0.6, top_p=0.9, do_sample=False)
    assert SamplingParams.from_model(greedy) == SamplingParams()
    assert SamplingParams.from_model(GenerationConfig()) == SamplingParams()
    assert SamplingParams.from_model(tiny_model("llama")) == SamplingParams()
    with pytest.raises(ConfigError, match="must be an LLM, a model"):
        SamplingParams.from_model({"temperature": 0.6})


def test_a_model_without_params_samples_as_its_makers_say() -> None:
    model = copy.copy(tiny_model("llama"))
    model.generation_config = copy.deepcopy(RECOMMENDED)
    with make_llm(model) as llm:
        assert llm.default_params == SamplingParams.from_model(model)
        assert llm.default_params == SamplingParams.from_model(llm)
        (found,) = llm.generate("The cat")
        seeded = SamplingParams.from_model(model, seed=found.stats.seed)
        (again,) = llm.generate("The cat", seeded)
        (plain,) = llm.generate("The cat", SamplingParams(max_tokens=64))
        model.generation_config.do_sample = False
        (greedy,) = llm.generate("The cat")
    assert found.token_ids == again.token_ids
    assert len(found.token_ids) == 64 or found.finish_reason == "stop"
    assert found.token_ids != plain.token_ids
    assert greedy.stats.output_tokens == 64
