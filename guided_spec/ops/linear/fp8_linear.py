"""Matrix products with weights in fp8: each number is one byte and a factor that many share.

The weights alone are rounded, as the checkpoint has them; the states they are multiplied with keep
their precision. So a text depends on the checkpoint, and neither on the device nor on its company
in the batch, up to the usual rounding. The torch code here is the definition; on CUDA devices that
can read fp8, kernels of ``guided_spec.ops.linear.fp8_linear_triton`` run.

The blocks of factors are those of DeepSeek-AI, "DeepSeek-V3 technical report" (2024), 3.3.2; one
factor for each output or for all of a matrix are blocks of a row, or of everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.ops.kernels import has_triton, kernels_of

FP8 = torch.float8_e4m3fn
COUNTED = 64  # outputs of a program of a kernel, or more


class Fp8Weight(NamedTuple):
    """values: float8_e4m3fn [O, I], contiguous. scales: float32, one for each block of values.

    scales: [ceil(O / block[0]), ceil(I / block[1])]; block (o, i) begins at value (o * block[0],
    i * block[1]). All on one device.
    arrived: int32 [ceil(O / COUNTED)], where programs of a kernel count each other; 0 between
    products. So a weight serves one stream at a time.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    arrived: Tensor

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, block: tuple[int, int]) -> Fp8Weight:
        """Checked, which waits for the device.

        Raises ConfigError for values of another dtype, or that are NaN, and for scales of another
        shape, or that are NaN or infinite.
        """
        if values.dtype != FP8 or values.dim() != 2:
            shown = f"{values.dtype} of shape {tuple(values.shape)}"
            raise ConfigError("values", shown, f"must be {FP8} of shape [O, I]")
        if bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ConfigError("values", "NaN", "must be numbers: get the checkpoint again")
        shape = scales_shape(values.shape, block)
        if tuple(scales.shape) != shape:
            raise ConfigError("scales", tuple(scales.shape), f"must be {shape} for blocks {block}")
        require_finite("scales", scales)
        return cls(values, scales, block, nobody_arrived(len(values), values.device))

    @classmethod
    def joined(cls, parts: Sequence[Fp8Weight], values: Tensor) -> Fp8Weight:
        """Several maps of the same inputs, concatenated, each number with its own factor.

        parts: whose blocks are equally wide. values: theirs, one tensor. Where a part ends within a
        block, every output gets factors of its own.
        """
        rows, columns = parts[0].block
        is_whole = all(part.block[0] == rows and len(part.values) % rows == 0 for part in parts)
        if is_whole:
            scales = torch.cat([part.scales for part in parts])
            return cls(values, scales, (rows, columns), nobody_arrived(len(values), values.device))
        spread = [
            part.scales.repeat_interleave(part.block[0], 0)[: len(part.values)] for part in parts
        ]
        return cls(
            values, torch.cat(spread), (1, columns), nobody_arrived(len(values), values.device)
        )

    @property
    def form(self) -> Hashable:
        """What is equal of weights that can be joined."""
        return "fp8", self.block[1]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``fp8_linear``."""
        return fp8_linear(x, self, bias)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """``whole_matrix``."""
        return whole_matrix(self, dtype)


def nobody_arrived(outputs: int, device: torch.device) -> Tensor:
    """Counters for the programs of a product, as ``Fp8Weight.arrived`` says."""
    return torch.zeros(-(-outputs // COUNTED), dtype=torch.int32, device=device)


def require_finite(name: str, scales: Tensor) -> None:
    """Raise ConfigError for scales that are NaN or infinite; waits for the device."""
    if not bool(scales.isfinite().all()):
        raise ConfigError(name, "NaN or infinite", "must be numbers: get the checkpoint again")


def scales_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a weight [O, I]: its blocks, rounded up."""
    rows, columns = (-(-size // step) for size, step in zip(shape, block, strict=True))
    return rows, columns


def multiply_out(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """[O, I]: values times their scales, worked out in float32 and rounded once to ``dtype``."""
    (rows, columns), (outputs, inputs) = weight.block, weight.values.shape
    scales = weight.scales.repeat_interleave(rows, 0)[:outputs]
    whole = weight.values.float()
    if weight.scales.shape[1] == 1:
        return (whole * scales).to(dtype)
    return (whole * scales.repeat_interleave(columns, 1)[:, :inputs]).to(dtype)


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
