"""The exponential race over the chunks of the rows that a token is drawn from."""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.dependents_triton import follow
from guided_spec.ops.noise import Stream
from guided_spec.ops.verify_decide_triton import ACCEPTED, DRAW
from guided_spec.ops.verify_tiles_triton import (
    NO_TOKEN,
    depth_of,
    exponential,
    load_tile,
    philox_tile,
    tile_tokens,
)

__all__ = ["race_kernel"]

_SAMPLE = tl.constexpr(int(Stream.SAMPLE))
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _best(value, token):  # type: ignore[no-untyped-def]
    """The largest of a tile's values, and the first token that has it."""
    best = tl.max(tl.max(value, 1), 0)
    return best, tl.min(tl.min(tl.where(value == best, token, NO_TOKEN), 1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _drawn_place(step, work, request, coupled: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row that this program draws from; but for coupled noise a request has one."""
    place = tl.program_id(2)
    if not coupled:
        turn = tl.arange(0, rows)
        at = (request * (step.num_draft + 1) + turn).to(tl.int64)
        # What is behind the draft's end does not matter: the row of the end is never accepted.
        state = tl.load(work.state + at, mask=turn <= step.num_draft, other=0)
        place = tl.min(tl.where((state & ACCEPTED) != 0, rows, turn), 0)
    return place


@triton.jit
def _draft_probs(step, request, place, token, is_read):  # type: ignore[no-untyped-def]
    """float32, of a tile of tokens: with which probability the drafter drew each at a position."""
    start = step.probs + request.to(tl.int64) * step.probs_batch_stride
    start += place.to(tl.int64) * step.probs_row_stride
    column, is_known = token, is_read
    if step.columns is not None:
        column = tl.load(step.columns + token, mask=is_read, other=-1)
        is_known = is_read & (column >= 0)
    q = tl.load(start + column, mask=is_known, other=0.0).to(tl.float32)
    if step.is_certain is not None:
        at = request * step.num_draft + place
        drafted = tl.load(step.drafted + at)
        is_certain = tl.load(step.is_certain + at) != 0
        q = tl.where(is_certain, (token == drafted).to(tl.float32), q)
    return q


@triton.jit  # type: ignore[untyped-decorator]
def race_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    coupled: tl.constexpr,
    filtered: tl.constexpr,
    is_split: tl.constexpr,
    words: tl.constexpr,
    rows: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Race the chunks of the rows to draw from: grid (B, C, 1), for coupled noise (B, C, K + 1).

    is_split: residual and target each have a race. Without probabilities of the draft, what a
    refused token leaves is the target without it, in any scale.
    """
    follow(FOLLOWS)
    request, chunk = tl.program_id(0), tl.program_id(1)
    length, temperature = tl.load(step.lengths + request), tl.load(step.temperature + request)
    place = _drawn_place(step, work, request, coupled, rows)
    row = (request * (step.num_draft + 1) + place).to(tl.int64)
    at = row * num_chunks + chunk
    state, largest = tl.load(work.state + row), tl.load(work.row_max + row)
    nearest = tl.load(work.chunk_max + at)
    if (place <= length) & ((state & DRAW) != 0):
        behind = depth_of(nearest, largest, temperature)
        level = tl.full([], 3e38, tl.float32)
        if filtered:
            level = tl.minimum(tl.load(work.cut + row), level)
        value, winner = -1.0, NO_TOKEN
        plain, plain_winner = -1.0, NO_TOKEN
        if behind <= level:
            scores = load_tile(step, rules, request, place, chunk, words)
            token = tile_tokens(chunk, words)
            depth = depth_of(scores, largest, temperature)
            weight = tl.exp(-depth)
            if filtered:
                weight = tl.where(depth <= level, weight, 0.0)
            position = tl.load(step.first + request)
            if coupled:
                position += place
            seed = tl.load(step.seeds + request)
            noise = exponential(philox_tile(seed, position, _SAMPLE, chunk, words))
            if is_split:
                plain, plain_winner = _best(weight / noise, token)
                if place < length:
                    q = _draft_probs(step, request, place, token, weight > 0)
                    weight = tl.maximum(weight / tl.load(work.total + row) - q, 0.0)
            elif not coupled:
                drafts = step.drafted + request * step.num_draft
                drafted = tl.load(drafts + place, mask=place < length, other=-1)
                weight = tl.where(token == drafted, 0.0, weight)
            value, winner = _best(weight / noise, token)
        tl.store(work.race_value + at, value)
        tl.store(work.race_token + at, winner)
        if is_split:
            size = (tl.num_programs(0) * (step.num_draft + 1)).to(tl.int64) * num_chunks
            tl.store(work.race_value + size + at, plain)
            tl.store(work.race_token + size + at, plain_winner)
