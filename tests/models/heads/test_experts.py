"""Fusing experts: their order, what is left alone, and what is missing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.heads.weights import fuse_experts, split_experts
from tests.models.tiny import build

NUM_EXPERTS = 11  # two digits: their order as text is another one


def one_by_one(prefix: str, num_experts: int = NUM_EXPERTS) -> dict[str, Tensor]:
    shapes = {"down_proj": (3, 2), "gate_proj": (2, 3), "up_proj": (2, 3)}
    return {
        f"{prefix}.experts.{e}.{name}.weight": torch.randn(shape)
        for e in sorted(range(num_experts), key=str)
        for name, shape in shapes.items()
    }


def test_experts_are_stacked_by_their_number_and_the_gate_comes_first() -> None:
    tensors = one_by_one("layers.0.mlp") | one_by_one("layers.1.mlp", 2)
    before = dict(tensors)
    fused = fuse_experts(tensors)
    assert tensors == before
    assert set(fused) == {
        f"layers.{layer}.mlp.experts.{name}"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
    }
    for expert in range(NUM_EXPERTS):
        gate, up, down = (
            tensors[f"layers.0.mlp.experts.{expert}.{name}_proj.weight"]
            for name in ("gate", "up", "down")
        )
        gate_up = fused["layers.0.mlp.experts.gate_up_proj"][expert]
        assert torch.equal(gate_up[:2], gate)
        assert torch.equal(gate_up[2:], up)
        assert torch.equal(fused["layers.0.mlp.experts.down_proj"][expert], down)


@given(counts=st.lists(st.integers(1, 12), max_size=3))
def test_splitting_undoes_fusing(counts: list[int]) -> None:
    tensors = {"mlp.gate.weight": torch.randn(2, 3)}
    for layer, count in enumerate(counts):
        tensors |= one_by_one(f"layers.{layer}.mlp", count)
    split = split_experts(fuse_experts(tensors))
    assert split.keys() == tensors.keys()
    assert all(torch.equal(split[name], tensor) for name, tensor in tensors.items())


def test_stacks_that_are_laid_out_another_way_are_not_split() -> None:
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    tensors = {f"mlp.experts.{name}": torch.randn(2, 4) for name in names}
    assert split_experts(tensors) == tensors


def test_what_is_fused_or_no_expert_stays_the_same_object() -> None:
    tensors = {
        "layers.0.mlp.experts.gate_up_proj": torch.randn(2, 4, 3),
        "layers.0.mlp.experts.down_proj": torch.randn(2, 3, 2),
        "layers.0.mlp.shared_experts.gate_proj.weight": torch.randn(2, 3),
        "layers.0.mlp.gate.e_score_correction_bias": torch.randn(2),
    }
    fused = fuse_experts(tensors)
    assert fused.keys() == tensors.keys()
    assert all(fused[name] is tensors[name] for name in tensors)


def test_the_names_and_shapes_are_those_of_transformers() -> None:
    model = build("deepseek_v3")
    expected = model.state_dict()
    width, inner = model.config.hidden_size, model.config.moe_intermediate_size
    shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    fused = fuse_experts(
        {
            f"model.layers.2.mlp.experts.{expert}.{name}.weight": torch.zeros(shape)
            for expert in range(model.config.n_routed_experts)
            for name, shape in shapes.items()
        }
    )
    assert {name: t.shape for name, t in fused.items()} == {
        name: t.shape
        for name, t in expected.items()
        if name.startswith("model.layers.2.mlp.experts")
    }


@pytest.mark.parametrize("lost", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_that_lacks_a_weight_is_an_error(lost: str) -> None:
    tensors = one_by_one("mlp", 3)
    del tensors[f"mlp.experts.1.{lost}.weight"]
    with pytest.raises(ModelError, match=rf"{lost} of experts 0 to 2, found those of \[0, 2\]"):
        fuse_experts(tensors)
