"""The steps of chosen experts as one kernel each, which are laid out for reading the matrices.

Few tokens wait for their experts to be read. So a program has some outputs of one expert, or of one
token's experts in turn, and reads ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.expert_matrices import Gating, Projection, Routes
from guided_spec.ops.launch_triton import await_previous, launch

__all__ = ["close_experts", "open_experts", "route"]

ROWS = 8  # outputs of a program
OPENING_COLUMNS, CLOSING_COLUMNS = 512, 1024  # inputs that it reads at once, at most
STAGES = 3


def route(logits: Tensor, count: int, *, is_normalized: bool) -> Routes:
    """See ``guided_spec.ops.routed_experts.route``; on one CUDA device."""
    rows, num_experts = logits.shape
    experts = logits.new_empty(rows, count, dtype=torch.int64)
    shares = logits.new_empty(rows, count, dtype=torch.float32)
    if rows > 0:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            launch(_route, (rows,), logits)(
                *(logits.contiguous(), experts, shares, num_experts),
                *(count, is_normalized, triton.next_power_of_2(num_experts)),
                num_warps=1,
            )
    return Routes(experts, shares)


def open_experts(x: Tensor, experts: Tensor, opening: Projection, gating: Gating) -> Tensor:
    """See ``guided_spec.ops.routed_experts.open_experts``; the arguments on one CUDA device."""
    (outputs, inputs), width = opening.weight.shape[1:], opening.weight.shape[1] // 2
    opened = x.new_empty(*experts.shape, width)
    columns = min(OPENING_COLUMNS, triton.next_power_of_2(inputs))
    weight, bias = opening.weight, opening.weight if opening.bias is None else opening.bias
    limit = 0.0 if gating.limit is None else gating.limit
    step, behind = (2, 1) if gating.is_interleaved else (1, width)
    if opened.numel() > 0:
        with torch.cuda.device_of(x):
            launch(_open, (experts.numel(), triton.cdiv(width, ROWS)), x)(
                *(x.contiguous(), experts.contiguous(), weight, bias, opened, experts.shape[1]),
                *(outputs, width, step, behind, gating.alpha, limit, inputs),
                *(opening.bias is not None, gating.limit is not None, ROWS, columns, STAGES),
            )
    return opened


def close_experts(opened: Tensor, routes: Routes, closing: Projection) -> Tensor:
    """See ``guided_spec.ops.routed_experts.close_experts``; the arguments on one CUDA device."""
    (outputs, inputs), count = closing.weight.shape[1:], routes.experts.shape[1]
    total = opened.new_empty(len(opened), outputs)
    columns = min(CLOSING_COLUMNS, triton.next_power_of_2(inputs))
    weight, bias = closing.weight, closing.weight if closing.bias is None else closing.bias
    if total.numel() > 0:
        with torch.cuda.device_of(opened):
            launch(_close, (len(opened), triton.cdiv(outputs, ROWS)), opened)(
                *(opened.contiguous(), *routes, weight, bias),
                *(total, outputs, inputs, count, closing.bias is not None, ROWS, columns, STAGES),
            )
    return total


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def] # noqa: PLR0913
    logits,
    experts,
    shares,
    num_experts,
    COUNT: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One token's: the largest, then the largest of the others."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    scores = tl.load(logits + token * num_experts + at, mask=at < num_experts, other=float("-inf"))
    scores = scores.to(tl.float32)
    largest = tl.max(scores, 0)
    total = tl.sum(tl.exp(scores - largest), 0)
    if IS_NORMALIZED:
        total = 0.0
        left = scores
        for _ in tl.static_range(COUNT):
            best = tl.argmax(left, 0)
            total += tl.exp(tl.max(left, 0) - largest)
            left = tl.where(at == best, float("-inf"), left)
    for number in tl.static_range(COUNT):
        best = tl.argmax(scores, 0)
        share = tl.div_rn(tl.exp(tl.max(scores, 0) - largest), total)
        tl.store(experts + token * COUNT + number, best.to(tl.int64))
        tl.store(shares + token * COUNT + number, share)
        scores = tl.where(at == best, float("-inf"), scores)


@triton.jit  # type: ignore[untyped-decorator]
def _open(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    experts,
    weight,
    bias,
    opened,
    served,
    outputs,
    width,
    step,
    behind,
    alpha,
    limit,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS results of one token and one expert."""
    await_previous(IS_DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + pair)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_there = output < width
    # What is behind the last output reads the last one's, and is not written.
    gate_row = tl.minimum(output, width - 1) * step
    first_gate = weight + (expert * outputs + gate_row)[:, None] * INPUTS
    first_up = first_gate + behind * INPUTS
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, INPUTS, COLUMNS, num_stages=STAGES):
        at = first + tl.arange(0, COLUMNS)
        inside = (at < INPUTS)[None, :]
        states = tl.load(x + pair // served * INPUTS + at, mask=at < INPUTS, other=0.0)
        wide = states.to(tl.float32)[None, :]
        gate += tl.load(first_gate + at[None, :], mask=inside, other=0.0).to(tl.float32) * wide
        up += tl.load(first_up + at[None, :], mask=inside, other=0.0).to(tl.float32) * wide
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if HAS_BIAS:
        place = bias + expert * outputs + gate_row
        gate_sum += tl.load(place).to(tl.float32)
        up_sum += tl.load(place + behind).to(tl.float32)
    if HAS_LIMIT:
        gate_sum = tl.minimum(gate_sum, limit)
        up_sum = tl.minimum(tl.maximum(up_sum, -limit), limit) + 1.0
        result = gate_sum * tl.div_rn(1.0, 1.0 + tl.exp(-alpha * gate_sum)) * up_sum
    else:
        result = tl.div_rn(gate_sum, 1.0 + tl.exp(-gate_sum)) * up_sum
    target = opened + pair * width + output
    tl.store(target, result.to(opened.dtype.element_ty), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def _close(  # type: ignore[no-untyped-def] # noqa: PLR0913
    opened,
    experts,
    shares,
    weight,
    bias,
    total,
    outputs,
    INPUTS: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS results of one token: all of its experts, slice by slice."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_there = output < outputs
    row = tl.minimum(output, outputs - 1).to(tl.int64)
    slices: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in tl.range(0, COUNT * slices, num_stages=STAGES):
        pair = token * COUNT + number // slices
        expert, share = tl.load(experts + pair), tl.load(shares + pair)
        at = number % slices * COLUMNS + tl.arange(0, COLUMNS)
        states = tl.load(opened + pair * INPUTS + at, mask=at < INPUTS, other=0.0)
        place = weight + (expert * outputs + row)[:, None] * INPUTS + at[None, :]
        read = tl.load(place, mask=(at < INPUTS)[None, :], other=0.0)
        products += read.to(tl.float32) * (states.to(tl.float32) * share)[None, :]
    result = tl.sum(products, 1)
    if HAS_BIAS:
        for number in range(COUNT):
            pair = token * COUNT + number
            place = bias + tl.load(experts + pair) * outputs + row
            result += tl.load(place).to(tl.float32) * tl.load(shares + pair)
    target = total + token * outputs + output
    tl.store(target, result.to(total.dtype.element_ty), mask=is_there)
