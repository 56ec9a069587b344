"""What the chunks' maxima and masses decide, and the answer once every row's token is known."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from guided_spec.ops.dependents_triton import follow
from guided_spec.ops.noise import Stream
from guided_spec.ops.verify_tiles_triton import (
    NO_TOKEN,
    depth_of,
    load_points,
    philox_points,
)

__all__ = ["ACCEPTED", "DRAW", "FILTERED", "OPEN", "Filters", "assemble_kernel", "decide_kernel"]

# The bits of a row's state.
ACCEPTED = tl.constexpr(1)  # its draft token stays
DRAW = tl.constexpr(2)  # a token has to be drawn from it
OPEN = tl.constexpr(4)  # its draft token is decided with the exact threshold
FILTERED = tl.constexpr(8)

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_INFINITY = tl.constexpr(float("inf"))
_MARGIN = tl.constexpr(1e-5)  # bounds decide only outside of it


class Filters(NamedTuple):
    """Which filters any request uses; ``tl.constexpr`` bools."""

    top_k: Any
    top_p: Any
    min_p: Any


@triton.jit  # type: ignore[untyped-decorator]
def _kth_chunk(depth, k, chunks: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, 1]: the k-th smallest of ``depth`` [rows, chunks]; inf where there are fewer."""
    ordered = tl.sort(depth, dim=1)
    at = tl.arange(0, chunks)[None, :]
    kth = tl.min(tl.where(at == k - 1, ordered, _INFINITY), 1)
    return tl.where((k > 0) & (k <= chunks), kth, _INFINITY)


