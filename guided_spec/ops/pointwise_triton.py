"""The pointwise operators as one kernel each: every number is read once and written once.

Rotary position embedding of packed heads as one kernel, which fills the slots as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.attention.slot_attention import (
    HeadNorms,
    KeyValues,
    QkvShape,
    Rotation,
    SlotIndex,
)
from guided_spec.ops.attention.slot_attention_triton import as_kept
from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.pointwise import RowNorm

BLOCK = 1024  # products a program of silu_mul


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float | None = None) -> Tensor:
    """[..., H]: ``guided_spec.ops.pointwise.rms_norm`` with the arguments on one CUDA device."""
    return _branch(x, None, None, (weight, eps, shift), 1.0)[1]


def add_branch(
    x: Tensor, residual: Tensor, own: RowNorm | None, then: RowNorm | None, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The sum and its norm, [..., H] each, as ``guided_spec.ops.pointwise.add_branch``."""
    return _branch(x, residual, own, then, factor)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """[..., I]: silu(gate) * up; rows need not be contiguous, as halves of a row are not."""
    width = gate.shape[-1]
    gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
    product = gate.new_empty(gates.shape)
    if product.numel() > 0:
        grid = (len(gates), triton.cdiv(width, BLOCK))
        with torch.cuda.device_of(gate):  # Triton launches on the current device
            launch(_silu_mul, grid, gate)(
                *(_dense(gates), _dense(ups), product, width),
                *(_dense(gates).stride(0), _dense(ups).stride(0), BLOCK),
            )
    return product.view(gate.shape)


