"""Products with fp8 weights as one kernel for few tokens; for many, the weight is multiplied out.

Few tokens wait for the weights to be read, so the kernel is laid out for reading them: many
programs, each with a slice of inputs of some outputs. For bfloat16 the bits of a weight are moved,
since devices convert fp8 to float16 alone: sign, exponent and mantissa of e4m3 stand in those of a
bfloat16 that is 2 ** -120 times the number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton import knobs

from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.linear.fp8_linear import COUNTED, Fp8Weight
from guided_spec.ops.linear.slices_triton import Slices, is_last_slice, sum_of_slices

MOST_TOKENS = 256  # above which a product takes longer than multiplying its weight out
MULTIPROCESSORS = 132  # of an H200
WIDEST_STEP = 128


class Tiling(NamedTuple):
    """outputs, tokens: of a program. step: inputs that it takes at once.

    per_multiprocessor: programs, about. moves_bits: whether it converts to bfloat16 that way.
    """

    outputs: int
    tokens: int
    step: int
    num_warps: int
    num_stages: int
    per_multiprocessor: int
    moves_bits: bool

    @classmethod
    def of(cls, count: int, weight: Fp8Weight) -> Tiling:
        """The tiling for a product of ``count`` tokens."""
        width, inputs = weight.block[1], weight.values.shape[1]
        step = WIDEST_STEP if width >= inputs else min(WIDEST_STEP, width)
        if count <= 16:
            return cls(COUNTED, 16, step, 2, 4, 4, moves_bits=True)
        if count <= 32:
            return cls(COUNTED, 32, step, 4, 3, 4, moves_bits=False)
        if count <= 64:
            return cls(COUNTED, 64, step, 4, 3, 2, moves_bits=False)
        return cls(COUNTED, 128, step, 4, 3, 2, moves_bits=True)


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
    programs = MULTIPROCESSORS * tiling.per_multiprocessor
    slices = Slices.of(tiles, steps, programs, len(weight.arrived))
    moves_bits = tiling.moves_bits and x.dtype == torch.bfloat16
    parts = slices.parts(product)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        launch(_fp8_linear, (*tiles, slices.number), x)(
            *(x, weight.values.view(torch.uint8) if moves_bits else weight.values, weight.scales),
            *(product if bias is None else bias.contiguous(), product, parts, weight.arrived),
            *(
                count,
                outputs,
                inputs,
                slices.steps * tiling.step,
                *weight.block,
                weight.scales.shape[1],
            ),
            *(bias is not None, slices.number > 1, inputs % tiling.step == 0),
            *(moves_bits, _has_asm(), tiling.outputs, tiling.tokens, tiling.step),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    return product


def _has_asm() -> bool:
    return torch.version.cuda is not None and not knobs.runtime.interpret


# Four weights of a word: two go to the upper bytes of halves of another, by prmt; there the sign
# stays, and the rest moves past the upper bits of the exponent. A multiplication with 2 ** 120 is
# exact. There are no halves of multiplications before compute capability 9.0, but sums of them.
_TWO = (
    "prmt.b32 t, $2, n, {bytes}; shr.b32 u, t, 4; and.b32 t, t, 0x80008000;"
    " lop3.b32 u, u, 0x07F007F0, t, 0xEA; fma.rn.bf16x2 {out}, u, p, z;"
)
_FOUR = tl.constexpr(
    "{ .reg .b32 t, u, n, p, z; mov.b32 n, 0; mov.b32 p, 0x7B807B80; mov.b32 z, 0x80008000; "
    + _TWO.format(bytes="0x1404", out="$0")
    + _TWO.format(bytes="0x3424", out="$1")
    + " }"
)


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def bfloat16_of(values, HAS_ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The e4m3 numbers of bytes. NaN, which ``Fp8Weight`` has none of, becomes a number."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            _FOUR, "=r,=r,r", args=[values], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        bits = values.to(tl.uint32)  # of a float32: Triton's interpreter rounds small bfloat16
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        found = (bits.to(tl.float32, bitcast=True) * 2.0**120).to(tl.bfloat16)
    return found


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
    MOVES_BITS: tl.constexpr,
    HAS_ASM: tl.constexpr,
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
        weight = bfloat16_of(weight, HAS_ASM) if MOVES_BITS else weight.to(states.dtype)
        found = tl.dot(weight, states, input_precision="ieee")
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
