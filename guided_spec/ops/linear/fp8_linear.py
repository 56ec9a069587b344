"""Matrix products with weights in fp8.

The weights alone are rounded, as the checkpoint has them; the states they are multiplied with keep
their precision. So a text depends on the checkpoint, and neither on the device nor on its company
in the batch, up to the usual rounding. The torch code here is the definition; on CUDA devices that
can read fp8, kernels of ``guided_spec.ops.linear.fp8_linear_triton`` run.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.ops.kernels import has_triton, kernels_of
from guided_spec.ops.linear.fp8_weight import Fp8Weight, multiply_out

__all__ = ["can_read_fp8", "fp8_linear", "whole_matrix"]

FIRST_CAPABILITY = (8, 9)  # that converts fp8


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """[..., O]: x [..., I] times the weight, plus the bias [O].

    x, bias: of one floating dtype, that of the result. Sums in float32. Never waits for the device.

    Raises ConfigError for an x of another width.
    """
    if x.shape[-1] != weight.values.shape[1]:
        raise ConfigError("x", tuple(x.shape), f"must be [..., {weight.values.shape[1]}]")
    if _has_kernels(x, weight):
        found: Tensor = kernels_of(__name__).fp8_linear(x, weight, bias)
        return found
    return functional.linear(x, multiply_out(weight, x.dtype), bias)


def _has_kernels(x: Tensor, weight: Fp8Weight) -> bool:
    is_read = x.is_cuda and can_read_fp8(x.get_device())
    return is_read and bool(kernels_of(__name__).serves(weight))


def whole_matrix(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """``multiply_out``, by a kernel where there is one."""
    multiply = multiply_out
    if _has_kernels(weight.values, weight):
        multiply = kernels_of(__name__).multiply_out
    return multiply(weight, dtype)


@cache
def can_read_fp8(device: int) -> bool:
    """Whether kernels can, on the CUDA device of this number."""
    is_nvidia = torch.version.cuda is not None and has_triton()
    return is_nvidia and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
