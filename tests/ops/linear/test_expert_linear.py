"""Each row times the matrix of its own expert, against one product at a time; and the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.ops.linear.experts import expert_linear
from tests.ops.interpreted import run_interpreted
from tests.tiers import examples

COMPARE = """
import torch
from guided_spec.ops.linear.experts import expert_linear
from guided_spec.ops.linear.experts_triton import expert_linear as kernel

torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
    for count, served, outputs, inputs in ((1, 2, 8, 8), (3, 1, 70, 40), (2, 4, 16, 600)):
        x = torch.randn(count, inputs).to(dtype)
        chosen = torch.randint(5, (count * served,))
        bias = torch.randn(5, outputs).to(dtype)
        for weight in (torch.randn(5, outputs, inputs), torch.randn(5, inputs, outputs).mT):
            for given in (None, bias):
                found = kernel(x, chosen, weight.to(dtype), given)
                expected = expert_linear(x, chosen, weight.to(dtype), given)
                torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
print("equal")
"""


@settings(max_examples=examples(40))
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(["plain", "turned", "biased"]))
def test_one_product_at_a_time(count: int, served: int, kind: str) -> None:
    torch.manual_seed(count)
    x, chosen = torch.randn(count, 6), torch.randint(5, (count * served,))
    weight = torch.randn(5, 6, 3).mT if kind == "turned" else torch.randn(5, 3, 6)
    bias = torch.randn(5, 3) if kind == "biased" else None
    found = expert_linear(x, chosen, weight, bias)
    assert found.shape == (count * served, 3)
    for pair, expert in enumerate(chosen.tolist()):
        expected = weight[expert] @ x[pair // served]
        expected = expected if bias is None else expected + bias[expert]
        torch.testing.assert_close(found[pair], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_full(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 300).to(dtype), torch.randn(4, 7, 300).to(dtype)
    chosen = torch.tensor([3, 0])
    found = expert_linear(x, chosen, weight)
    assert found.dtype == dtype
    assert torch.equal(found, expert_linear(x.float(), chosen, weight.float()).to(dtype))


def test_shapes_that_do_not_fit_are_named() -> None:
    x, weight = torch.randn(2, 6), torch.randn(4, 3, 6)
    with pytest.raises(ConfigError, match=r"x=\(2, 5\): must be \[N, 6\]"):
        expert_linear(x[:, :5], torch.tensor([0, 1]), weight)
    with pytest.raises(ConfigError, match="experts=3: must be a multiple of the 2 rows of x"):
        expert_linear(x, torch.tensor([0, 1, 2]), weight)


def test_the_kernel_agrees_with_the_reference() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
