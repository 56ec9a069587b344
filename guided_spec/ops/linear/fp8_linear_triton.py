"""Products with fp8 weights as one kernel for few tokens; for many, the weight is multiplied out.

Few tokens wait for the weights to be read, so the kernel is laid out for reading them: many
programs, each with a slice of inputs of some outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.linear.fp8_linear import COUNTED, Fp8Weight
from guided_spec.ops.linear.slices_triton import Slices, is_last_slice, sum_of_slices

MOST_TOKENS = 256  # above which a product takes longer than multiplying its weight out
PROGRAMS = 264  # two for each of an H100's multiprocessors
WIDEST_STEP = 128


class Tiling(NamedTuple):
    """outputs, tokens: of a program. step: inputs that it takes at once."""

    outputs: int
    tokens: int
    step: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, count: int, weight: Fp8Weight) -> Tiling:
        """The tiling for a product of ``count`` tokens."""
        width, inputs = weight.block[1], weight.values.shape[1]
        step = WIDEST_STEP if width >= inputs else min(WIDEST_STEP, width)
        if count <= 16:
            return cls(COUNTED, 16, step, 4, 5)
        if count <= 64:
            return cls(COUNTED, 32 if count <= 32 else 64, step, 4, 4)
        return cls(2 * COUNTED, 128, step, 8, 3)


def serves(weight: Fp8Weight) -> bool:
    """Whether the kernels can take blocks of this width: whole steps fit into one."""
    width, inputs = weight.block[1], weight.values.shape[1]
    return width >= inputs or width % WIDEST_STEP == 0 or width in (16, 32, 64)


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """[..., O]: ``guided_spec.ops.linear.fp8_linear`` with the arguments on one CUDA device."""
    outputs, inputs = weight.values.shape
    rows = x.reshape(-1, inputs)
    if len(rows) > MOST_TOKENS:
        return functional.linear(x, multiply_out(weight, x.dtype), bias)
    return multiply(rows.contiguous(), weight, bias).view(*x.shape[:-1], outputs)


def multiply_out(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """The whole matrix [O, I] in ``dtype``; see ``fp8_linear.multiply_out``."""
    outputs, inputs = weight.values.shape
    whole = torch.empty(outputs, inputs, dtype=dtype, device=weight.values.device)
    tile, width = (32, WIDEST_STEP), weight.block[1]
    is_one = width >= inputs or width % WIDEST_STEP == 0
    with torch.cuda.device_of(whole):  # Triton launches on the current device
        launch(_multiply_out, (triton.cdiv(outputs, tile[0]), triton.cdiv(inputs, tile[1])), whole)(
            *(weight.values, weight.scales, whole, outputs, inputs),
            *(*weight.block, weight.scales.shape[1], is_one, *tile),
        )
    return whole


def multiply(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """``fp8_linear`` of rows [N, I], contiguous, by the kernel that reads the weight as it is."""
    (outputs, inputs), count = weight.values.shape, len(x)
    product = x.new_empty(count, outputs)
    if count == 0:
        return product
    tiling = Tiling.of(count, weight)
    tiles = triton.cdiv(count, tiling.tokens), triton.cdiv(outputs, tiling.outputs)
    steps = triton.cdiv(inputs, tiling.step)
    slices = Slices.of(tiles, steps, PROGRAMS, len(weight.arrived))
    parts = slices.parts(product)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        launch(_fp8_linear, (*tiles, slices.number), x)(
            *(x, weight.values, weight.scales, product if bias is None else bias.contiguous()),
            *(product, parts, weight.arrived, count, outputs, inputs, slices.steps * tiling.step),
            *(*weight.block, weight.scales.shape[1]),
            *(bias is not None, slices.number > 1, inputs % tiling.step == 0, *tiling[:3]),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    return product


# Triton reads annotations as its own, so the arguments have none.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _fp8_linear(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    values,
    scales,
    bias,
    product,
    parts,
    arrived,
    count,
    outputs,
    inputs,
    span,
    block_rows,
    block_columns,
    scale_columns,
    HAS_BIAS: tl.constexpr,
    IS_SLICED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One slice of inputs of some outputs, for some tokens."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_written = token < count, (output < outputs)[:, None] & (token < count)[None, :]
    # Columns after the last output read the last one's, and are not written.
    there = tl.minimum(output, outputs - 1)
    row = values + there.to(tl.int64)[:, None] * inputs
    state = x + token.to(tl.int64)[None, :] * inputs
    scale_row = scales + (there // block_rows).to(tl.int64) * scale_columns
    first = tl.program_id(2) * span
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for begin in range(first, tl.minimum(first + span, inputs), STEP):
        at = begin + tl.arange(0, STEP)
        if IS_EVEN:
            weight = tl.load(row + at[None, :])
            states = tl.load(state + at[:, None], mask=is_token[None, :], other=0.0)
        else:
            inside = at < inputs
            weight = tl.load(row + at[None, :], mask=inside[None, :], other=0.0)
            states = tl.load(
                state + at[:, None], mask=inside[:, None] & is_token[None, :], other=0.0
            )
        found = tl.dot(weight.to(states.dtype), states, input_precision="ieee")
        total += found * tl.load(scale_row + begin // block_columns)[:, None]
    element = token.to(tl.int64)[None, :] * outputs + output[:, None]
    if IS_SLICED:
        whole = count.to(tl.int64) * outputs
        number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        part = parts + tl.program_id(2) * whole + element
        if not is_last_slice(total, part, arrived + number, is_written):
            return
        total = sum_of_slices(parts + element, whole, is_written)
    if HAS_BIAS:
        total += tl.load(bias + there).to(tl.float32)[:, None]
    tl.store(product + element, total.to(product.dtype.element_ty), mask=is_written)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_out(  # type: ignore[no-untyped-def] # noqa: PLR0913
    values,
    scales,
    whole,
    outputs,
    inputs,
    block_rows,
    block_columns,
    scale_columns,
    IS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A tile; IS_ONE: all of its columns have the scale of the first one."""
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = (row < outputs)[:, None] & (column < inputs)[None, :]
    row = tl.minimum(row, outputs - 1)
    element = row.to(tl.int64)[:, None] * inputs + column[None, :]
    scale_row = scales + (row // block_rows) * scale_columns
    if IS_ONE:
        scale = tl.load(scale_row + tl.program_id(1) * COLUMNS // block_columns)[:, None]
    else:
        block = (column // block_columns)[None, :]
        scale = tl.load(scale_row[:, None] + block, mask=is_there, other=0.0)
    found = tl.load(values + element, mask=is_there, other=0.0).to(tl.float32) * scale
    tl.store(whole + element, found.to(whole.dtype.element_ty), mask=is_there)
