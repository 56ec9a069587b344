"""Learning rate and parameter groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from guided_spec.training.trainer import FLOOR, make_optimizer, rate_factor


@given(st.integers(0, 50), st.integers(1, 200))
def test_the_rate_rises_then_falls_and_is_never_zero(warmup: int, after: int) -> None:
    total = warmup + after
    factors = [rate_factor(s, warmup_steps=warmup, total_steps=total) for s in range(total + 1)]
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert max(factors) == 1.0
    assert min(factors) > 0
    assert factors[warmup] == 1.0
    assert factors[-1] == pytest.approx(FLOOR)


def test_halfway_down_the_cosine() -> None:
    assert rate_factor(60, warmup_steps=20, total_steps=100) == pytest.approx((1 + FLOOR) / 2)
    assert rate_factor(1000, warmup_steps=20, total_steps=100) == pytest.approx(FLOOR)


def test_vectors_do_not_decay_and_frozen_parameters_stay_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].weight.requires_grad = False
    matrices, vectors = make_optimizer(model, learning_rate=1.0, weight_decay=0.5).param_groups
    assert [p.shape for p in matrices["params"]] == [torch.Size([4, 3])]
    assert matrices["weight_decay"] == 0.5
    assert [p.dim() for p in vectors["params"]] == [1, 1, 1]
    assert vectors["weight_decay"] == 0.0
