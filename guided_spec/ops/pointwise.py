"""The small steps between a decoder's matrix products, each as one function.

The torch code here is the definition and rounds where transformers' Llama modules round, so that a
forward made of these gives what the modules give; on CUDA, one kernel of
``guided_spec.ops.pointwise_triton`` does each. For inference: they have no gradient.

Rotary position embedding of packed heads, and their keys and values put into the slots.

Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021), in the halves
form of transformers: (a, b) -> (a cos - b sin, b cos + a sin) with b half a head after a.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from guided_spec.ops.attention.slot_attention import (
    HeadNorms,
    KeyValues,
    QkvShape,
    Rotation,
    SlotIndex,
    store_keys_values,
)
from guided_spec.ops.kernels import has_triton, kernels_of


class AddedNorm(NamedTuple):
    """residual: [..., H], the sum. normed: [..., H], its norm times the weight."""

    residual: Tensor
    normed: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """[..., H]: x over its root mean square, times the weight (Zhang and Sennrich, 2019).

    x: [..., H]; weight: [H], of one floating dtype. In float32, rounded to the dtype of ``x``
    before the weight. shift: added to the weight in float32, as of Gemma, where 1 is; then the
    product alone is rounded, to the dtype of ``x``.
    """
    normed: Tensor = (kernels_of(__name__).rms_norm if _serves(x) else _norm)(x, weight, eps, shift)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float = 0.0
) -> AddedNorm:
    """The sum of x and residual [..., H], rounded to their dtype, and ``rms_norm`` of it."""
    if _serves(x):
        return AddedNorm(*kernels_of(__name__).add_rms_norm(x, residual, weight, eps, shift))
    total = (x + residual).contiguous()
    return AddedNorm(total, _norm(total, weight, eps, shift))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """[..., I]: silu(gate) * up; gate, up: [..., I] of one floating dtype.

    silu(x) = x / (1 + exp(-x)) is worked out in float32 and rounded before the product.
    """
    product: Tensor = kernels_of(__name__).silu_mul(gate, up) if _serves(gate) else silu(gate) * up
    return product.contiguous()


def silu_mul_packed(gate_up: Tensor) -> Tensor:
    """[..., I]: ``silu_mul`` of the two halves of gate_up [..., 2 * I]."""
    gate, up = gate_up.chunk(2, -1)
    return silu_mul(gate, up)


def _norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if shift:
        return (wide * (shift + weight.float())).to(x.dtype).contiguous()
    return (weight * wide.to(x.dtype)).contiguous()


def _serves(states: Tensor) -> bool:
    return states.is_cuda and has_triton()


def rotate_and_store(
    packed: Tensor,
    rotation: Rotation,
    shape: QkvShape,
    norms: HeadNorms | None,
    buffers: KeyValues,
    index: SlotIndex,
) -> Tensor:
    """Norm (where there are norms) and rotate queries and keys, and keep keys and values.

    packed: [N, shape.width], contiguous, modified. rotation: of all positions, or on their axes.
    buffers: the layer's blocks, written to as ``slot_attention`` says. index: where the tokens go,
        and their positions.

    Returns the queries [N, Hq, D], a view of ``packed``. Computes in float32 and rounds once.
    On CUDA one kernel; never waits for the device.
    """
    first = shape.stride * shape.queries
    heads: Tensor = packed.unflatten(1, (first + 2 * shape.keys, shape.size))
    queries, key, value = heads.split([first, shape.keys, shape.keys], 1)
    query: Tensor = queries[:, ::2] if shape.has_gates else queries
    if _serves(packed):
        kernels_of(__name__).rotate_and_store(packed, rotation, shape, norms, buffers, index)
        return query
    at = rotation.at(index)
    if shape.has_gates:
        turned = _rotate(torch.cat([query, key], 1), at, shape, norms)
        query.copy_(turned[:, : shape.queries])
        key.copy_(turned[:, shape.queries :])
    else:
        both = heads[:, : first + shape.keys]
        both.copy_(_rotate(both, at, shape, norms))
    store_keys_values(KeyValues(key, value), buffers, index)
    return query


def _rotate(heads: Tensor, rotation: Rotation, shape: QkvShape, norms: HeadNorms | None) -> Tensor:
    """[N, Hq + Hkv, D] rotated by [N, R], float32."""
    values = heads.float()
    if norms is not None:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norms.eps)
        weights = [norms.query.expand(shape.queries, -1), norms.key.expand(shape.keys, -1)]
        values = values * torch.cat(weights).float()
    width = rotation.cos.shape[1]
    moving = values if width == shape.size else values[..., :width]
    low, high = moving.chunk(2, -1)
    cos, sin = (part.float().unsqueeze(1) for part in rotation[:2])
    turned: Tensor = moving * cos + torch.cat([-high, low], -1) * sin
    return turned if width == shape.size else torch.cat([turned, values[..., width:]], -1)
