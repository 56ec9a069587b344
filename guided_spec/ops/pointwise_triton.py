"""The pointwise operators as one kernel each: every number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.dependents_triton import follow, following

__all__ = ["add_rms_norm", "rms_norm", "silu_mul"]

BLOCK = 1024  # products a program of silu_mul


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``guided_spec.ops.pointwise.rms_norm``; the arguments on one CUDA device."""
    return _norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual, normed): see ``guided_spec.ops.pointwise.add_rms_norm``."""
    return _norm(x, residual, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See ``guided_spec.ops.pointwise.silu_mul``; rows may lie apart, as halves of a row do."""
    width = gate.shape[-1]
    gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
    product = gate.new_empty(gates.shape)
    if product.numel() > 0:
        grid = (len(gates), triton.cdiv(width, BLOCK))
        with torch.cuda.device_of(gate):  # Triton launches on the current device
            _silu_mul[grid](
                *(_dense(gates), _dense(ups), product, width),
                *(_dense(gates).stride(0), _dense(ups).stride(0), BLOCK),
                **following(gate),
            )
    return product.view(gate.shape)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm); (x, its norm) where there is no residual."""
    width = x.shape[-1]
    rows = _dense(x.reshape(-1, width))
    added = rows if residual is None else _dense(residual.reshape(-1, width))
    total = rows if residual is None else rows.new_empty(rows.shape)
    normed = rows.new_empty(rows.shape, dtype=torch.result_type(x, weight))
    block = triton.next_power_of_2(width)
    if normed.numel() > 0:
        with torch.cuda.device_of(x):
            _rms_norm[(len(rows),)](
                *(rows, added, weight.contiguous(), total, normed, eps, width),
                *(rows.stride(0), added.stride(0), residual is not None, block),
                num_warps=min(max(block // 512, 1), 16),
                **following(x),
            )
    return total.view(x.shape), normed.view(x.shape)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    residual,
    weight,
    total,
    normed,
    eps,
    width,
    x_row,
    residual_row,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    follow(FOLLOWS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    states = tl.load(x + row * x_row + column, mask=mask, other=0.0)
    if ADDS:
        added = tl.load(residual + row * residual_row + column, mask=mask, other=0.0)
        states = (states.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * width + column, states, mask=mask)
    wide = states.to(tl.float32)
    # The root rounded to nearest and a division: rsqrt alone is an approximation.
    root = tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    rounded = (wide * tl.div_rn(1.0, root)).to(states.dtype)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    result = rounded.to(tl.float32) * scale.to(tl.float32)
    tl.store(normed + row * width + column, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(  # type: ignore[no-untyped-def] # noqa: PLR0913
    gate, up, product, width, gate_row, up_row, BLOCK: tl.constexpr, FOLLOWS: tl.constexpr
):
    follow(FOLLOWS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    states = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    opened = tl.div_rn(states, 1.0 + tl.exp(-states)).to(product.dtype.element_ty)
    result = (opened.to(tl.float32) * factor).to(product.dtype.element_ty)
    tl.store(product + row * width + column, result, mask=mask)
