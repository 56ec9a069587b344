"""Products with fp8 weights, against the matrix multiplied out number by number; and the kernel."""

from __future__ import annotations

import pytest
import torch

from guided_spec.errors import ConfigError
from guided_spec.ops.linear.fp8_linear import FP8, Fp8Weight, fp8_linear, multiply_out
from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from guided_spec.ops.linear import fp8_linear_triton
from guided_spec.ops.linear.fp8_linear import fp8_linear
from guided_spec.ops.linear.fp8_linear import multiply_out
from tests.ops.linear.fp8_numbers import converted
from tests.ops.linear.test_fp8_linear import every_number, weight_of

torch.manual_seed(0)
sizes = (
    (1, (70, 600), (128, 128)),
    (3, (64, 2048), (1, 128)),
    (17, (130, 320), (70, 64)),
    (33, (40, 70), (40, 70)),
    (70, (150, 256), (1, 256)),
    (2, (65, 1100), (1, 1100)),
    (200, (64, 1024), (1, 128)),  # more tiles than programs could count
)
for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 1e-2)):
    for count, shape, block in sizes:
        weight = weight_of(shape, block)
        assert fp8_linear_triton.serves(weight)
        x, bias = torch.randn(count, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        for given in (None, bias):
            found = fp8_linear_triton.fp8_linear(x, weight, given)
            exact = None if given is None else given.float()
            expected = fp8_linear(x.float(), weight, exact)
            torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
            assert not weight.arrived.any()
        whole = fp8_linear_triton.multiply_out(weight, dtype)
        assert torch.equal(whole, multiply_out(weight, dtype))
values = every_number().values.flatten()
found = torch.empty(256)  # the interpreter has no products of bfloat16
converted[(1,)](values.view(torch.uint8), found, 254)
assert torch.equal(found[:254], values.float())
print("equal")
"""


def every_number() -> Fp8Weight:
    """[1, 254], with a factor of 1."""
    values = torch.arange(256, dtype=torch.uint8)
    values = values[values & 0x7F != 0x7F].view(FP8).unsqueeze(0)
    return Fp8Weight.of(values, torch.ones(1, 1), (1, 254))


def weight_of(shape: tuple[int, int], block: tuple[int, int]) -> Fp8Weight:
    rows, columns = (-(-size // step) for size, step in zip(shape, block, strict=True))
    values = (torch.randn(shape) * 8).to(FP8)
    return Fp8Weight.of(values, torch.rand(rows, columns) * 0.01 + 0.001, block)


@pytest.mark.parametrize("block", [(4, 4), (1, 10), (7, 10), (3, 20)])
def test_each_number_has_the_factor_of_its_block(block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = weight_of((7, 10), block)
    whole = multiply_out(weight, torch.float32)
    for row in range(7):
        for column in range(10):
            factor = weight.scales[row // block[0], column // block[1]]
            assert whole[row, column] == weight.values[row, column].float() * factor
    x, bias = torch.randn(2, 3, 10), torch.randn(7)
    torch.testing.assert_close(fp8_linear(x, weight, bias), x @ whole.T + bias)


@pytest.mark.parametrize(("sizes", "rows"), [((8, 4, 4), 4), ((8, 3, 3), 1)])
def test_joined_weights_keep_their_factors(sizes: tuple[int, ...], rows: int) -> None:
    torch.manual_seed(0)
    parts = [weight_of((size, 10), (4, 5)) for size in sizes]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
    found = Fp8Weight.joined(parts, values)
    assert found.block == (rows, 5)
    expected = torch.cat([multiply_out(part, torch.float32) for part in parts])
    assert torch.equal(multiply_out(found, torch.float32), expected)


def test_a_factor_for_each_whole_matrix() -> None:
    torch.manual_seed(0)
    parts = [weight_of((size, 10), (size, 10)) for size in (6, 3)]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
    found = Fp8Weight.joined(parts, values)
    assert found.block == (1, 10)
    expected = torch.cat([multiply_out(part, torch.float32) for part in parts])
    assert torch.equal(multiply_out(found, torch.float32), expected)


def test_shapes_that_do_not_fit_are_named() -> None:
    weight = weight_of((7, 10), (4, 4))
    with pytest.raises(ConfigError, match=r"scales=\(2, 2\): must be \(2, 3\) for blocks \(4, 4\)"):
        Fp8Weight.of(weight.values, weight.scales[:, :2], (4, 4))
    with pytest.raises(ConfigError, match=r"must be torch.float8_e4m3fn of shape \[O, I\]"):
        Fp8Weight.of(weight.values.float(), weight.scales, (4, 4))
    broken = weight.values.float()
    broken[3, 2] = torch.nan
    with pytest.raises(ConfigError, match="values='NaN': must be numbers"):
        Fp8Weight.of(broken.to(FP8), weight.scales, (4, 4))
    for wrong in (torch.nan, -torch.inf):
        with pytest.raises(ConfigError, match="scales='NaN or infinite': must be numbers"):
            Fp8Weight.of(weight.values, torch.full((2, 3), wrong), (4, 4))
    with pytest.raises(ConfigError, match=r"x=\(2, 9\): must be \[..., 10\]"):
        fp8_linear(torch.randn(2, 9), weight)


def test_the_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
