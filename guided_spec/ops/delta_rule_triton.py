"""The gated delta rule over slots as three kernels: convolution, states, and gates with what stays.

A program of the second one has some columns of one head's state, which stay in its registers while
it goes through the tokens of a row: a state is read once and written once, however many tokens a
draft has and however many of the last one stay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.attention.slot_attention import SlotIndex
from guided_spec.ops.delta_rule import NORM_EPS, DeltaLayer, DeltaStates
from guided_spec.ops.launch_triton import await_previous, launch

BLOCK = 1024  # channels of a program
COLUMNS = 32  # of a state in a program
HEADS = 4  # of one token in a program
# Rows of more tokens are folded in by sets of matrix products, of so many tokens each: one costs as
# much as some tokens one by one.
ONE_BY_ONE, CHUNK = 16, 16


def gated_delta(packed: Tensor, layer: DeltaLayer, states: DeltaStates, index: SlotIndex) -> Tensor:
    """[N, Hv * V]: ``guided_spec.ops.delta_rule.gated_delta`` on one CUDA device.

    What the states hold is read early: between two calls with the same ones lies another launch, as
    the projection is in a model.
    """
    shape, count = layer.shape, len(packed)
    size = shape.values * shape.value_size
    mixed = packed.new_empty(count, shape.channels)
    read, gated = packed.new_empty(count, size), packed.new_empty(count, size)
    if count == 0:
        return gated
    tokens, rows, columns = index.tokens.contiguous(), index.rows.contiguous(), layer.columns
    num_rows, (_, num_entries, width) = rows.shape[1], states.recent.shape
    kept = (states.recent, num_entries, width)
    line = (packed, packed.stride(0), columns.kept)
    value_block = min(max(_power(shape.value_size), 16), COLUMNS)
    sizes = (shape.keys, shape.values, shape.key_size, shape.value_size, shape.taps)
    longest = states.longest_draft(shape)
    with torch.cuda.device_of(packed):  # Triton launches on the current device
        launch(_convolve, (count, triton.cdiv(shape.channels, BLOCK)), packed)(
            *(*line, *kept, layer.taps, mixed, tokens, count, shape.channels, shape.taps, BLOCK)
        )
        parts = triton.cdiv(shape.value_size, value_block)
        for is_long, most in ((False, num_rows), (True, count // (ONE_BY_ONE + 1))):
            if most == 0:
                continue
            launch(_fold_rows, (most, shape.values, parts), packed)(
                *(*line, *kept, layer.taps, mixed, states.state, states.extent, rows, num_rows),
                *(layer.rates, layer.biases, read, longest, layer.step_scale, NORM_EPS),
                *(*sizes, max(_power(shape.key_size), 16), value_block, ONE_BY_ONE, CHUNK, is_long),
                num_warps=4,
            )
        parts = triton.cdiv(shape.values, HEADS) + triton.cdiv(width, BLOCK)
        launch(_keep_and_gate, (max(count, num_rows), parts), packed)(
            *(*line, *kept, columns.gate, read, layer.norm, gated, states.extent, tokens, count),
            *(rows, num_rows, longest, layer.eps, shape.values, shape.value_size, HEADS),
            *(_power(shape.value_size), BLOCK),
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
    entries,
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
    """Some channels of one token, from its own row or from what its slot keeps.

    What is kept comes first, as it does in the sum, and is there before the projection is.
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    column = tl.load(columns + channel, mask=inside, other=0)
    slot = tl.load(tokens + token)
    position = tl.load(tokens + count + token)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        lag = TAPS - 1 - tap
        is_in_line = _follows(tokens, count, token, lag, slot, position)
        is_kept = (slot >= 0) & (position >= lag) & (is_in_line == 0)
        here = channel < tl.where(is_kept, channels, 0)
        entry = slot * entries + (position - lag) % entries
        x = tl.load(recent + entry * width + channel, mask=here, other=0.0)
        weight = tl.load(taps + channel * TAPS + tap, mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    await_previous(IS_DEPENDENT)
    for tap in tl.static_range(TAPS):
        lag = TAPS - 1 - tap
        is_in_line = _follows(tokens, count, token, lag, slot, position)
        here = channel < tl.where(is_in_line, channels, 0)
        x = tl.load(packed + (token - lag) * packed_row + column, mask=here, other=0.0)
        weight = tl.load(taps + channel * TAPS + tap, mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    out = mixed.dtype.element_ty
    tl.store(mixed + token * channels + channel, _silu(total.to(out)).to(out), mask=inside)


@triton.jit
def _follows(tokens, count, token, lag, slot, position):  # type: ignore[no-untyped-def] # noqa: PLR0913
    """Whether the token ``lag`` before this one in the batch is also ``lag`` before in the text."""
    before = token - lag
    other_slot = tl.load(tokens + before, mask=before >= 0, other=-2)
    other_position = tl.load(tokens + count + before, mask=before >= 0, other=-2)
    return (other_slot == slot) & (other_position == position - lag)


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    wide = x.to(tl.float32)
    return tl.div_rn(wide, 1.0 + tl.exp(-wide))


@triton.jit  # type: ignore[untyped-decorator]
def _recalled(  # type: ignore[no-untyped-def] # noqa: PLR0913
    recent, entries, width, taps, position, channel, end, TAPS: tl.constexpr
):
    """The convolution at a position that is kept, float32 of some channels before ``end``."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        before = position - (TAPS - 1 - tap)
        source = recent + (before % entries) * width + channel
        x = tl.load(source, mask=channel < tl.where(before >= 0, end, 0), other=0.0)
        weight = tl.load(taps + channel * TAPS + tap, mask=channel < end, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    out = recent.dtype.element_ty
    return _silu(total.to(out)).to(out).to(tl.float32)


@triton.jit
def _fold(state, key, value, step, decay, rate, bias, step_scale, eps):  # type: ignore[no-untyped-def] # noqa: PLR0913
    """The state after one token; step and decay as they were projected."""
    key *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(key * key, 0) + eps))
    state *= tl.exp(_decay(decay, rate, bias))
    moved = _opened(step) * step_scale * (value - tl.sum(state * key[:, None], 0))
    return state + key[:, None] * moved[None, :]


@triton.jit
def _opened(step):  # type: ignore[no-untyped-def]
    """The sigmoid, rounded as it is projected."""
    wide = tl.div_rn(1.0, 1.0 + tl.exp(-step.to(tl.float32)))
    return wide.to(step.dtype).to(tl.float32)


@triton.jit
def _decay(projected, rate, bias):  # type: ignore[no-untyped-def]
    """The logarithm of a decay."""
    x = projected.to(tl.float32) + bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(rate) * softplus


@triton.jit
def _whole(heads, eps):  # type: ignore[no-untyped-def]
    """Rows in float32, over their length."""
    wide = heads.to(tl.float32)
    return wide * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, 1) + eps))[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _fold_chunk(state, query, key, value, step, decay, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: PLR0913
    """(The state after some tokens, what they read): see ``delta_rule._fold_chunk``.

    A token that is none has neither step nor decay, and a key of zeros.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    summed = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)
    between = tl.where(row >= column, tl.exp(summed[:, None] - summed[None, :]), 0.0)
    turned = tl.trans(key)
    products = tl.dot(key, turned, input_precision="tf32x3")
    equations = tl.where(row > column, -step[:, None] * between * products, 0.0)
    solved = equations
    for at in range(1, CHUNK):
        line = tl.sum(tl.where(row == at, equations, 0.0), 0)
        line += tl.sum(line[:, None] * solved, 0)
        solved = tl.where(row == at, line[None, :], solved)
    solved += tl.where(row == column, 1.0, 0.0)
    grown = tl.exp(summed)[:, None]
    known = value - grown * tl.dot(key, state, input_precision="tf32x3")
    moved = tl.dot(solved, step[:, None] * known, input_precision="tf32x3")
    seen = between * tl.dot(query, turned, input_precision="tf32x3")
    read = grown * tl.dot(query, state, input_precision="tf32x3")
    read += tl.dot(seen, moved, input_precision="tf32x3")
    rest = tl.exp(last - summed)[None, :] * turned
    return tl.exp(last) * state + tl.dot(rest, moved, input_precision="tf32x3"), read


@triton.jit  # type: ignore[untyped-decorator]
def _long_row(rows, num_rows, number, ONE_BY_ONE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which row is the long one of this number, counted from 0; -1 where there is none.

    Tokens are in few long rows, so that few programs have to look for one.
    """
    found, before = 0, 0
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < num_rows
        slot = tl.load(rows + row, mask=inside, other=-1)
        begin = tl.load(rows + 2 * num_rows + row - 1, mask=inside & (row > 0), other=0)
        end = tl.load(rows + 2 * num_rows + row, mask=inside, other=0)
        is_long = ((slot >= 0) & (end - begin > ONE_BY_ONE)).to(tl.int32)
        rank = before + tl.cumsum(is_long, 0)
        is_it = (is_long == 1) & (rank == number + 1)
        found += tl.sum(tl.where(is_it, row, 0), 0)
        before += tl.sum(is_long, 0)
    return tl.where(number < before, found, -1)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _fold_rows(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0915
    packed,
    packed_row,
    columns,
    recent,
    entries,
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
    ONE_BY_ONE: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_LONG: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some columns of one head's state through one row, which is long or not.

    The state and what stays in it are there before the convolution is.
    """
    row = tl.program_id(0)
    if IS_LONG:
        row = _long_row(rows, num_rows, row, ONE_BY_ONE, 64)
    head = tl.program_id(1)
    slot = tl.load(rows + row, mask=row >= 0, other=-1)
    start = tl.load(rows + num_rows + row, mask=row >= 0, other=0)
    first = tl.load(rows + 2 * num_rows + row - 1, mask=row > 0, other=0)
    end = tl.load(rows + 2 * num_rows + row, mask=row >= 0, other=0)
    is_mine = (end - first > ONE_BY_ONE) == IS_LONG
    if (slot >= 0) & (end > first) & is_mine:
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
        kept = recent + slot * entries * width
        for position in range(length, length + staying):
            source = kept + (position % entries) * width + channels + head
            key = _recalled(kept, entries, width, taps, position, of_key, key_end, TAPS)
            value = _recalled(kept, entries, width, taps, position, of_value, value_end, TAPS)
            step, decay = tl.load(source), tl.load(source + VALUES)
            state = _fold(state, key, value, step, decay, rate, bias, step_scale, eps)
        await_previous(IS_DEPENDENT)
        if end - first <= longest:
            tl.store(stored, state, mask=inside)
        if IS_LONG:
            for at in range(first, end, CHUNK):
                token = at + tl.arange(0, CHUNK)
                is_token = token < end
                is_here = is_token[:, None] & is_key[None, :]
                source = mixed + token[:, None] * channels
                query = tl.load(source + of_query[None, :], mask=is_here, other=0.0)
                key = tl.load(source + of_key[None, :], mask=is_here, other=0.0)
                is_here = is_token[:, None] & is_value[None, :]
                value = tl.load(source + of_value[None, :], mask=is_here, other=0.0)
                gates = packed + token * packed_row
                step = _opened(tl.load(gates + step_column, mask=is_token, other=0.0))
                step = tl.where(is_token, step * step_scale, 0.0)
                decay = tl.load(gates + decay_column, mask=is_token, other=0.0)
                decay = tl.where(is_token, _decay(decay, rate, bias), 0.0)
                state, found = _fold_chunk(
                    state,
                    _whole(query, eps) * tl.div_rn(1.0, tl.sqrt_rn(KEY_SIZE * 1.0)),
                    _whole(key, eps),
                    value.to(tl.float32),
                    step,
                    decay,
                    CHUNK,
                )
                out = read + token[:, None] * (VALUES * VALUE_SIZE)
                out += head * VALUE_SIZE + at_value[None, :]
                tl.store(out, found.to(read.dtype.element_ty), mask=is_here)
        else:
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
    else:
        await_previous(IS_DEPENDENT)


@triton.jit(do_not_specialize=["count", "num_rows"])  # type: ignore[untyped-decorator]
def _keep_and_gate(  # type: ignore[no-untyped-def] # noqa: PLR0913
    packed,
    packed_row,
    kept_columns,
    recent,
    entries,
    width,
    gate_columns,
    read,
    norm,
    gated,
    extent,
    tokens,
    count,
    rows,
    num_rows,
    longest,
    eps,
    VALUES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Of one token some heads, or some kept columns; and how far the state of one row is."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    groups: tl.constexpr = (VALUES + HEADS - 1) // HEADS
    if (token < count) & (part < groups):
        head = part * HEADS + tl.arange(0, HEADS)
        line = packed + token * packed_row
        used = tl.where(tl.load(tokens + token) >= 0, VALUES, 0)
        _gate(
            line,
            gate_columns,
            read,
            norm,
            gated,
            token,
            head,
            used,
            eps,
            VALUES,
            VALUE_SIZE,
            VALUE_BLOCK,
        )
    if (token < count) & (part >= groups):
        at = (part - groups) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(tokens + token)
        position = tl.load(tokens + count + token)
        # Where the row has more tokens than fit in ``recent``, the last ones stay.
        later = token + entries
        later_slot = tl.load(tokens + later, mask=later < count, other=-2)
        later_position = tl.load(tokens + count + later, mask=later < count, other=-2)
        is_replaced = (later_slot == slot) & (later_position == position + entries)
        if (slot >= 0) & (is_replaced == 0):
            column = tl.load(kept_columns + at, mask=at < width, other=0)
            found = tl.load(packed + token * packed_row + column, mask=at < width, other=0.0)
            entry = slot * entries + position % entries
            tl.store(recent + entry * width + at, found, mask=at < width)
    if (token < num_rows) & (part == 0):
        slot = tl.load(rows + token)
        start = tl.load(rows + num_rows + token)
        first = tl.load(rows + 2 * num_rows + token - 1, mask=token > 0, other=0)
        length = tl.load(rows + 2 * num_rows + token) - first
        if (slot >= 0) & (length > 0):
            tl.store(extent + 2 * slot, tl.where(length > longest, start + length, start))
            tl.store(extent + 2 * slot + 1, tl.where(length > longest, 0, length))


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def] # noqa: PLR0913
    line,
    columns,
    read,
    norm,
    gated,
    token,
    head,
    used,
    eps,
    VALUES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """What some heads of a token read, normed and gated; 0 from head ``used`` on."""
    at_value = tl.arange(0, VALUE_BLOCK)
    at = head[:, None] * VALUE_SIZE + at_value[None, :]
    inside = (head < VALUES)[:, None] & (at_value < VALUE_SIZE)[None, :]
    column = tl.load(columns + at, mask=inside, other=0)
    gate = tl.load(line + column, mask=inside, other=0.0)
    element = token * (VALUES * VALUE_SIZE) + at
    states = tl.load(read + element, mask=inside & (head < used)[:, None], other=0.0)
    wide = states.to(tl.float32)
    root = tl.sqrt_rn(tl.sum(wide * wide, 1) / VALUE_SIZE + eps)
    normed = (wide * tl.div_rn(1.0, root)[:, None]).to(states.dtype)
    weight = tl.load(norm + at_value, mask=at_value < VALUE_SIZE, other=0.0)
    result = (normed.to(tl.float32) * weight.to(tl.float32)[None, :]).to(states.dtype)
    result = result.to(tl.float32) * _silu(gate)
    tl.store(gated + element, result.to(gated.dtype.element_ty), mask=inside)