def _branch(
    x: Tensor, residual: Tensor | None, own: RowNorm | None, then: RowNorm | None, factor: float
) -> tuple[Tensor, Tensor]:
    """(sum, its norm), as ``add_branch``; (x, its norm) where there is no residual."""
    width = x.shape[-1]
    rows = _dense(x.reshape(-1, width))
    added, total = rows, rows
    if residual is not None:
        added = _dense(residual.reshape(-1, width))
        kept = rows.dtype if own is None else _dtype(rows, own)
        total = rows.new_empty(rows.shape, dtype=torch.promote_types(kept, added.dtype))
    normed = total if then is None else rows.new_empty(rows.shape, dtype=_dtype(total, then))
    block = triton.next_power_of_2(width)
    if total.numel() > 0:
        with torch.cuda.device_of(x):
            launch(_add_branch, (len(rows),), x)(
                *(rows, added, total, normed, *_weights(own, rows), *_weights(then, rows)),
                *(factor, width, rows.stride(0), added.stride(0)),
                *(residual is not None, _kind(own), _kind(then), block),
                num_warps=min(max(block // 512, 1), 16),
            )
    return total.view(x.shape), normed.view(x.shape)


def _dtype(states: Tensor, norm: RowNorm) -> torch.dtype:
    """Of what the norm makes of them."""
    return torch.result_type(states, norm[0]) if norm[2] is None else states.dtype


def _weights(norm: RowNorm | None, states: Tensor) -> tuple[Tensor, float, float]:
    if norm is None:
        return states, 0.0, 0.0
    weight, eps, shift = norm
    return weight.contiguous(), eps, shift or 0.0


def _kind(norm: RowNorm | None) -> int:
    """0 for none; 1 that rounds before the weight, 2 after it."""
    return 0 if norm is None else 1 if norm[2] is None else 2


def norm_all_heads(packed: Tensor, norms: HeadNorms) -> None:
    """``guided_spec.ops.pointwise.norm_all_heads`` with the arguments on one CUDA device."""
    query, key = norms.query.contiguous(), norms.key.contiguous()
    block = triton.next_power_of_2(max(len(query), len(key)))
    if len(packed) > 0:
        with torch.cuda.device_of(packed):
            launch(_norm_all_heads, (len(packed), 2), packed)(
                *(packed, query, key, norms.eps, len(query), len(key), packed.stride(0), block),
                num_warps=min(max(block // 512, 1), 16),
            )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _normed(states, weight, eps, shift, width, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """In float32: a row's norm, of the weight in float32; KIND: as ``_kind`` says."""
    wide = states.to(tl.float32)
    # The root rounded to nearest and a division: rsqrt alone is an approximation.
    root = tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    result = wide * tl.div_rn(1.0, root)
    if KIND == 1:
        result = result.to(states.dtype).to(tl.float32)
    return result * (weight + shift)


@triton.jit  # type: ignore[untyped-decorator]
def _add_branch(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    residual,
    total,
    normed,
    own_weight,
    own_eps,
    own_shift,
    then_weight,
    then_eps,
    then_shift,
    factor,
    width,
    x_row,
    residual_row,
    ADDS: tl.constexpr,
    OWN: tl.constexpr,
    THEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    if OWN:
        own = tl.load(own_weight + column, mask=mask, other=0.0).to(tl.float32)
    if THEN:
        then = tl.load(then_weight + column, mask=mask, other=0.0).to(tl.float32)
    await_previous(IS_DEPENDENT)
    states = tl.load(x + row * x_row + column, mask=mask, other=0.0)
    if ADDS:
        kept = total.dtype.element_ty
        if OWN:
            states = _normed(states, own, own_eps, own_shift, width, OWN).to(kept)
        states = (states.to(tl.float32) * factor).to(kept)
        added = tl.load(residual + row * residual_row + column, mask=mask, other=0.0)
        states = (states.to(tl.float32) + added.to(tl.float32)).to(kept)
        tl.store(total + row * width + column, states, mask=mask)
    if THEN:
        result = _normed(states, then, then_eps, then_shift, width, THEN)
        tl.store(normed + row * width + column, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_all_heads(  # type: ignore[no-untyped-def] # noqa: PLR0913
    packed, query, key, eps, first, second, row, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    """All queries of one token, or all keys."""
    is_key = tl.program_id(1)
    queries, keys = tl.where(is_key == 0, first, 0), tl.where(is_key == 0, 0, second)
    column = tl.arange(0, BLOCK)
    weight = tl.load(query + column, mask=column < queries, other=0.0).to(tl.float32)
    weight += tl.load(key + column, mask=column < keys, other=0.0).to(tl.float32)
    at = packed + tl.program_id(0).to(tl.int64) * row + is_key * first + column
    mask = column < queries + keys
    await_previous(IS_DEPENDENT)
    states = tl.load(at, mask=mask, other=0.0)
    result = _normed(states, weight, eps, 0.0, tl.maximum(queries + keys, 1), 2)
    tl.store(at, result.to(states.dtype), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(  # type: ignore[no-untyped-def] # noqa: PLR0913
    gate, up, product, width, gate_row, up_row, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    states = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    opened = tl.div_rn(states, 1.0 + tl.exp(-states)).to(product.dtype.element_ty)
    result = (opened.to(tl.float32) * factor).to(product.dtype.element_ty)
    tl.store(product + row * width + column, result, mask=mask)


HEADS = 8  # of one token in a program: with fewer, programs take more than memory does


def rotate_and_store(
    packed: Tensor,
    rotation: Rotation,
    shape: QkvShape,
    norms: HeadNorms | None,
    buffers: KeyValues,
    index: SlotIndex,
) -> None:
    """``guided_spec.ops.pointwise.rotate_and_store`` with the arguments on one CUDA device."""
    count, width = packed.shape
    if count == 0:
        return
    cos, sin, axis_of = rotation
    query, key, eps = (cos, cos, 0.0) if norms is None else norms[:3]
    num_heads, memory, turned = shape.queries + 2 * shape.keys, index.tables, cos.shape[1]
    tokens = index.tokens.contiguous()
    axes, num_axes = tokens, 0
    if axis_of is not None and index.axes is not None:
        axes, num_axes = index.axes, index.axes.shape[1]
    with torch.cuda.device_of(packed):  # Triton launches on the current device
        launch(_rotate, (count, triton.cdiv(num_heads, HEADS)), packed)(
            *(packed, cos, sin, len(cos), query, key, eps, *buffers, tokens),
            *(count, memory, memory.stride(0), index.max_length, buffers.keys.shape[2], width),
            *(axes, tokens if axis_of is None else axis_of),
            num_axes=num_axes,
            queries=shape.queries,
            keys_count=shape.keys,
            size=shape.size,
            turned=turned,
            stride=shape.stride,
            half_block=triton.next_power_of_2(turned // 2),
            rest_block=triton.next_power_of_2(shape.size - turned),
            heads=HEADS,
            in_pairs=shape.in_pairs,
            has_norms=norms is not None,
            norms_after=norms is not None and norms.come_after,
            num_warps=4,
        )


# Triton reads annotations as its own, so the arguments have none. A number that changes from call
# to call must not become part of the kernel: a new one would be compiled for it.
@triton.jit(do_not_specialize=["count", "max_length", "positions", "table_row"])  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    packed,
    cos,
    sin,
    positions,
    query_norm,
    key_norm,
    eps,
    keys,
    values,
    tokens,
    count,
    tables,
    table_row,
    max_length,
    block: tl.constexpr,
    width,
    axes,
    axis_of,
    num_axes: tl.constexpr,
    queries: tl.constexpr,
    keys_count: tl.constexpr,
    size: tl.constexpr,
    turned: tl.constexpr,
    stride: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    heads: tl.constexpr,
    in_pairs: tl.constexpr,
    has_norms: tl.constexpr,
    norms_after: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some heads of one token: queries rotated, keys rotated and stored, values stored."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = turned // 2
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    at = tl.arange(0, half_block)
    is_value = head >= queries + keys_count
    is_turned = head < queries + keys_count
    inside = (head < queries + 2 * keys_count)[:, None] & (at < half)[None, :]
    column = head * size + tl.minimum(head, queries) * (stride - 1) * size  # after the gates
    line = (packed + token * width + column)[:, None]
    # Where what is turned together is in a head.
    low_at = (at * 2 if in_pairs else at)[None, :]
    gap: tl.constexpr = 1 if in_pairs else half
    source = line + low_at
    position = tl.load(tokens + count + token)
    slot = tl.load(tokens + token)
    turn = position
    if num_axes > 0:
        axis = tl.load(axis_of + at, mask=at < half, other=0)
        line_of = (tl.maximum(slot, 0) * num_axes + axis) * (max_length + 1)
        turn = tl.load(axes + line_of + tl.minimum(position, max_length), mask=at < half, other=0)
    turn = tl.minimum(turn.to(tl.int64), positions - 1) * turned + at
    c = tl.load(cos + turn, mask=at < half, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + turn, mask=at < half, other=0.0).to(tl.float32)[None, :]
    position = tl.minimum(position, max_length)
    found = tl.load(tables + slot * table_row + position // block, mask=slot >= 0, other=0)
    await_previous(IS_DEPENDENT)
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + gap, mask=inside, other=0.0).to(tl.float32)
    turned_low, turned_high = low, high
    if turned < size:
        rest_at = turned + tl.arange(0, rest_block)
        is_rest = (head < queries + 2 * keys_count)[:, None] & (rest_at < size)[None, :]
        rest = tl.load(line + rest_at[None, :], mask=is_rest, other=0.0).to(tl.float32)
        rest_sum = tl.sum(rest * rest, 1)
    else:
        rest_sum = 0.0
    if has_norms:
        is_query = (head < queries)[:, None]
        for_query, for_key = inside & is_query, inside & (head >= queries)[:, None]
        each = low_at + head[:, None] * 0
        low_weight = tl.load(query_norm + each, mask=for_query, other=0.0).to(tl.float32)
        low_weight += tl.load(key_norm + each, mask=for_key, other=0.0).to(tl.float32)
        each += gap
        high_weight = tl.load(query_norm + each, mask=for_query, other=0.0).to(tl.float32)
        high_weight += tl.load(key_norm + each, mask=for_key, other=0.0).to(tl.float32)
        if not norms_after:
            mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1) + rest_sum) / size
            scale = (1.0 / tl.sqrt(mean + eps))[:, None]
            turned_low, turned_high = low * scale * low_weight, high * scale * high_weight
    low_out = turned_low * c - turned_high * s
    high_out = turned_high * c + turned_low * s
    if has_norms:
        if norms_after:
            mean = tl.sum(low_out * low_out, 1) + tl.sum(high_out * high_out, 1) + rest_sum
            scale = (1.0 / tl.sqrt(mean / size + eps))[:, None]
            low_out, high_out = low_out * scale * low_weight, high_out * scale * high_weight
        if turned < size:
            for_query, for_key = is_rest & is_query, is_rest & (head >= queries)[:, None]
            each = rest_at[None, :] + head[:, None] * 0
            weight = tl.load(query_norm + each, mask=for_query, other=0.0).to(tl.float32)
            weight += tl.load(key_norm + each, mask=for_key, other=0.0).to(tl.float32)
            rest = tl.where(is_value[:, None], rest, rest * scale * weight)
    low_out = tl.where(is_value[:, None], low, low_out)
    high_out = tl.where(is_value[:, None], high, high_out)
    out = packed.dtype.element_ty
    # Keys are rotated in ``packed`` too: nothing reads them there, but the reference does so.
    written = inside & is_turned[:, None]
    tl.store(source, low_out.to(out), mask=written)
    tl.store(source + gap, high_out.to(out), mask=written)
    first = tl.where(slot >= 0, queries, queries + 2 * keys_count)  # an unused row keeps nothing
    kept = inside & (head >= first)[:, None]
    number = tl.where(is_value, head - keys_count, head) - queries
    target = ((found.to(tl.int64) * keys_count + number) * block + position % block)[:, None] * size
    if turned < size:
        out_rest = rest.to(out)
        tl.store(line + rest_at[None, :], out_rest, mask=is_rest & is_turned[:, None])
        is_kept = is_rest & (head >= first)[:, None]
        target_rest = target + rest_at[None, :]
        out_rest = as_kept(out_rest, keys)
        tl.store(keys + target_rest, out_rest, mask=is_kept & is_turned[:, None])
        tl.store(values + target_rest, out_rest, mask=is_kept & is_value[:, None])
    target += low_at
    low_out, high_out = as_kept(low_out.to(out), keys), as_kept(high_out.to(out), keys)
    tl.store(keys + target, low_out, mask=kept & is_turned[:, None])
    tl.store(keys + target + gap, high_out, mask=kept & is_turned[:, None])
    tl.store(values + target, low_out, mask=kept & is_value[:, None])
    tl.store(values + target + gap, high_out, mask=kept & is_value[:, None])
