"""The kernels of a linear layer of few tokens, against torch's product; and who takes which."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from guided_spec.models.linear_layer import product
from guided_spec.ops.linear.linear import linear
from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from torch.nn import functional
from guided_spec.ops.linear import linear_triton

torch.manual_seed(0)
shapes = ((5, 512), (70, 600), (64, 2048), (3, 4100), (130, 40), (1, 1))
for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 1e-2)):
    for outputs, inputs in shapes:
        weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        for given in (None, bias):
            for rows in ((1,), (1, 1), (2,), (2, 3), (16,)):
                x = torch.randn(*rows, inputs).to(dtype)
                found = linear_triton.linear(x, weight, given)
                exact = None if given is None else given.float()
                expected = functional.linear(x.float(), weight.float(), exact)
                assert found.dtype == dtype
                torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
print("equal")
"""


def test_the_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"


@pytest.mark.parametrize("width", [1, 40, 512, 2048, 2880, 4096, 12288])
def test_what_is_read_at_once_wastes_little(width: int) -> None:
    pytest.importorskip("triton")
    from guided_spec.ops.linear.linear_triton import NARROWEST, WIDEST, _columns

    columns = _columns(width)
    assert NARROWEST <= columns <= WIDEST
    assert -(-width // columns) * columns - width < NARROWEST


def test_gradients_go_through() -> None:
    layer = nn.Linear(6, 4)
    product(layer, torch.randn(3, 6)).sum().backward()
    assert layer.weight.grad is not None


def test_a_layer_with_hooks_is_called() -> None:
    layer, x, seen = nn.Linear(6, 4), torch.randn(3, 6), []
    expected = functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(product(layer, x), expected)
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    assert torch.equal(product(layer, x), expected)
    assert seen == ["hook"]


def test_a_layer_whose_forward_was_replaced_is_called() -> None:
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    layer.forward = lambda input: input + 1  # type: ignore[method-assign]
    assert torch.equal(product(layer, x), x + 1)


def test_any_number_of_rows_on_a_host() -> None:
    weight, bias = torch.randn(4, 6), torch.randn(4)
    for shape in ((6,), (0, 6), (2, 3, 6), (40, 6)):
        x = torch.randn(*shape)
        assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
