"""The exponential race over the chunks of a row, and the lists of what filters may keep."""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.noise import Stream
from guided_spec.ops.verify_decide_triton import DRAW, FILTERED
from guided_spec.ops.verify_tiles_triton import (
    NO_TOKEN,
    exponential,
    load_tile,
    philox_tile,
    tile_tokens,
)

__all__ = ["best", "draw_kernel", "residual_of"]

_SAMPLE = tl.constexpr(int(Stream.SAMPLE))
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def best(value, token):  # type: ignore[no-untyped-def]
    """The largest of a tile's values, and the first token that has it."""
    best = tl.max(tl.max(value, 1), 0)
    return best, tl.min(tl.min(tl.where(value == best, token, NO_TOKEN), 1), 0)


@triton.jit
def residual_of(step, request, place, token, target, is_used):  # type: ignore[no-untyped-def]
    """max(p - q, 0) of a tile's tokens: what a refused draft leaves of ``target``."""
    if step.probs is None:
        drafted = tl.load(step.drafted + request * step.num_draft + place)
        left = tl.where(token == drafted, 0.0, target)
    else:
        start = step.probs + request.to(tl.int64) * step.probs_batch_stride
        start += place.to(tl.int64) * step.probs_row_stride
        q = tl.load(start + token, mask=is_used, other=0.0).to(tl.float32)
        left = tl.maximum(target - q, 0.0)
    return left


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    capacity,
    stride,
    coupled: tl.constexpr,
    filtered: tl.constexpr,
    words: tl.constexpr,
):
    """Race the chunks of rows to draw from, or list what filters may keep: grid (B, C, stride).

    A program goes over every ``stride``-th row of its request; most rows need nothing.
    """
    request, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(step.temperature + request)
    length = tl.load(step.lengths + request)
    for turn in range(tl.cdiv(step.num_draft + 1, stride)):
        place = tl.program_id(2) + turn * stride
        row = (request * (step.num_draft + 1) + place).to(tl.int64)
        state = tl.load(work.state + row, mask=place <= length, other=0)
        if (state & DRAW) != 0:
            largest = tl.load(work.row_max + row)
            chunk_max = tl.load(work.chunk_max + row * num_chunks + chunk)
            behind = tl.div_rn(largest - chunk_max, temperature)
            is_filtered = (state & FILTERED) != 0
            if filtered and is_filtered:
                cut = tl.load(work.cut + row)
                if (behind <= cut) & (behind < _INFINITY):
                    scores = load_tile(step, rules, request, place, chunk, words)
                    depth = tl.reshape(tl.div_rn(largest - scores, temperature), [words * 32])
                    token = tl.reshape(tile_tokens(chunk, words), [words * 32])
                    is_in = (depth <= cut) & (depth < _INFINITY)
                    order = tl.cumsum(is_in.to(tl.int32), 0)
                    base = tl.atomic_add(work.num_listed + row, tl.sum(is_in.to(tl.int32), 0))
                    at = base + order - 1
                    is_stored = is_in & (at < capacity)
                    tl.store(work.listed_depths + row * capacity + at, depth, mask=is_stored)
                    tl.store(work.listed_tokens + row * capacity + at, token, mask=is_stored)
            else:
                at = (row * num_chunks + chunk) * 2
                residual, residual_token = -1.0, NO_TOKEN
                plain, plain_token = -1.0, NO_TOKEN
                if behind < _INFINITY:
                    scores = load_tile(step, rules, request, place, chunk, words)
                    token = tile_tokens(chunk, words)
                    weight = tl.exp(-tl.div_rn(largest - scores, temperature))
                    position = tl.load(step.first + request)
                    if coupled:
                        position += place
                    seed = tl.load(step.seeds + request)
                    noise = exponential(philox_tile(seed, position, _SAMPLE, chunk, words))
                    plain, plain_token = best(tl.div_rn(weight, noise), token)
                    if not coupled and place < length:
                        target = weight / tl.load(work.total + row)
                        left = residual_of(step, request, place, token, target, weight > 0)
                        residual, residual_token = best(tl.div_rn(left, noise), token)
                tl.store(work.race_value + at, residual)
                tl.store(work.race_token + at, residual_token)
                tl.store(work.race_value + at + 1, plain)
                tl.store(work.race_token + at + 1, plain_token)
