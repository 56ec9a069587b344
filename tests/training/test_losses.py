"""Losses by their definitions, over probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.training.objective import LOSSES, LossMixture, LossRows
from guided_spec.training.target_rows import forbid

LOGITS = st.lists(st.floats(-6, 6, width=32), min_size=5, max_size=5)


def rows(draft: list[float], target: list[float], token: int = 2) -> LossRows:
    return LossRows(torch.tensor([draft]), torch.tensor([target]), torch.tensor([token]))


def by_definition(name: str, p: Tensor, q: Tensor, likeliest: int, token: int) -> float:
    pairs: list[tuple[float, float]] = list(zip(p.tolist(), q.tolist(), strict=True))
    match name:
        case "kl":
            return sum(a * math.log(a / b) for a, b in pairs)
        case "reverse_kl":
            return sum(b * math.log(b / a) for a, b in pairs)
        case "total_variation":
            return 0.5 * sum(abs(a - b) for a, b in pairs)
        case "cross_entropy":
            return -math.log(pairs[likeliest][1])
        case _:
            return -math.log(pairs[token][1])


@pytest.mark.parametrize("name", LOSSES)
@given(LOGITS, LOGITS)
def test_definition(name: str, draft: list[float], target: list[float]) -> None:
    sample = rows(draft, target)
    p, q = sample.target[0].double().softmax(0), sample.draft[0].double().softmax(0)
    # Of the logits: probabilities may tie where logits differ, and either choice is then right.
    likeliest = int(sample.target[0].argmax())
    expected = by_definition(name, p, q, likeliest, 2)
    assert LOSSES[name](sample).item() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_forbidden_tokens_take_no_part(name: str) -> None:
    """Under a mask the loss is that of the legal tokens alone, and so is the gradient."""
    legal = torch.tensor([[True, False, True, True, False]])
    draft = torch.randn(1, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.randn(1, 5, generator=torch.Generator().manual_seed(1))
    token = torch.tensor([2])
    loss = LOSSES[name](LossRows(forbid(draft, legal), forbid(target, legal), token))
    (gradient,) = torch.autograd.grad(loss.sum(), draft)
    small = draft.detach()[legal].unsqueeze(0).requires_grad_()
    expected = LOSSES[name](LossRows(small, target[legal].unsqueeze(0), torch.tensor([1])))
    (small_gradient,) = torch.autograd.grad(expected.sum(), small)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[legal].unsqueeze(0), small_gradient)
    assert not gradient[~legal].any()


def test_a_token_the_draft_does_not_know() -> None:
    assert LOSSES["token_cross_entropy"](rows([1.0] * 5, [0.0] * 5, token=-1)).item() == 0


def test_mixture() -> None:
    sample = rows([0.0, 1, 2, 3, 4], [4.0, 3, 2, 1, 0])
    mixed = LossMixture.parse("kl=0.25, total_variation=2")(sample)
    expected = 0.25 * LOSSES["kl"](sample) + 2 * LOSSES["total_variation"](sample)
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(LossMixture.parse("kl")(sample), LOSSES["kl"](sample))


@pytest.mark.parametrize("text", ["", "kld", "kl=x", "kl=0", "kl=-1", "kl=nan", "kl,"])
def test_a_mixture_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="loss="):
        LossMixture.parse(text)
