"""Rotary position embedding of packed heads as one kernel, which fills the slots as well."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.dependents_triton import follow, following
from guided_spec.ops.slot_attention import HeadNorms, HeadShape, KeyValues, Rotation, SlotPlaces

__all__ = ["rotate_and_store"]

HEADS = 4  # of one token in a program


def rotate_and_store(
    packed: Tensor,
    rotation: Rotation,
    shape: HeadShape,
    norms: HeadNorms | None,
    buffers: KeyValues,
    places: SlotPlaces,
) -> None:
    """See ``guided_spec.ops.rotary.rotate_and_store``; the arguments on one CUDA device."""
    batch, tokens, width = packed.shape
    if batch * tokens == 0:
        return
    cos, sin = rotation
    query, key, eps = (cos, cos, 0.0) if norms is None else norms
    count = shape.queries + 2 * shape.keys
    with torch.cuda.device_of(packed):  # Triton launches on the current device
        _rotate[(batch * tokens, triton.cdiv(count, HEADS))](
            *(packed, cos, sin, len(cos), query, key, eps),
            *(*buffers, places.slots, places.starts, tokens, buffers.keys.shape[2] - 1, width),
            queries=shape.queries,
            keys_count=shape.keys,
            size=shape.size,
            half_block=triton.next_power_of_2(shape.size // 2),
            heads=HEADS,
            has_norms=norms is not None,
            num_warps=2,
            **following(packed),
        )


# Triton reads annotations as its own, so the arguments have none. A number that changes from call
# to call must not become part of the kernel: a new one would be compiled for it.
@triton.jit(do_not_specialize=["tokens", "max_length", "positions"])  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    packed,
    cos,
    sin,
    positions,
    query_norm,
    key_norm,
    eps,
    keys,
    values,
    slots,
    starts,
    tokens,
    max_length,
    width,
    queries: tl.constexpr,
    keys_count: tl.constexpr,
    size: tl.constexpr,
    half_block: tl.constexpr,
    heads: tl.constexpr,
    has_norms: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Some heads of one token: queries turned in place, keys turned and kept, values kept."""
    follow(FOLLOWS)
    token = tl.program_id(0).to(tl.int64)
    row = token // tokens
    half: tl.constexpr = size // 2
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    at = tl.arange(0, half_block)
    is_value = head >= queries + keys_count
    is_turned = head < queries + keys_count
    inside = (head < queries + 2 * keys_count)[:, None] & (at < half)[None, :]
    source = packed + token * width + head[:, None] * size + at[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(starts + row) + token % tokens
    turn = tl.minimum(position, positions - 1) * size + at
    c = tl.load(cos + turn, mask=at < half, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + turn, mask=at < half, other=0.0).to(tl.float32)[None, :]
    turned_low, turned_high = low, high
    if has_norms:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / size
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        is_query = (head < queries)[:, None]
        for_query, for_key = inside & is_query, inside & (head >= queries)[:, None]
        each = at[None, :] + head[:, None] * 0
        weight = tl.load(query_norm + each, mask=for_query, other=0.0).to(tl.float32)
        weight += tl.load(key_norm + each, mask=for_key, other=0.0).to(tl.float32)
        turned_low = low * scale * weight
        weight = tl.load(query_norm + half + each, mask=for_query, other=0.0).to(tl.float32)
        weight += tl.load(key_norm + half + each, mask=for_key, other=0.0).to(tl.float32)
        turned_high = high * scale * weight
    low_out = tl.where(is_value[:, None], low, turned_low * c - turned_high * s)
    high_out = tl.where(is_value[:, None], high, turned_high * c + turned_low * s)
    out = packed.dtype.element_ty
    # Keys are turned in place too: nobody reads them there, but so does the reference.
    written = inside & is_turned[:, None]
    tl.store(source, low_out.to(out), mask=written)
    tl.store(source + half, high_out.to(out), mask=written)
    slot = tl.load(slots + row)
    place = tl.minimum(position, max_length)
    first = tl.where(slot >= 0, queries, queries + 2 * keys_count)  # an unused row keeps nothing
    kept = inside & (head >= first)[:, None]
    number = tl.where(is_value, head - keys_count, head) - queries
    target = ((slot * keys_count + number) * (max_length + 1) + place) * size
    target = target[:, None] + at[None, :]
    tl.store(keys + target, low_out.to(out), mask=kept & is_turned[:, None])
    tl.store(keys + target + half, high_out.to(out), mask=kept & is_turned[:, None])
    tl.store(values + target, low_out.to(out), mask=kept & is_value[:, None])
    tl.store(values + target + half, high_out.to(out), mask=kept & is_value[:, None])
