"""Products with int4 weights as one kernel for few tokens; for many, the weight is multiplied out.

Few tokens wait for the weights to be read: see ``guided_spec.ops.linear.fp8_linear_triton``. A
number becomes floating by its bits alone: 4 of them, below the exponent of a power of two, are that
power and the number. Less the power and the zero point they are exact; the scale of a group is that
of its sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton import knobs

from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.linear.int4_linear import IN_WORD, Int4Weight
from guided_spec.ops.linear.slices_triton import Slices, is_last_slice, sum_of_slices

MOST_TOKENS = 192  # above which a product takes longer than multiplying its weight out
PROGRAMS = 264  # two for each of an H200's multiprocessors
NARROWEST_TILE = 64  # whose quarters a tensor core takes


class Tiling(NamedTuple):
    """outputs, tokens: of a program, which takes a tile of inputs at once."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, count: int) -> Tiling:
        """The tiling for a product of ``count`` tokens."""
        if count <= 16:
            return cls(64, 16, 2, 4)
        if count <= 64:
            return cls(64, 32 if count <= 32 else 64, 4, 3)
        return cls(128, 128, 8, 3)


def serves(weight: Int4Weight) -> bool:
    """Whether the kernels can take tiles of this width."""
    return weight.tile >= NARROWEST_TILE


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """[..., O]: ``int4_linear.int4_linear`` on one CUDA device, for inputs as they are stored."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > MOST_TOKENS:
        return functional.linear(x, multiply_out(weight, x.dtype), bias)
    return multiply(rows.contiguous(), weight, bias).view(*x.shape[:-1], len(weight.values))


def multiply_out(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """[O, I] in ``dtype``, inputs as they are stored; see ``int4_linear.multiply_out``."""
    outputs, inputs = len(weight.values), weight.inputs
    whole = torch.empty(outputs, inputs, dtype=dtype, device=weight.values.device)
    rows = 32
    with torch.cuda.device_of(whole):  # Triton launches on the current device
        launch(_multiply_out_int4, (triton.cdiv(outputs, rows), inputs // weight.tile), whole)(
            *(weight.values, weight.factors, whole, outputs, inputs),
            *(weight.group, rows, weight.tile // IN_WORD),
        )
    return whole


def multiply(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, tiling: Tiling | None = None
) -> Tensor:
    """``int4_linear`` of rows [N, I], contiguous, by the kernel that reads the weight as it is.

    tiling: that of ``Tiling.of`` unless given.
    """
    (count, inputs), outputs = x.shape, len(weight.values)
    product = x.new_empty(count, outputs)
    if count == 0:
        return product
    tiling = tiling or Tiling.of(count)
    tiles = triton.cdiv(count, tiling.tokens), triton.cdiv(outputs, tiling.outputs)
    steps, quarter = inputs // weight.tile, weight.tile // IN_WORD
    slices = Slices.of(tiles, steps, PROGRAMS, len(weight.arrived))
    parts = slices.parts(product)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        launch(_int4_linear, (*tiles, slices.number), x)(
            *(x, weight.values, weight.factors),
            *(product if bias is None else bias.contiguous(), product, parts, weight.arrived),
            *(count, outputs, inputs // IN_WORD, slices.steps * quarter, weight.group),
            *(bias is not None, slices.number > 1, _can_take_two(), tiling.outputs, tiling.tokens),
            *(quarter, math.gcd(weight.group // quarter, IN_WORD)),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    return product


def _can_take_two() -> bool:
    return torch.version.cuda is not None and not knobs.runtime.interpret


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _power(kind: tl.dtype) -> int:
    """The bits of a power of two whose last 4 bits count ones; 0 where a conversion is as fast."""
    return {"bf16": 0x4300, "fp16": 0x6400}.get(kind.name, 0)


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _raised(  # type: ignore[no-untyped-def]
    words, SHIFT: tl.constexpr, KIND: tl.constexpr, BY_TWO: tl.constexpr
):
    """4 bits of each word as floating numbers, plus ``_power``.

    BY_TWO: words are of 16 bits, and two are taken at once, in code for NVIDIA.
    """
    POWER: tl.constexpr = _power(KIND)
    if POWER == 0:
        raised = ((words >> SHIFT) & 0xF).to(KIND)
    else:
        if BY_TWO:
            BOTH: tl.constexpr = POWER * 0x10001
            bits = tl.inline_asm_elementwise(  # shifted, (words & mask) | powers
                f"{{ .reg .b32 w; shr.b32 w, $1, {SHIFT};"
                f" lop3.b32 $0, w, 0x000F000F, {BOTH}, 0xEA; }}",
                constraints="=r,r",
                args=[words],
                dtype=tl.uint16,
                is_pure=True,
                pack=2,
            )
        else:
            bits = ((words >> SHIFT) & 0xF).to(tl.uint16) | POWER
        raised = bits.to(KIND, bitcast=True)
    return raised


@triton.jit
def _scale(factor):  # type: ignore[no-untyped-def]
    return (factor & ~0xF).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _int4_linear(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    values,
    factors,
    bias,
    product,
    parts,
    arrived,
    count,
    outputs,
    width,
    span,
    group,
    HAS_BIAS: tl.constexpr,
    IS_SLICED: tl.constexpr,
    BY_TWO: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    QUARTER: tl.constexpr,
    QUARTERS_OF_GROUP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One slice of inputs of some outputs, for some tokens."""
    await_previous(IS_DEPENDENT)
    KIND: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_written = token < count, (output < outputs)[:, None] & (token < count)[None, :]
    # Columns after the last output read the last one's, and are not written.
    there = tl.minimum(output, outputs - 1)
    at = tl.arange(0, QUARTER)
    row = values + there.to(tl.int64)[:, None] * width + at[None, :]
    state = x + token.to(tl.int64)[None, :] * (4 * width) + at[:, None]
    first = tl.program_id(2) * span
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for word in range(first, tl.minimum(first + span, width), QUARTER):
        words = tl.load(row + word).to(tl.uint16, bitcast=True)
        factor = tl.load(factors + (4 * word // group) * outputs + there)
        found = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for quarter in tl.static_range(4):
            input = 4 * word + quarter * QUARTER
            states = tl.load(state + input, mask=is_token[None, :], other=0.0)
            if quarter % QUARTERS_OF_GROUP == 0 and quarter > 0:
                total += found * _scale(factor)[:, None]
                found = tl.zeros([OUTPUTS, TOKENS], tl.float32)
                factor = tl.load(factors + (input // group) * outputs + there)
            zero = _raised(factor & 0xF, 0, KIND, BY_TWO=False)
            weight = _raised(words, 4 * quarter, KIND, BY_TWO) - zero[:, None]
            found = tl.dot(weight, states, found, input_precision="ieee")
        total += found * _scale(factor)[:, None]
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
def _multiply_out_int4(  # type: ignore[no-untyped-def] # noqa: PLR0913
    values,
    factors,
    whole,
    outputs,
    inputs,
    group,
    ROWS: tl.constexpr,
    QUARTER: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A tile of inputs of some outputs."""
    await_previous(IS_DEPENDENT)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = (output < outputs)[:, None]
    there = tl.minimum(output, outputs - 1)
    begin, at = tl.program_id(1) * 4 * QUARTER, tl.arange(0, QUARTER)
    row = values + there.to(tl.int64)[:, None] * (inputs // 4) + begin // 4
    words = tl.load(row + at[None, :]).to(tl.uint16, bitcast=True)
    for quarter in tl.static_range(4):
        here = begin + quarter * QUARTER
        factor = tl.load(factors + (here // group) * outputs + there)
        zero = factor & 0xF
        found = ((words >> (4 * quarter)) & 0xF).to(tl.float32) - zero.to(tl.float32)[:, None]
        found = found * _scale(factor)[:, None]
        target = whole + there.to(tl.int64)[:, None] * inputs + here + at[None, :]
        tl.store(target, found.to(whole.dtype.element_ty), mask=is_there)
