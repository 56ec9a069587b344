"""Multi-head latent attention over blocks: all heads share one latent a token.

What is kept of a token is its latent c [C] and a rotary key k [R]. A head's key is (U c, k), its
value W c, with matrices U and W of its own. As U^T is folded into the query and W into what
comes out, a head scores q_c . c + q_k . k and sums latents: nothing is expanded. DeepSeek-AI,
"DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model" (2024), 2.1.

The torch code here is the definition; on CUDA,
``guided_spec.ops.attention.latent_attention_triton`` runs. For inference: they have no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.attention.slot_attention import (
    KeyValues,
    Rotation,
    SeenRow,
    SlotIndex,
    store_keys_values,
)
from guided_spec.ops.kernels import has_triton, kernels_of


class LatentQueries(NamedTuple):
    """latent: [N, Hq, C], the part for latents. rotary: [N, Hq, R], rotated. Of one dtype."""

    latent: Tensor
    rotary: Tensor


class LatentKeys(NamedTuple):
    """How a layer makes what it keeps of a token out of [N, C + R].

    norm: [C], the weight of the RMS norm of latents, with its eps.
    reads_pairs: whether numbers 2i and 2i + 1 of a rotary part are rotated together, else i and
        i + R / 2. writes_pairs: whether they also end there.
    """

    norm: Tensor
    eps: float
    reads_pairs: bool
    writes_pairs: bool


def latent_attention(
    query: LatentQueries, buffers: KeyValues, index: SlotIndex, *, scale: float
) -> Tensor:
    """[N, Hq, C]: the latents that each head of a token sees, by its softmax; contiguous.

    query: float32, bfloat16 or float16, with any strides. buffers: of latents, [num_blocks, 1,
        block, C], and of rotary keys, [num_blocks, 1, block, R], where the tokens' own are
        already (``keep_latents``). index: see ``SlotIndex``; groups of ``shared`` change
        nothing. All on one device. scale: positive, multiplies the scores.

    A token sees what ``slot_attention`` says. Scores, softmax and sums are float32. Never waits
    for the device where a kernel runs. Raises ConfigError for shapes that do not fit.
    """
    _check(query, buffers)
    if query.latent.is_cuda and has_triton():
        attend = kernels_of(__name__).latent_attention
        attended: Tensor = attend(query, buffers, index, scale=scale)
        return attended
    attended = torch.zeros_like(query.latent, memory_format=torch.contiguous_format)
    for row in index.seen(buffers.keys.shape[2]):
        asked = torch.cat(query, 2)[row.tokens].float() * scale
        attended[row.tokens] = _attend_row(asked, buffers, row).to(attended.dtype)
    return attended


def _attend_row(asked: Tensor, buffers: KeyValues, row: SeenRow) -> Tensor:
    """[T, Hq, C] of the queries [T, Hq, C + R] of one row, in float32."""
    latents, rotary = (row.read(buffer)[0].float() for buffer in buffers)
    scores = asked @ torch.cat([latents, rotary], 1).T
    if row.visible is None:
        return scores.softmax(2) @ latents
    scores.masked_fill_(~row.visible.unsqueeze(1), -torch.inf)
    sees_any = row.visible.any(1)[:, None, None]
    return (scores.softmax(2) @ latents).masked_fill(~sees_any, 0)


def keep_latents(  # noqa: PLR0913 - what is kept, how, and where
    query: Tensor,
    packed: Tensor,
    keys: LatentKeys,
    rotation: Rotation,
    buffers: KeyValues,
    index: SlotIndex,
) -> Tensor:
    """[N, Hq, R]: the rotary parts of queries, rotated; contiguous.

    query: [N, Hq, R]. packed: [N, C + R], the latent before its norm and the rotary key before its
        rotation. Both with any strides but the last, which is 1. keys: see ``LatentKeys``.
    rotation: [P, R], whole rotary parts. buffers: as of ``latent_attention``; written to, where
        ``slot_attention`` says that keys are kept. index: where the tokens go, their positions.

    Computes in float32; a norm is rounded before its weight as ``rms_norm`` does, a rotation once.
    On CUDA one kernel; never waits for the device.
    """
    if query.is_cuda and has_triton():
        keep = kernels_of(__name__).keep_latents
        rotated: Tensor = keep(query, packed, keys, rotation, buffers, index)
        return rotated
    latent, rotary = packed.split([len(keys.norm), query.shape[2]], 1)
    wide = latent.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + keys.eps)
    normed = keys.norm * wide.to(latent.dtype)
    both = _rotate(torch.cat([query, rotary.unsqueeze(1)], 1), keys, rotation, index)
    store_keys_values(KeyValues(normed.unsqueeze(1), both[:, -1:]), buffers, index)
    return both[:, :-1].contiguous()


def _rotate(heads: Tensor, keys: LatentKeys, rotation: Rotation, index: SlotIndex) -> Tensor:
    """[N, H, R]: the heads, rotated by their positions."""
    positions, half = index.positions.clamp_max(len(rotation.cos) - 1), heads.shape[2] // 2
    cos, sin = (part[positions, None, :half].float() for part in rotation[:2])
    low, high = (heads[..., ::2], heads[..., 1::2]) if keys.reads_pairs else heads.split(half, 2)
    low, high = low.float(), high.float()
    turned = [low * cos - high * sin, high * cos + low * sin]
    joined = torch.stack(turned, 3).flatten(2) if keys.writes_pairs else torch.cat(turned, 2)
    return joined.to(heads.dtype)


def _check(query: LatentQueries, buffers: KeyValues) -> None:
    for name, states, buffer in zip(("latent", "rotary"), query, buffers, strict=True):
        if buffer.shape[:3] != (len(buffers.keys), 1, buffers.keys.shape[2]):
            fix = "must be [num_blocks, 1, block, D], both of equally many blocks"
            raise ConfigError("buffers", tuple(buffer.shape), fix)
        if not buffer.is_contiguous():
            raise ConfigError("buffers", buffer.stride(), "must be contiguous")
        if states.shape != (*query.latent.shape[:2], buffer.shape[3]):
            fix = f"must be [N, Hq, {buffer.shape[3]}], as the buffers are"
            raise ConfigError(f"query.{name}", tuple(states.shape), fix)