@triton.jit
def _maxima_mass(behind, cut):  # type: ignore[no-untyped-def]
    """[rows]: the mass of the chunks' largest tokens down to ``cut`` [rows]."""
    return tl.sum(tl.where(behind <= cut[:, None], tl.exp(-behind), 0.0), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _test_number(step, request, place, drafted, is_drafted, rows: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """float32 [rows]: u * q, what p of each draft token has to exceed."""
    position = tl.load(step.first + request) + place
    column = tl.zeros([rows], tl.int32)
    bits = philox_points(tl.load(step.seeds + request), position, _ACCEPT, column)
    test = (bits >> 8).to(tl.float32) * 5.9604644775390625e-08
    if step.probs is not None:
        start = step.probs + request.to(tl.int64) * step.probs_batch_stride
        column, is_known = drafted, is_drafted
        if step.columns is not None:
            column = tl.load(step.columns + drafted, mask=is_drafted, other=-1)
            is_known = is_drafted & (column >= 0)
        at = start + place.to(tl.int64) * step.probs_row_stride + column
        q = tl.load(at, mask=is_known, other=0.0).to(tl.float32)
        if step.is_certain is not None:
            flags = step.is_certain + request * step.num_draft + place
            q = tl.where(tl.load(flags, mask=is_drafted, other=0) != 0, 1.0, q)
        test *= q
    return test


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step, filters, request, behind, total, depth, share, rows: tl.constexpr, chunks: tl.constexpr
):
    """What the filters can keep of a sampled request's rows, by maxima and masses alone.

    behind: [rows, chunks] the depths of the chunks' largest tokens. depth, share: [rows] of the
    draft tokens; share is of the whole mass.

    Returns the cut, the least mass that can be kept, whether a draft token within the cut is kept
    for sure, and whether the request has filters at all.
    """
    cut = tl.full([rows], _INFINITY, tl.float32)
    least = total
    is_sure = share >= 0
    is_filtered = depth < 0  # false so far
    if filters.min_p:
        min_p = tl.load(step.min_p + request)
        if min_p > 0:
            cut = tl.minimum(cut, -tl.log(min_p))
            least = _maxima_mass(behind, cut)
            is_filtered = depth == depth
    if filters.top_k:
        k = tl.load(step.top_k + request)
        if (k > 0) & (k < step.vocab_size):
            kth = _kth_chunk(behind, k, chunks)
            # The chunks' largest tokens are different ones: k of them are no more than the top k.
            is_above = behind < kth[:, None]
            least = _maxima_mass(tl.where(is_above, behind, _INFINITY), cut)
            others = tl.maximum(k - tl.sum(is_above.to(tl.int32), 1), 0).to(tl.float32)
            least += tl.where(kth <= cut, others * tl.exp(-kth), 0.0)
            cut = tl.minimum(cut, kth)
            is_sure = is_sure & ((depth <= 0) | (share * (k + 1).to(tl.float32) > 1.0001))
            is_filtered = depth == depth
    if filters.top_p:
        top_p = tl.load(step.top_p + request)
        if top_p < 1:
            # Tokens too light to reach into the kept mass, were there as many as can be. What
            # the other filters leave is needed whole: its mass is what top_p is a part of.
            lightest = 0.99 * (1.0 - top_p) * total / (1.0 * step.vocab_size)
            cut = tl.where(is_filtered, cut, -tl.log(lightest))
            least = least * top_p
            is_sure = is_sure & ((depth <= 0) | (share > 1.0 - top_p + _MARGIN))
            is_filtered = depth == depth
    # The likeliest token is always kept.
    least = tl.where(is_filtered, tl.maximum(least, 1.0), least)
    return cut, least, is_sure, is_filtered


@triton.jit  # type: ignore[untyped-decorator]
def _decide_sampled(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    filters,
    chunk_max,
    chunk_sum,
    coupled: tl.constexpr,
    rows: tl.constexpr,
    chunks: tl.constexpr,
):
    """int32 [rows]: the states of a sampled request's rows; what they were made of is stored.

    p of a draft token is between its share of the whole mass and that of the least mass that the
    filters can keep. Only where these bounds are not enough its row is left open, and only in
    front of the first row that surely ends the draft.
    """
    request = tl.program_id(0)
    length = tl.load(step.lengths + request)
    place = tl.arange(0, rows)
    is_row, is_drafted = place <= length, place < length
    drafted = tl.load(step.drafted + request * step.num_draft + place, mask=is_drafted, other=0)
    temperature = tl.load(step.temperature + request)
    largest = tl.max(chunk_max, 1)
    has_any = chunk_max > float("-inf")
    behind = tl.where(has_any, depth_of(chunk_max, largest[:, None], temperature), _INFINITY)
    total = tl.sum(tl.exp(-behind) * chunk_sum, 1)
    is_alive = (total > 0) & (total < _INFINITY)
    score = load_points(step, rules, request, place, drafted, is_drafted)
    depth = tl.where(score > float("-inf"), depth_of(score, largest, temperature), _INFINITY)
    weight = tl.exp(-depth)
    share = tl.where(is_alive, weight / total, 0.0)
    test = _test_number(step, request, place, drafted, is_drafted, rows)
    cut, least, is_sure, is_filtered = _bounds(
        step, filters, request, behind, total, depth, share, rows, chunks
    )
    margin = tl.where(is_filtered, _MARGIN, 0.0)
    can_stay = is_drafted & is_alive & (weight > 0) & (depth <= cut)
    can_stay = can_stay & (test < weight / least * (1.0 + margin))
    stays = can_stay & is_sure & (test < share * (1.0 - margin))
    is_open = can_stay & ~stays
    if coupled:
        draws = is_row & is_alive
        state = tl.where(draws, DRAW, 0)
    else:
        last = tl.min(tl.where(is_row & ~can_stay, place, rows), 0)
        draws = is_alive & (((place < last) & is_open) | (place == last))
        state = tl.where(stays, ACCEPTED, 0) + tl.where(draws, DRAW, 0)
        state += tl.where(draws & is_open, OPEN, 0)
    state += tl.where(draws & is_filtered, FILTERED, 0)
    row = (request * (step.num_draft + 1) + place).to(tl.int64)
    tl.store(work.row_max + row, largest, mask=is_row)
    tl.store(work.total + row, total, mask=is_row)
    if work.cut is not None:
        tl.store(work.cut + row, cut, mask=is_row)
        tl.store(work.depth + row, depth, mask=is_row)
        tl.store(work.test + row, test, mask=is_row)
        tl.store(work.num_listed + row, tl.zeros([rows], tl.int32), mask=is_row)
    return state


@triton.jit  # type: ignore[untyped-decorator]
def decide_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    filters,
    num_chunks,
    coupled: tl.constexpr,
    rows: tl.constexpr,
    chunks: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Each row's state, and the tokens of greedy rows: grid (B,).

    rows, chunks: powers of two, at least K + 1 and C.
    """
    follow(FOLLOWS)
    request = tl.program_id(0)
    length = tl.load(step.lengths + request)
    place, chunk = tl.arange(0, rows), tl.arange(0, chunks)
    is_row, is_drafted = place <= length, place < length
    row = (request * (step.num_draft + 1) + place).to(tl.int64)
    at = row[:, None] * num_chunks + chunk[None, :]
    exists = is_row[:, None] & (chunk < num_chunks)[None, :]
    chunk_max = tl.load(work.chunk_max + at, mask=exists, other=float("-inf"))
    chunk_sum = tl.load(work.chunk_sum + at, mask=exists, other=0.0)
    token = tl.full([rows], -1, tl.int32)
    if tl.load(step.temperature + request) > 0:
        state = _decide_sampled(
            step, rules, work, filters, chunk_max, chunk_sum, coupled, rows, chunks
        )
    else:
        drafts = step.drafted + request * step.num_draft
        drafted = tl.load(drafts + place, mask=is_drafted, other=0)
        largest = tl.max(chunk_max, 1)
        is_nan = tl.max((chunk_sum != chunk_sum).to(tl.int32), 1) > 0
        first = tl.where(chunk_max == largest[:, None], chunk_sum, 2147483648.0)
        found = tl.min(first, 1).to(tl.int64)
        is_alive = (largest > float("-inf")) & ~is_nan
        token = tl.where(is_alive, found, -1).to(tl.int32)
        state = tl.where(is_drafted & is_alive & (found == drafted), ACCEPTED, 0)
    tl.store(work.state + row, state, mask=is_row)
    tl.store(work.token + row, token, mask=is_row)


@triton.jit
def _race_winners(work, at, is_read):  # type: ignore[no-untyped-def]
    """The best of all chunks, for each row: its value and its token."""
    value = tl.load(work.race_value + at, mask=is_read, other=-1.0)
    token = tl.load(work.race_token + at, mask=is_read, other=NO_TOKEN)
    most = tl.max(value, 1)
    return most, tl.min(tl.where(value == most[:, None], token, NO_TOKEN), 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def assemble_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    work,
    token_ids,
    num_accepted,
    num_chunks,
    coupled: tl.constexpr,
    is_split: tl.constexpr,
    rows: tl.constexpr,
    chunks: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """The answer: grid (B,). token_ids: int64 [B, K + 1], num_accepted: int64 [B].

    is_split: whether residual and target have races of their own.
    """
    follow(FOLLOWS)
    request = tl.program_id(0)
    length = tl.load(step.lengths + request)
    place, chunk = tl.arange(0, rows), tl.arange(0, chunks)
    is_row, is_drafted = place <= length, place < length
    row = (request * (step.num_draft + 1) + place).to(tl.int64)
    token = tl.load(work.token + row, mask=is_row, other=-1).to(tl.int64)
    drafted = tl.load(step.drafted + request * step.num_draft + place, mask=is_drafted, other=-1)
    state = tl.load(work.state + row, mask=is_row, other=0)
    count = tl.min(tl.where((state & ACCEPTED) != 0, NO_TOKEN, place), 0)
    if work.race_value is not None:
        is_raced = (state & DRAW) != 0
        if not coupled:
            is_raced = is_raced & (place == count)
        at = row[:, None] * num_chunks + chunk[None, :]
        is_read = is_raced[:, None] & (chunk < num_chunks)[None, :]
        most, winner = _race_winners(work, at, is_read)
        # Where rounding left nothing of the residual, its target decides; of a target without
        # one token only that one can be missing.
        other = tl.where(is_drafted, drafted, -1)
        if coupled:
            other = tl.full([rows], -1, tl.int64)
        if is_split:
            size = (tl.num_programs(0) * (step.num_draft + 1)).to(tl.int64) * num_chunks
            second, found = _race_winners(work, at + size, is_read)
            other = tl.where(second > 0, found, -1)
        token = tl.where(is_raced, tl.where(most > 0, winner, other), token)
    if coupled:
        count = tl.min(tl.where(is_drafted & (token == drafted), NO_TOKEN, place), 0)
    emitted = tl.where(place < count, drafted, tl.where(place == count, token, -1))
    tl.store(token_ids + row, emitted, mask=place <= step.num_draft)
    tl.store(num_accepted + request, count.to(tl.int64))
