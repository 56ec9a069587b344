"""Products of few tokens with a weight: kernels that read it as fast as memory gives it.

A weight is written long before, so a program asks for its first part while the kernel before it
still runs: see ``guided_spec.ops.launch_triton``.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.linear.linear import MOST_TOKENS

ROWS, WIDEST, NARROWEST = 4, 2048, 512  # of one token: outputs, and inputs at once
WARPS = 8
TILE = (64, 128)  # of several tokens: outputs, and inputs at once
STAGES = 6
TILE_BYTES = (TILE[0] + MOST_TOKENS) * TILE[1] * 2 * STAGES  # in shared memory


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., O]: ``linear.linear`` for 1 to ``MOST_TOKENS`` tokens and a contiguous weight."""
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs).contiguous()
    product = x.new_empty(*x.shape[:-1], outputs)
    given = weight if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if len(rows) == 1:
            columns = _columns(inputs)
            launch(_one, (triton.cdiv(outputs, ROWS),), x)(
                *(rows, weight, given, product, outputs, inputs),
                *(bias is not None, inputs % columns == 0, ROWS, columns),
                num_warps=WARPS,
            )
        else:
            launch(_few, (triton.cdiv(outputs, TILE[0]),), x)(
                *(rows, weight, given, product, len(rows), outputs, inputs),
                *(bias is not None, inputs % TILE[1] == 0, MOST_TOKENS, *TILE, STAGES),
            )
    return product


@cache
def has_capacity(device: int) -> bool:
    """Whether a tile of several tokens fits into a multiprocessor of this CUDA device."""
    found: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return found >= TILE_BYTES


def _columns(inputs: int) -> int:
    """Inputs that one token's product takes at once: the most of those that waste the least.

    At least two parts, where it can be: what is read early must not be all.
    """
    most = max(WIDEST if inputs > WIDEST else inputs // 2, NARROWEST)
    widths = (NARROWEST << doubled for doubled in range((most // NARROWEST).bit_length()))
    return min(widths, key=lambda width: (triton.cdiv(inputs, width) * width, -width))


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _read(address, at, inputs, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers at ``address``; ``at``: their inputs, in the shape of ``address``."""
    if IS_EVEN:
        return tl.load(address)
    return tl.load(address, mask=at < inputs, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _one(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    weight,
    bias,
    product,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS outputs of one token."""
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Columns after the last output read the last one's, and are not written.
    row = tl.minimum(output, outputs - 1)
    at = tl.arange(0, COLUMNS)
    address = weight + row.to(tl.int64)[:, None] * inputs + at[None, :]
    read = _read(address, at[None, :], inputs, IS_EVEN)
    await_previous(IS_DEPENDENT)
    products = read.to(tl.float32) * _read(x + at, at, inputs, IS_EVEN).to(tl.float32)[None, :]
    for first in tl.range(COLUMNS, inputs, COLUMNS, num_stages=3):
        read = _read(address + first, at[None, :] + first, inputs, IS_EVEN)
        states = _read(x + first + at, at + first, inputs, IS_EVEN)
        products += read.to(tl.float32) * states.to(tl.float32)[None, :]
    result = tl.sum(products, 1)
    if HAS_BIAS:
        result += tl.load(bias + row).to(tl.float32)
    tl.store(product + output, result.to(product.dtype.element_ty), mask=output < outputs)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _few(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    weight,
    bias,
    product,
    count,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS outputs of ``count`` tokens."""
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(output, outputs - 1)
    at, token = tl.arange(0, COLUMNS), tl.arange(0, TOKENS)
    address = weight + row.to(tl.int64)[:, None] * inputs + at[None, :]
    state = x + tl.minimum(token, count - 1)[None, :] * inputs + at[:, None]
    await_previous(IS_DEPENDENT)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in tl.range(0, inputs, COLUMNS, num_stages=STAGES):
        read = _read(address + first, at[None, :] + first, inputs, IS_EVEN)
        states = _read(state + first, at[:, None] + first, inputs, IS_EVEN)
        total = tl.dot(read, states, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    target = product + token[None, :] * outputs + output[:, None]
    is_there = (output < outputs)[:, None] & (token < count)[None, :]
    tl.store(target, total.to(product.dtype.element_ty), mask=is_there)
