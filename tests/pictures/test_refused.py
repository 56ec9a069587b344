"""Families whose pictures cannot be read yet say so by name; their texts are read as ever."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, ModelError, PromptError
from guided_spec.models.loading import load_model
from guided_spec.models.pictures.picture import PicturePrompt
from guided_spec.models.pictures.vision import is_vision_config, split_vision
from guided_spec.types import SamplingParams
from tests.models.tiny import build
from tests.pictures.sighted import TEXT, VISION, Sighted, ask, picture, sighted
from tests.tiny_llm import VOCAB_SIZE, make_llm

GEMMA: dict[str, Any] = {"text_config": {**TEXT, "vocab_size": VOCAB_SIZE, "head_dim": 8}}
GEMMA |= {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 9}


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("llama", "(llama) has no vision tower"),
        ("gemma3", "(gemma3_text) has no vision tower"),  # of text alone
        (
            "qwen3_5",
            "qwen3_5 cannot read pictures yet: it was loaded without its vision tower",
        ),
    ],
)
def test_models_of_text_say_why(name: str, refusal: str) -> None:
    split = split_vision(build(name), 8)
    assert split.language is not None
    assert split.pictures is None
    assert refusal in (split.sight.refusal or "")


def test_gemma_without_a_processor_reads_text() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma3Config(**GEMMA)
    assert not is_vision_config(config)
    model = AutoModelForCausalLM.from_config(config).eval()
    with make_llm(model) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        (output,) = llm.generate(["the cat"], params)
        with pytest.raises(ConfigError) as caught:
            llm.chat(ask(picture(1), "and?"), chat_template_kwargs={"chat_template": "x:"})
    ids = torch.tensor([llm.encode("the cat")])
    found = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert output.completions[0].token_ids == found[0, ids.shape[1] :].tolist()
    assert "its processor cannot be loaded" in str(caught.value)


def test_another_family_of_pictures_is_loaded_for_text() -> None:
    torch.manual_seed(0)
    text = {"model_type": "cohere2", **TEXT, "vocab_size": VOCAB_SIZE, "head_dim": 8}
    vision = {"model_type": "siglip_vision_model", **VISION}
    config = transformers.AyaVisionConfig(
        vision_config=vision, text_config=text, image_token_index=9
    )
    assert is_vision_config(config)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with make_llm(model) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        (output,) = llm.generate(["the cat"], params)
        assert llm.sight.refusal == "aya_vision cannot read pictures yet"
    ids = torch.tensor([llm.encode("the cat")])
    found = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert output.completions[0].token_ids == found[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_family_of_text_or_pictures(tmp_path: Path, family: str) -> None:
    """All of it is loaded to read pictures; for training and drafts, and over devices, its text."""
    one = sighted(family)
    one.model.save_pretrained(tmp_path)
    one.processor.tokenizer.save_pretrained(tmp_path)
    prompt = ask("the cat", picture(1, (24, 16)))
    plain = load_model(tmp_path)
    assert type(plain).__name__.endswith("ForCausalLM")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    whole = load_model(tmp_path, pictures=True)
    with Sighted(whole, one.processor).llm() as llm:
        request = llm.prepare_chat(prompt, params=params)
        (found,) = llm.generate([request.prompt], params)
    assert found.completions[0].token_ids == one.expected(prompt, 6)
    with LLM(str(tmp_path), "none", processor=one.processor, max_model_len=128) as llm:
        assert llm.sight.refusal is None
    mapped = load_model(tmp_path, pictures=True, device_map="cpu")
    assert type(mapped) is type(plain)
    for model in (plain, mapped):
        with Sighted(model, one.processor).llm() as llm:
            assert llm.generate(["the cat"], params)[0].error is None
            with pytest.raises(ConfigError, match="it was loaded without its vision tower"):
                llm.chat(prompt, chat_template_kwargs={"chat_template": "x:"})


def test_a_family_of_text_or_pictures_on_several_devices() -> None:
    """Where a user has loaded all of it, its text is read."""
    model: Any = copy.deepcopy(sighted("qwen3_5").model)
    model.model.visual.to("meta")
    split = split_vision(model, 8)
    assert split.language is model
    assert "'qwen3_5': it reads pictures on one device" in (split.sight.refusal or "")
    other: Any = copy.deepcopy(sighted("qwen3_vl").model)
    other.model.visual.to("meta")
    with pytest.raises(ModelError, match="it reads pictures on one device"):
        split_vision(other, 8)


def test_prompts_that_another_model_prepared_are_refused() -> None:
    """They would wait for room that there never is, and all others behind them."""
    one, params = sighted("qwen2_vl"), SamplingParams(max_tokens=6, ignore_eos=True)
    asked = ask(*(picture(seed) for seed in range(4)), "and?")
    with one.llm() as llm:
        prompt = llm.prepare_chat(asked).prompt
    assert isinstance(prompt, PicturePrompt)
    few = replace(prompt, places=prompt.places[1:])
    others = replace(prompt, places=[at + 1 for at in prompt.places])
    with one.llm(picture_tokens=15) as llm:
        for wrong, reason in (
            (prompt, "prompt: the pictures take 16 tokens, and 15 are kept at a time"),
            (few, "its places for pictures are not this model's"),
            (others, "its places for pictures are not this model's"),
        ):
            (found,) = llm.generate([wrong], params, on_error="return")
            assert isinstance(found.error, PromptError)
            assert reason in str(found.error)
        assert llm.generate(["the cat"], params)[0].error is None
    with make_llm("llama") as llm:
        with pytest.raises(PromptError, match="prompt has pictures: .*no vision tower"):
            llm.generate([prompt], params)
        assert llm.generate(["the cat"], params)[0].error is None
