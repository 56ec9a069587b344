"""The products of few rows with the matrices of their experts, as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import await_previous, launch

__all__ = ["expert_linear"]

# Outputs and inputs of a tile: wide where the weights lie behind one another in memory.
INPUTS_FIRST = (16, 512)
OUTPUTS_FIRST = (64, 64)


def expert_linear(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See ``guided_spec.ops.linear.expert_linear``; the arguments on one CUDA device."""
    pairs, (outputs, inputs) = len(experts), weight.shape[1:]
    product = x.new_empty(pairs, outputs)
    tile = INPUTS_FIRST if weight.stride(2) == 1 else OUTPUTS_FIRST
    x, given = x.contiguous(), weight if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):  # Triton launches on the current device
        launch(_expert_linear, (triton.cdiv(outputs, tile[0]), pairs), x)(
            *(x, experts.contiguous(), weight, given, product, *weight.stride()),
            *(pairs // len(x), outputs, inputs, bias is not None, *tile),
        )
    return product


# Triton reads annotations as its own, so the arguments have none.
@triton.jit(do_not_specialize=["served"])  # type: ignore[untyped-decorator]
def _expert_linear(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    experts,
    weight,
    bias,
    product,
    of_expert,
    of_output,
    of_input,
    served,
    outputs,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS outputs of one pair."""
    await_previous(IS_DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + pair).to(tl.int64)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = output < outputs
    row = weight + expert * of_expert + output.to(tl.int64)[:, None] * of_output
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, INPUTS, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        states = tl.load(x + pair // served * INPUTS + at, mask=at < INPUTS, other=0.0)
        mask = is_there[:, None] & (at < INPUTS)[None, :]
        tile = tl.load(row + at[None, :] * of_input, mask=mask, other=0.0)
        total += tile.to(tl.float32) * states.to(tl.float32)[None, :]
    found = tl.sum(total, 1)
    if HAS_BIAS:
        found += tl.load(bias + expert * outputs + output, mask=is_there, other=0.0).to(tl.float32)
    target = product + pair * outputs + output
    tl.store(target, found.to(product.dtype.element_ty), mask=is_there)
