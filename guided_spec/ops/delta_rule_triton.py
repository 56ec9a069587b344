"""The gated delta rule over slots as four kernels: convolution, states, what is kept, and gates.

A program of the second one has some columns of one head's state, which stay in its registers while
it goes through the tokens of a row: a state is read once and written once, however many tokens a
draft has and however many of the last one stay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.delta_rule import NORM_EPS, DeltaLayer, DeltaStates
from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.slot_attention import SlotPlaces

__all__ = ["gated_delta"]

BLOCK = 1024  # channels of a program
COLUMNS = 32  # of a state in a program
HEADS = 4  # of one token in a program


def gated_delta(
    packed: Tensor, layer: DeltaLayer, states: DeltaStates, places: SlotPlaces
) -> Tensor:
    """See ``guided_spec.ops.delta_rule.gated_delta``; the arguments on one CUDA device."""
    shape, count = layer.shape, len(packed)
    size = shape.values * shape.value_size
    mixed = packed.new_empty(count, shape.channels)
    read, gated = packed.new_empty(count, size), packed.new_empty(count, size)
    if count == 0:
        return gated
    tokens, rows, columns = places.tokens.contiguous(), places.rows.contiguous(), layer.columns
    num_rows, (_, kept_places, width) = rows.shape[1], states.recent.shape
    kept = (states.recent, kept_places, width)
    line = (packed, packed.stride(0), columns.kept)
    blocks, value_block = triton.cdiv(width, BLOCK), min(_power(shape.value_size), COLUMNS)
    sizes = (shape.keys, shape.values, shape.key_size, shape.value_size, shape.taps)
    longest = states.longest_draft(shape)
    with torch.cuda.device_of(packed):  # Triton launches on the current device
        launch(_convolve, (count, triton.cdiv(shape.channels, BLOCK)), packed)(
            *(*line, *kept, layer.taps, mixed, tokens, count, shape.channels, shape.taps, BLOCK)
        )
        grid = (num_rows, shape.values, triton.cdiv(shape.value_size, value_block))
        launch(_fold_rows, grid, packed)(
            *(*line, *kept, layer.taps, mixed, states.state, states.extent, rows, num_rows),
            *(layer.rates, layer.biases, read, longest, layer.step_scale, NORM_EPS),
            *(*sizes, _power(shape.key_size), value_block),
            num_warps=4,
        )
        launch(_keep, (num_rows, kept_places, blocks), packed)(
            *(*line, *kept, states.extent, rows, num_rows, longest, BLOCK)
        )
        launch(_gate, (count, triton.cdiv(shape.values, HEADS)), packed)(
            *(packed, packed.stride(0), columns.gate, read, layer.norm, gated, tokens, layer.eps),
            *(shape.values, shape.value_size, HEADS, _power(shape.value_size)),
        )
    return gated


def _power(size: int) -> int:
    found: int = triton.next_power_of_2(size)
    return found


# Triton reads annotations as its own, so the arguments have none. A number that changes from call
# to call must not become part of the kernel: a new one would be compiled for it.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def] # noqa: PLR0913
    packed,
    packed_row,
    columns,
    recent,
    places,
    width,
    taps,
    mixed,
    tokens,
    count,
    channels,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some channels of one token, from its own row or from what its slot keeps."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    column = tl.load(columns + channel, mask=inside, other=0)
    slot = tl.load(tokens + token)
    position = tl.load(tokens + count + token)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        lag = TAPS - 1 - tap
        before = token - lag
        line_slot = tl.load(tokens + before, mask=before >= 0, other=-2)
        line_position = tl.load(tokens + count + before, mask=before >= 0, other=-2)
        is_in_line = (line_slot == slot) & (line_position == position - lag)
        source = packed + before * packed_row + column
        x = tl.load(source, mask=channel < tl.where(is_in_line, channels, 0), other=0.0)
        is_kept = (slot >= 0) & (position >= lag)
        end = tl.where(is_kept, tl.where(is_in_line, 0, channels), 0)
        place = slot * places + (position - lag) % places
        x += tl.load(recent + place * width + channel, mask=channel < end, other=0.0)
        weight = tl.load(taps + channel * TAPS + tap, mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    out = mixed.dtype.element_ty
    tl.store(mixed + token * channels + channel, _silu(total.to(out)).to(out), mask=inside)


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    wide = x.to(tl.float32)
    return tl.div_rn(wide, 1.0 + tl.exp(-wide))


@triton.jit  # type: ignore[untyped-decorator]
def _recalled(  # type: ignore[no-untyped-def] # noqa: PLR0913
    recent, places, width, taps, position, channel, end, TAPS: tl.constexpr
):
    """The convolution at a position that is kept, float32 of some channels before ``end``."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        before = position - (TAPS - 1 - tap)
        source = recent + (before % places) * width + channel
        x = tl.load(source, mask=channel < tl.where(before >= 0, end, 0), other=0.0)
        weight = tl.load(taps + channel * TAPS + tap, mask=channel < end, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    out = recent.dtype.element_ty
    return _silu(total.to(out)).to(out).to(tl.float32)


@triton.jit
def _fold(state, key, value, step, decay, rate, bias, step_scale, eps):  # type: ignore[no-untyped-def] # noqa: PLR0913
    """The state behind one token; step and decay as they were projected."""
    key *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(key * key, 0) + eps))
    dtype, x = step.dtype, decay.to(tl.float32) + bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    state *= tl.exp(-tl.exp(rate) * softplus)
    opened = tl.div_rn(1.0, 1.0 + tl.exp(-step.to(tl.float32))).to(dtype).to(tl.float32)
    moved = opened * step_scale * (value - tl.sum(state * key[:, None], 0))
    return state + key[:, None] * moved[None, :]


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _fold_rows(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0915
    packed,
    packed_row,
    columns,
    recent,
    places,
    width,
    taps,
    mixed,
    states,
    extent,
    rows,
    num_rows,
    rates,
    biases,
    read,
    longest,
    step_scale,
    eps,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some columns of one head's state through one row."""
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    first = tl.load(rows + 2 * num_rows + row - 1, mask=row > 0, other=0)
    end = tl.load(rows + 2 * num_rows + row)
    if (slot >= 0) & (end > first):
        all_keys: tl.constexpr = KEYS * KEY_SIZE
        channels: tl.constexpr = 2 * all_keys + VALUES * VALUE_SIZE
        at_key = tl.arange(0, KEY_BLOCK)
        at_value = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
        is_key, is_value = at_key < KEY_SIZE, at_value < VALUE_SIZE
        of_query = head // (VALUES // KEYS) * KEY_SIZE + at_key
        of_key = all_keys + of_query
        of_value = 2 * all_keys + head * VALUE_SIZE + at_value
        key_end = all_keys + head // (VALUES // KEYS) * KEY_SIZE + KEY_SIZE
        value_end = 2 * all_keys + head * VALUE_SIZE + VALUE_SIZE
        rate = tl.load(rates + head).to(tl.float32)
        bias = tl.load(biases + head).to(tl.float32)
        step_column = tl.load(columns + channels + head)
        decay_column = tl.load(columns + channels + VALUES + head)
        inside = is_key[:, None] & is_value[None, :]
        stored = states + (slot * VALUES + head) * KEY_SIZE * VALUE_SIZE
        stored += at_key[:, None] * VALUE_SIZE + at_value[None, :]
        is_old = at_key < tl.where(start > 0, KEY_SIZE, 0)
        state = tl.load(stored, mask=inside & is_old[:, None], other=0.0)
        length = tl.load(extent + 2 * slot)
        held = tl.load(extent + 2 * slot + 1)
        staying = tl.minimum(tl.maximum(start - length, 0), held)
        staying = tl.where(start > 0, staying, 0)
        kept = recent + slot * places * width
        for position in range(length, length + staying):
            source = kept + (position % places) * width + channels + head
            key = _recalled(kept, places, width, taps, position, of_key, key_end, TAPS)
            value = _recalled(kept, places, width, taps, position, of_value, value_end, TAPS)
            step, decay = tl.load(source), tl.load(source + VALUES)
            state = _fold(state, key, value, step, decay, rate, bias, step_scale, eps)
        if end - first <= longest:
            tl.store(stored, state, mask=inside)
        for token in range(first, end):
            source = mixed + token * channels
            query = tl.load(source + of_query, mask=is_key, other=0.0).to(tl.float32)
            key = tl.load(source + of_key, mask=is_key, other=0.0).to(tl.float32)
            value = tl.load(source + of_value, mask=is_value, other=0.0).to(tl.float32)
            step = tl.load(packed + token * packed_row + step_column)
            decay = tl.load(packed + token * packed_row + decay_column)
            state = _fold(state, key, value, step, decay, rate, bias, step_scale, eps)
            size = tl.sqrt_rn((tl.sum(query * query, 0) + eps) * KEY_SIZE)
            found = tl.sum(state * query[:, None], 0) * tl.div_rn(1.0, size)
            out = read + token * (VALUES * VALUE_SIZE) + head * VALUE_SIZE + at_value
            tl.store(out, found.to(read.dtype.element_ty), mask=is_value)
        if end - first > longest:
            tl.store(stored, state, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def] # noqa: PLR0913
    packed,
    packed_row,
    columns,
    recent,
    places,
    width,
    extent,
    rows,
    num_rows,
    longest,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some kept columns of one of a row's last tokens; and how far the row's state is."""
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0)
    back = tl.program_id(1) + 1
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    first = tl.load(rows + 2 * num_rows + row - 1, mask=row > 0, other=0)
    end = tl.load(rows + 2 * num_rows + row)
    if (slot >= 0) & (end - first >= back):
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        column = tl.load(columns + at, mask=inside, other=0)
        found = tl.load(packed + (end - back) * packed_row + column, mask=inside, other=0.0)
        place = slot * places + (start + end - first - back) % places
        tl.store(recent + place * width + at, found, mask=inside)
        if (back == 1) & (tl.program_id(2) == 0):
            count = end - first
            tl.store(extent + 2 * slot, tl.where(count > longest, start + count, start))
            tl.store(extent + 2 * slot + 1, tl.where(count > longest, 0, count))


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def] # noqa: PLR0913
    packed,
    packed_row,
    columns,
    read,
    norm,
    gated,
    tokens,
    eps,
    VALUES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some heads of one token."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at_value = tl.arange(0, VALUE_BLOCK)
    at = head[:, None] * VALUE_SIZE + at_value[None, :]
    inside = (head < VALUES)[:, None] & (at_value < VALUE_SIZE)[None, :]
    column = tl.load(columns + at, mask=inside, other=0)
    gate = tl.load(packed + token * packed_row + column, mask=inside, other=0.0)
    place = token * (VALUES * VALUE_SIZE) + at
    used = tl.where(tl.load(tokens + token) >= 0, VALUES, 0)
    states = tl.load(read + place, mask=inside & (head < used)[:, None], other=0.0)
    wide = states.to(tl.float32)
    root = tl.sqrt_rn(tl.sum(wide * wide, 1) / VALUE_SIZE + eps)
    normed = (wide * tl.div_rn(1.0, root)[:, None]).to(states.dtype)
    weight = tl.load(norm + at_value, mask=at_value < VALUE_SIZE, other=0.0)
    result = (normed.to(tl.float32) * weight.to(tl.float32)[None, :]).to(states.dtype)
    result = result.to(tl.float32) * _silu(gate)
    tl.store(gated + place, result.to(gated.dtype.element_ty), mask=inside)
