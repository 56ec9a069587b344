"""LoRA adapters per request: each text of a batch is that of the base with its adapter merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.errors import ConfigError, ModelError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.types import SamplingParams
from tests.adapters import merged, write_adapter
from tests.learned_heads import HeadedTarget
from tests.tiny_llm import make_llm, tiny_model

PROMPT = "The name of the cat is"
NAMES = ("none", "first", "second", "wide")
# Another rank and scaling each; the last in all its layers, with ranks and scalings of some alone.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "first": {"rank": 2},
    "second": {
        "rank": 4,
        "use_rslora": True,
        "lora_alpha": 24,
        "target_modules": r".*layers\.1\..*\.(k_proj|o_proj|down_proj)",
    },
    "wide": {
        "target_modules": "all-linear",
        "rank_pattern": {"gate_proj": 7, r"layers\.0\.self_attn\.q_proj": 1},
        "alpha_pattern": {"gate_proj": 20},
        "lora_alpha": 12,
    },
}
FORMS = [("llama", "packed"), ("llama", "auto"), ("llama", "stock"), ("gpt2", "auto")]
FORMS += [("qwen3_5", "auto"), ("deepseek_v3", "auto"), ("phi3", "auto"), ("mamba", "auto")]


class Adapters:
    """Folders of adapters for tiny models, written once each, and the texts of merged bases."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cache  # noqa: B019 - one object a session
    def folders(self, name: str) -> dict[str, str]:
        found = {}
        for seed, (lora, given) in enumerate(SETTINGS.items()):
            own = dict(given)
            if name != "llama":
                own = {"rank": 2 + seed, "target_modules": "all-linear"}
            found[lora] = write_adapter(tiny_model(name), self._root / name / lora, seed, **own)
        return found

    @cache  # noqa: B019
    def texts(self, name: str, lora: str, params: SamplingParams) -> list[int]:
        model = tiny_model(name)
        whole = model if lora == "none" else merged(model, self.folders(name)[lora])
        with make_llm(whole, kernels="stock", verifier="coupled") as llm:
            return llm.generate(PROMPT, params)[0].token_ids


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


def lora(name: str) -> str | None:
    return None if name == "none" else name


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=11)


@pytest.mark.parametrize(("name", "kernels"), FORMS)
def test_each_row_of_a_batch_has_its_adapter(adapters: Adapters, name: str, kernels: str) -> None:
    asked = [*NAMES, *reversed(NAMES)]
    expected = [adapters.texts(name, one, GREEDY) for one in asked]
    assert len({tuple(text) for text in expected}) == len(NAMES)
    options = {"kernels": kernels, "loras": adapters.folders(name)}
    with make_llm(name, **options) as llm:
        assert llm.loras == NAMES[1:]
        params = [replace(GREEDY, lora=lora(one)) for one in asked]
        assert tokens(llm.generate([PROMPT] * len(asked), params)) == expected
