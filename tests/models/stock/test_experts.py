"""Experts of stock models, pair by pair: they give what transformers' own functions give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.moe import batched_mm_experts_forward

from guided_spec.models.stock.experts import EXPERTS, few_experts, using_few_experts
from tests.models.tiny import build

MODELS = ["qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 5])
@torch.inference_mode()
def test_every_pair_is_summed(name: str, count: int) -> None:
    model: Any = build(name)
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    torch.manual_seed(count)
    states, shares = torch.randn(count, 32), torch.rand(count, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(count)])
    found = few_experts(experts, states, chosen, shares)
    expected = batched_mm_experts_forward(experts, states, chosen, shares)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_configuration_is_as_it_was() -> None:
    model: Any = build("qwen3_moe")
    ids = torch.arange(9).unsqueeze(0)
    expected, before = model(ids).logits, model.config._experts_implementation
    with using_few_experts(model.config):
        assert model.config._experts_implementation == EXPERTS
        torch.testing.assert_close(model(ids).logits, expected)
    assert model.config._experts_implementation == before
    model.set_experts_implementation("eager")
    with using_few_experts(model.config):
        assert model.config._experts_implementation == "eager"  # as its user asked


def test_a_model_without_experts() -> None:
    config: Any = build("llama").config
    with using_few_experts(config):
        assert config._experts_implementation != EXPERTS
