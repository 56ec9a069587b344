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
from guided_spec.ops.launch_triton import await_previous, launch

BLOCK = 1024  # products a program of silu_mul


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """[..., H]: ``guided_spec.ops.pointwise.rms_norm`` with the arguments on one CUDA device."""
    return _norm(x, None, weight, eps, shift)[1]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum and its norm, [..., H] each, as ``guided_spec.ops.pointwise.add_rms_norm``."""
    return _norm(x, residual, weight, eps, shift)


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


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, shift: float
) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm); (x, its norm) where there is no residual."""
    width = x.shape[-1]
    rows = _dense(x.reshape(-1, width))
    added = rows if residual is None else _dense(residual.reshape(-1, width))
    total = rows if residual is None else rows.new_empty(rows.shape)
    dtype = x.dtype if shift else torch.result_type(x, weight)
    normed = rows.new_empty(rows.shape, dtype=dtype)
    block = triton.next_power_of_2(width)
    if normed.numel() > 0:
        with torch.cuda.device_of(x):
            launch(_rms_norm, (len(rows),), x)(
                *(rows, added, weight.contiguous(), total, normed, eps, shift, width),
                *(rows.stride(0), added.stride(0), residual is not None, shift != 0, block),
                num_warps=min(max(block // 512, 1), 16),
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
    shift,
    width,
    x_row,
    residual_row,
    ADDS: tl.constexpr,
    SHIFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    await_previous(IS_DEPENDENT)
    states = tl.load(x + row * x_row + column, mask=mask, other=0.0)
    if ADDS:
        added = tl.load(residual + row * residual_row + column, mask=mask, other=0.0)
        states = (states.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * width + column, states, mask=mask)
    wide = states.to(tl.float32)
    # The root rounded to nearest and a division: rsqrt alone is an approximation.
    root = tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    result = wide * tl.div_rn(1.0, root)
    if SHIFTS:
        scale += shift
    else:
        result = result.to(states.dtype).to(tl.float32)
    result *= scale
    tl.store(normed + row * width + column, result.to(normed.dtype.element_ty), mask=mask)


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
    query, key, eps = (cos, cos, 0.0) if norms is None else norms
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
            has_norms=norms is not None,
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
    has_norms: tl.constexpr,
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
    source = line + at[None, :]
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
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    turned_low, turned_high = low, high
    if turned < size:
        rest_at = turned + tl.arange(0, rest_block)
        is_rest = (head < queries + 2 * keys_count)[:, None] & (rest_at < size)[None, :]
        rest = tl.load(line + rest_at[None, :], mask=is_rest, other=0.0).to(tl.float32)
    if has_norms:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / size
        if turned < size:
            mean += tl.sum(rest * rest, 1) / size
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
        if turned < size:
            for_query, for_key = is_rest & is_query, is_rest & (head >= queries)[:, None]
            each = rest_at[None, :] + head[:, None] * 0
            weight = tl.load(query_norm + each, mask=for_query, other=0.0).to(tl.float32)
            weight += tl.load(key_norm + each, mask=for_key, other=0.0).to(tl.float32)
            rest = tl.where(is_value[:, None], rest, rest * scale * weight)
    low_out = tl.where(is_value[:, None], low, turned_low * c - turned_high * s)
    high_out = tl.where(is_value[:, None], high, turned_high * c + turned_low * s)
    out = packed.dtype.element_ty
    # Keys are rotated in ``packed`` too: nothing reads them there, but the reference does so.
    written = inside & is_turned[:, None]
    tl.store(source, low_out.to(out), mask=written)
    tl.store(source + half, high_out.to(out), mask=written)
    first = tl.where(slot >= 0, queries, queries + 2 * keys_count)  # an unused row keeps nothing
    kept = inside & (head >= first)[:, None]
    number = tl.where(is_value, head - keys_count, head) - queries
    target = ((found.to(tl.int64) * keys_count + number) * block + position % block) * size
    target = target[:, None]
    if turned < size:
        out_rest = rest.to(out)
        tl.store(line + rest_at[None, :], out_rest, mask=is_rest & is_turned[:, None])
        is_kept = is_rest & (head >= first)[:, None]
        target_rest = target + rest_at[None, :]
        tl.store(keys + target_rest, out_rest, mask=is_kept & is_turned[:, None])
        tl.store(values + target_rest, out_rest, mask=is_kept & is_value[:, None])
    target += at[None, :]
    tl.store(keys + target, low_out.to(out), mask=kept & is_turned[:, None])
    tl.store(keys + target + half, high_out.to(out), mask=kept & is_turned[:, None])
    tl.store(values + target, low_out.to(out), mask=kept & is_value[:, None])
    tl.store(values + target + half, high_out.to(out), mask=kept & is_value[:, None])
