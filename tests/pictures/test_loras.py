"""Adapters of models that read pictures: those of their language models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from guided_spec.types import SamplingParams
from tests.adapters import merged, write_adapter
from tests.pictures.sighted import Sighted, ask, picture, sighted

LAYERS = r".*(language_model|text_model).*\.(q_proj|v_proj|down_proj)"
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "gemma3", "qwen3_5"])
def test_prompts_with_pictures(family: str, tmp_path: Path) -> None:
    base = sighted(family)
    folder = write_adapter(base.model, tmp_path, 1, target_modules=LAYERS)
    whole = Sighted(merged(base.model, folder), base.processor)
    prompts = [ask(picture(1), "what?"), ask("and this?")]
    with whole.llm() as llm:
        expected = [one.token_ids for one in llm.generate(prompts, PARAMS)]
    with base.llm() as llm:
        plain = [one.token_ids for one in llm.generate(prompts, PARAMS)]
    assert plain != expected
    with base.llm(loras={"a": folder}) as llm:
        params = [replace(PARAMS, lora=lora) for lora in ("a", "a", None, None)]
        found = [one.token_ids for one in llm.generate(prompts * 2, params)]
    assert found == [*expected, *plain]
