"""Rotary position embedding of packed heads, and their keys and values put into the slots.

Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021), in the halves
form of transformers: (a, b) -> (a cos - b sin, b cos + a sin) with b half a head behind a.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guided_spec.ops.slot_attention import (
    HeadNorms,
    HeadShape,
    KeyValues,
    Rotation,
    SlotPlaces,
    store_keys_values,
)

__all__ = ["rotate_and_store"]


def rotate_and_store(
    packed: Tensor,
    rotation: Rotation,
    shape: HeadShape,
    norms: HeadNorms | None,
    buffers: KeyValues,
    places: SlotPlaces,
) -> Tensor:
    """Norm (where there are norms) and rotate queries and keys, and keep keys and values.

    packed: [B, T, shape.width], contiguous, changed in place. rotation: of all positions.
    buffers: the layer's slots, written to as ``slot_attention`` says. places: where the tokens go,
        and so their positions.

    Returns the queries [B, Hq, T, D], a view of ``packed``. Computes in float32 and rounds once.
    On CUDA one kernel; never waits for the device.
    """
    heads: Tensor = packed.unflatten(2, (shape.queries + 2 * shape.keys, shape.size))
    if packed.is_cuda:
        from guided_spec.ops import rotary_triton  # imported here: it needs triton

        rotary_triton.rotate_and_store(packed, rotation, shape, norms, buffers, places)
        return heads[:, :, : shape.queries].transpose(1, 2)
    turned = heads[:, :, : shape.queries + shape.keys]
    turned.copy_(_rotate(turned, _at(rotation, places, packed.shape[1]), shape, norms))
    query, key, value = heads.transpose(1, 2).split([shape.queries, shape.keys, shape.keys], 1)
    store_keys_values(KeyValues(key, value), buffers, places)
    queries: Tensor = query
    return queries


def _at(rotation: Rotation, places: SlotPlaces, length: int) -> Rotation:
    """[B, T, D] each, for ``length`` tokens a row from each row's start on."""
    steps = torch.arange(length, device=places.starts.device)
    positions = (places.starts.unsqueeze(1) + steps).clamp_max(len(rotation.cos) - 1)
    return Rotation(rotation.cos[positions], rotation.sin[positions])


def _rotate(heads: Tensor, rotation: Rotation, shape: HeadShape, norms: HeadNorms | None) -> Tensor:
    """[B, T, Hq + Hkv, D] rotated by [B, T, D], float32."""
    values = heads.float()
    if norms is not None:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norms.eps)
        weights = [norms.query.expand(shape.queries, -1), norms.key.expand(shape.keys, -1)]
        values = values * torch.cat(weights).float()
    low, high = values.chunk(2, -1)
    cos, sin = (part.float().unsqueeze(2) for part in rotation)
    turned: Tensor = values * cos + torch.cat([-high, low], -1) * sin
    return turned
