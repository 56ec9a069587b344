"""The token of each row that one is drawn from, and the draft tokens that bounds left open."""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.noise import Stream
from guided_spec.ops.verify_decide_triton import ACCEPTED, DRAW, FILTERED, OPEN
from guided_spec.ops.verify_draw_triton import best, residual_of
from guided_spec.ops.verify_filter_triton import candidates, threshold
from guided_spec.ops.verify_tiles_triton import NO_TOKEN, exponential, philox_points

__all__ = ["resolve_kernel"]

_SAMPLE = tl.constexpr(int(Stream.SAMPLE))


@triton.jit
def _winner(residual, residual_token, plain, plain_token):  # type: ignore[no-untyped-def]
    """The residual's winner; the target's where rounding left nothing of it; -1 without any."""
    best = tl.max(residual, 0)
    token = tl.min(tl.where(residual == best, residual_token, NO_TOKEN), 0)
    plain_best = tl.max(plain, 0)
    other = tl.min(tl.where(plain == plain_best, plain_token, NO_TOKEN), 0)
    return tl.where(best > 0, token, tl.where(plain_best > 0, other, -1))


@triton.jit  # type: ignore[untyped-decorator]
def _race(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    capacity,
    row,
    blocks,
    level,
    kept,
    coupled: tl.constexpr,
    words: tl.constexpr,
):
    """The token drawn from a filtered row: after a draft token that of the residual."""
    request = (row // (step.num_draft + 1)).to(tl.int32)
    place = (row % (step.num_draft + 1)).to(tl.int32)
    position = tl.load(step.first + request)
    is_refusal = place < tl.load(step.lengths + request)
    if coupled:
        position += place
        is_refusal = is_refusal & (position < 0)  # never: all draws are the target's own
    seed = tl.load(step.seeds + request)
    plain = tl.zeros([words, 32], tl.float32)
    plain_token = tl.zeros([words, 32], tl.int32)
    residual, residual_token = plain, plain_token
    for block in range(blocks):
        depth, token = candidates(step, rules, work, capacity, row, block, words)
        weight = tl.where(depth <= level, tl.exp(-depth), 0.0)
        where = tl.zeros([words, 32], tl.int64) + position
        noise = exponential(philox_points(seed, where, _SAMPLE, token))
        value = tl.div_rn(weight, noise)
        plain_token = tl.where(value > plain, token, plain_token)
        plain = tl.maximum(plain, value)
        if is_refusal:
            left = residual_of(step, request, place, token, weight / kept, weight > 0)
            value = tl.div_rn(left, noise)
            residual_token = tl.where(value > residual, token, residual_token)
            residual = tl.maximum(residual, value)
    plain, plain_token = best(plain, plain_token)
    residual, residual_token = best(residual, residual_token)
    return tl.where(residual > 0, residual_token, tl.where(plain > 0, plain_token, -1))


@triton.jit  # type: ignore[untyped-decorator]
def resolve_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    filters,
    num_chunks,
    capacity,
    coupled: tl.constexpr,
    filtered: tl.constexpr,
    words: tl.constexpr,
    chunks: tl.constexpr,
):
    """Each marked row's token, and whether its draft token stays where that was open: grid (N,)."""
    row = tl.program_id(0).to(tl.int64)
    request = (row // (step.num_draft + 1)).to(tl.int32)
    place = (row % (step.num_draft + 1)).to(tl.int32)
    length = tl.load(step.lengths + request)
    state = tl.load(work.state + row, mask=place <= length, other=0)
    if (state & DRAW) != 0:
        if filtered and ((state & FILTERED) != 0):
            count = tl.load(work.num_listed + row)
            blocks = tl.where(count <= capacity, tl.cdiv(count, words * 32), num_chunks)
            level, kept = threshold(step, rules, work, filters, capacity, row, blocks, words)
            depth = tl.load(work.depth + row)
            share = tl.where(depth <= level, tl.exp(-depth) / kept, 0.0)
            if ((state & OPEN) != 0) & (tl.load(work.test + row) < share):
                tl.store(work.state + row, ACCEPTED)
            else:
                token = _race(step, rules, work, capacity, row, blocks, level, kept, coupled, words)
                tl.store(work.token + row, token)
        else:
            chunk = tl.arange(0, chunks)
            at = (row * num_chunks + chunk) * 2
            inside = chunk < num_chunks
            value = tl.load(work.race_value + at, mask=inside, other=-1.0)
            token = tl.load(work.race_token + at, mask=inside, other=NO_TOKEN)
            plain = tl.load(work.race_value + at + 1, mask=inside, other=-1.0)
            plain_token = tl.load(work.race_token + at + 1, mask=inside, other=NO_TOKEN)
            tl.store(work.token + row, _winner(value, token, plain, plain_token))
