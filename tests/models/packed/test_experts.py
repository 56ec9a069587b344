"""Packed experts give what the stock block gives, and leave it what it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.packed import feed
from guided_spec.models.packed.feed import PackedExperts, feed_of
from tests.models.families import KINDS as KNOWN_KINDS
from tests.models.families import build_family
from tests.models.speculation import Row, generate_alone, prefill, prompts_of, speculate
from tests.models.tiny import build

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe normalized": ("qwen3_moe", {"norm_topk_prob": True}),
    "gpt_oss": ("gpt_oss", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 greedy": ("deepseek_v2", {"topk_method": "greedy", "n_shared_experts": 1}),
    "deepseek_v3": ("deepseek_v3", {"n_shared_experts": 1, "routed_scaling_factor": 2.5}),
    "deepseek_v3 shares": ("deepseek_v3", {"n_shared_experts": 2, "norm_topk_prob": False}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe": ("glm4_moe", {}),
}
# Of other families, with the same equations.
OTHERS = ["dots1", "solar_open", "exaone_moe", "qwen2_moe", "olmoe", "flex_olmo", "mellum"]
ALL = [*KINDS, *(name for name in OTHERS if name in KNOWN_KINDS)]


def block_of(kind: str) -> tuple[Any, Any]:
    """A model and the experts of its second layer or a later one, in float32."""
    name, fields = KINDS.get(kind, (kind, {}))
    model: Any = build(name, **fields) if kind in KINDS else build_family(name)
    blocks = [layer.mlp for layer in model.get_decoder().layers[1:]]
    for mlp in blocks:
        if hasattr(mlp, "gate") and hasattr(mlp.gate, "e_score_correction_bias"):
            mlp.gate.e_score_correction_bias.uniform_(-0.5, 0.5)
    return model, next(mlp for mlp in blocks if hasattr(mlp, "experts"))


@pytest.mark.parametrize("are_few", [True, False])
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("kind", ALL)
@torch.inference_mode()
def test_both_ways_give_what_the_block_gives(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch, *, are_few: bool
) -> None:
    model, block = block_of(kind)
    torch.manual_seed(count)
    states = torch.randn(1, count, model.config.hidden_size)
    expected = block(states)
    expected = expected[0] if isinstance(expected, tuple) else expected
    monkeypatch.setattr(feed, "are_served", lambda *_: are_few)
    if not are_few:  # kernels that are compiled ahead choose what is no expert
        monkeypatch.delattr(feed, "close_experts")
    assert PackedExperts.fits(block)
    found = feed_of(block)(states[0])
    torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_turned_matrices_are_stored_once() -> None:
    model, block = block_of("gpt_oss")
    ids = torch.arange(9).unsqueeze(0)
    expected, weights = model(ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):  # the second one finds them turned
        packed = PackedExperts(block)
        assert packed._opening.weight.is_contiguous()
        assert packed._opening.weight.data_ptr() == block.experts.gate_up_proj.data_ptr()
        torch.testing.assert_close(model(ids).logits, expected)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@torch.inference_mode()
def test_experts_of_another_kind_stay_as_they_are() -> None:
    model, block = block_of("qwen3_moe")
    model.set_experts_implementation("eager")  # who asks for one has a reason
    assert not PackedExperts.fits(block)
    _, block = block_of("mixtral")
    block.experts.act_fn = torch.nn.GELU()
    assert not PackedExperts.fits(block)
    assert not PackedExperts.fits(build("llama").get_decoder().layers[0].mlp)


@pytest.mark.parametrize("kind", ALL)
def test_drafts_of_few_pairs_give_what_generate_gives(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "are_served", lambda *_: True)
    model, _ = block_of(kind)
    prompt = prompts_of([7], 64, 0)[0]
    expected = generate_alone(model, prompt, 20)
    lm = make_causal_lm(model, num_slots=1, max_length=50, kernels="packed")
    assert lm.is_packed
    row = Row(0, prompt, expected)
    prefill(lm, [row])
    source = random.Random(0)
    while not row.is_done:
        speculate(lm, [row], source)
    assert row.tokens[:20] == expected
