"""Products with int4 weights, against the matrix as its numbers say; and the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.linear.int4_linear import Int4Weight, int4_linear, multiply_out, unpacked
from tests.ops.interpreted import run_interpreted

COMPARE = """
from tests.ops.linear.test_int4_linear import compare_kernels, compare_many
compare_kernels()
compare_many()
print("equal")
"""


def weight_of(
    outputs: int, inputs: int, groups: int, *, is_permuted: bool = False, device: str = "cpu"
) -> Int4Weight:
    """Random numbers, such that a product's are about as large as the states."""
    numbers = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(groups, outputs) + 0.5) * 0.15 * inputs**-0.5
    zeros = torch.randint(16, (groups, outputs), dtype=torch.uint8)
    order = torch.randperm(inputs) if is_permuted else None
    parts = [one if one is None else one.to(device) for one in (scales.half(), zeros, order)]
    return Int4Weight.of(numbers.to(device), *parts)  # type: ignore[arg-type]


def exact(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    given_bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), multiply_out(weight, torch.float32), given_bias)


def check_kernel(
    weight: Int4Weight, count: int, dtype: torch.dtype, *, with_bias: bool = True
) -> None:
    from guided_spec.ops.linear import int4_linear_triton

    outputs, inputs = len(weight.values), weight.inputs
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    x = torch.randn(count, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    assert int4_linear_triton.serves(weight)
    found = int4_linear_triton.int4_linear(x, weight, bias)
    assert found.dtype == dtype
    expected = exact(x, weight, bias)
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    assert not weight.arrived.any()


@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(
    count=st.integers(1, 70),
    outputs=st.integers(1, 70),
    group=st.sampled_from((16, 32, 64, 96, 128, 256)),
    num_groups=st.integers(1, 6),
    dtype=st.sampled_from((torch.float32, torch.float16)),
    has_bias=st.booleans(),
)
def compare_kernels(  # noqa: PLR0913 - drawn
    count: int,
    outputs: int,
    group: int,
    num_groups: int,
    dtype: torch.dtype,
    *,
    has_bias: bool,
) -> None:
    torch.manual_seed(count)
    inputs = math.lcm(group, 64) * -(-num_groups * group // math.lcm(group, 64))
    weight = weight_of(outputs, inputs, inputs // group)
    check_kernel(weight, count, dtype, with_bias=has_bias)


def compare_many() -> None:
    """Slices that are added up, more tiles than programs could count, and a whole matrix."""
    from guided_spec.ops.linear import int4_linear_triton

    for count, outputs, inputs, groups in ((3, 64, 2048, 16), (48, 70, 2304, 1), (130, 60, 256, 8)):
        torch.manual_seed(count)
        weight = weight_of(outputs, inputs, groups)
        check_kernel(weight, count, torch.float16)
        for dtype in (torch.float32, torch.float16):
            whole = int4_linear_triton.multiply_out(weight, dtype)
            assert torch.equal(whole, multiply_out(weight, dtype))


@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize(("inputs", "groups"), [(12, 3), (64, 2), (24, 1), (96, 1), (512, 2)])
def test_each_number_has_the_factor_and_zero_of_its_group(
    inputs: int, groups: int, *, is_permuted: bool
) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(16, (5, inputs), dtype=torch.uint8)
    scales, zeros = torch.rand(groups, 5), torch.randint(16, (groups, 5), dtype=torch.uint8)
    order = torch.randperm(inputs) if is_permuted else torch.arange(inputs)
    weight = Int4Weight.of(numbers, scales, zeros, order if is_permuted else None)
    assert torch.equal(unpacked(weight), numbers)
    torch.testing.assert_close(weight.scales, scales, rtol=2e-6, atol=0)
    whole = multiply_out(weight, torch.float32)
    for row in range(5):
        for column in range(inputs):
            group = column // (inputs // groups)
            centered = int(numbers[row, column]) - int(zeros[group, row])
            assert whole[row, order[column]] == centered * weight.scales[group, row]
    x, bias = torch.randn(2, 3, inputs), torch.randn(5)
    found = int4_linear(x, weight, bias)
    torch.testing.assert_close(found, x @ whole.T + bias, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("is_permuted", [False, True])
def test_joined_weights_keep_their_factors(*, is_permuted: bool) -> None:
    torch.manual_seed(0)
    parts = [weight_of(size, 96, 3) for size in (8, 3, 1)]
    if is_permuted:
        order = torch.randperm(96)
        parts = [part._replace(order=order) for part in parts]
    assert len({part.form for part in parts}) == 1
    found = Int4Weight.joined(parts, torch.cat([part.values for part in parts]))
    expected = torch.cat([multiply_out(part, torch.float32) for part in parts])
    assert torch.equal(multiply_out(found, torch.float32), expected)


def test_weights_of_other_groups_and_orders_are_not_joined() -> None:
    forms = [weight_of(8, 96, groups, is_permuted=groups == 2).form for groups in (1, 2, 2, 3)]
    assert len(set(forms)) == 4


def test_shapes_that_do_not_fit_are_named() -> None:
    numbers = torch.zeros(4, 12, dtype=torch.uint8)
    with pytest.raises(
        ConfigError, match=r"numbers=\(4, 10\): must be \[O, I\], I a multiple of 4"
    ):
        Int4Weight.of(numbers[:, :10], torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.uint8))
    scales, zeros = torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"numbers=.*must be torch.uint8 of shape \[O, I\]"):
        Int4Weight.of(numbers.float(), scales, zeros)
    for wrong in (scales[:, :3], torch.ones(5, 4), scales[:0]):
        with pytest.raises(
            ConfigError, match=r"scales=.*must be \[G, 4\], in G equal groups of the 12"
        ):
            Int4Weight.of(numbers, wrong, zeros)
    for broken in (torch.nan, torch.inf):
        wrong = torch.full((3, 4), broken, dtype=torch.float16)
        with pytest.raises(ConfigError, match="scales='NaN or infinite': must be numbers"):
            Int4Weight.of(numbers, wrong, zeros)
    with pytest.raises(ConfigError, match=r"zeros=.*must be torch.uint8 of shape \(3, 4\)"):
        Int4Weight.of(numbers, scales, zeros.float())
    with pytest.raises(ConfigError, match=r"order=\(12,\): must be a permutation of \[12\]"):
        Int4Weight.of(numbers, scales, zeros, torch.zeros(12, dtype=torch.int64))
    weight = Int4Weight.of(numbers, scales, zeros)
    with pytest.raises(ConfigError, match=r"x=\(2, 9\): must be \[..., 12\]"):
        int4_linear(torch.randn(2, 9), weight)


def test_the_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
