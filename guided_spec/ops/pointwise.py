"""The small steps between a decoder's matrix products, each as one function.

The torch code here is the definition and rounds where transformers' Llama modules round, so that a
forward made of these gives what the modules give; on CUDA, one kernel of
``guided_spec.ops.pointwise_triton`` does each. For inference: they have no gradient.

Rotary position embedding of packed heads, and their keys and values put into the slots.

Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021), in the halves
form of transformers: (a, b) -> (a cos - b sin, b cos + a sin) with b half a head after a; or in
that of the paper, with b next to a.
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


RowNorm = tuple[Tensor, float, float | None]
"""What ``rms_norm`` takes after the states: weight [H], epsilon, shift."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float | None = None) -> Tensor:
    """[..., H]: x over its root mean square, times the weight (Zhang and Sennrich, 2019).

    x: [..., H]; weight: [H], of one floating dtype. In float32, rounded to the dtype of ``x``
    before the weight. shift: added to the weight in float32, as of Gemma, where 1 is; then the
    product alone is rounded, to the dtype of ``x``, as of Olmo, where 0 is.
    """
    normed: Tensor = (kernels_of(__name__).rms_norm if _serves(x) else _norm)(x, weight, eps, shift)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float | None = None
) -> AddedNorm:
    """The sum of x and residual [..., H], rounded to their dtype, and ``rms_norm`` of it."""
    return add_branch(x, residual, None, (weight, eps, shift))


def add_branch(
    x: Tensor, residual: Tensor, own: RowNorm | None, then: RowNorm | None, factor: float = 1.0
) -> AddedNorm:
    """The residual and what a branch gave, x [..., H] each, as one; and ``then``'s norm of the sum.

    own: of x, before it is multiplied by ``factor`` and added. Without ``then`` the sum is both.
    Each step is rounded to the dtype.
    """
    if _serves(x):
        return AddedNorm(*kernels_of(__name__).add_branch(x, residual, own, then, factor))
    change = x if own is None else _norm(x, *own)
    total = ((change if factor == 1.0 else change * factor) + residual).contiguous()
    return AddedNorm(total, total if then is None else _norm(total, *then))


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


def _norm(x: Tensor, weight: Tensor, eps: float, shift: float | None) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if shift is not None:
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

    Returns the queries [N, Hq, D], a view of ``packed``. Computes in float32 and rounds once; after
    norms over all heads, too. On CUDA one kernel, and one for such norms; never waits for the
    device.
    """
    first = shape.stride * shape.queries
    heads: Tensor = packed.unflatten(1, (first + 2 * shape.keys, shape.size))
    queries, key, value = heads.split([first, shape.keys, shape.keys], 1)
    query: Tensor = queries[:, ::2] if shape.has_gates else queries
    if norms is not None and norms.are_whole:
        norm_all_heads(packed, norms)
        norms = None
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


def norm_all_heads(packed: Tensor, norms: HeadNorms) -> None:
    """Norm all queries together, and all keys, where they lie in ``packed`` [N, Hq * D + Hk * D +].

    norms: ``are_whole``. Rounds once.
    """
    if _serves(packed):
        kernels_of(__name__).norm_all_heads(packed, norms)
        return
    at = 0
    for weight in norms[:2]:
        part = packed[:, at : at + len(weight)]
        part.copy_(_norm(part, weight, norms.eps, 0.0))
        at += len(weight)


def _rotate(heads: Tensor, rotation: Rotation, shape: QkvShape, norms: HeadNorms | None) -> Tensor:
    """[N, Hq + Hkv, D] rotated by [N, R], float32."""
    values, comes_after = heads.float(), norms is not None and norms.come_after
    values = values if comes_after else _norm_heads(values, shape, norms)
    width = rotation.cos.shape[1]
    moving = values if width == shape.size else values[..., :width]
    cos, sin = (part.float().unsqueeze(1).chunk(2, -1)[0] for part in rotation[:2])
    low, high = moving.unflatten(-1, (-1, 2)).unbind(-1) if shape.in_pairs else moving.chunk(2, -1)
    parts = [low * cos - high * sin, high * cos + low * sin]
    turned = torch.stack(parts, -1).flatten(-2) if shape.in_pairs else torch.cat(parts, -1)
    turned = turned if width == shape.size else torch.cat([turned, values[..., width:]], -1)
    return _norm_heads(turned, shape, norms) if comes_after else turned


def _norm_heads(values: Tensor, shape: QkvShape, norms: HeadNorms | None) -> Tensor:
    if norms is None:
        return values
    weights = [norms.query.expand(shape.queries, -1), norms.key.expand(shape.keys, -1)]
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + norms.eps)
    return values * scale * torch.cat(weights).float()
