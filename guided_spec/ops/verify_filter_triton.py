"""What the filters of a row keep, narrowed down: a bracket of its last kept token, and its list.

A token's depth is how far its score is below the largest of its row: 0 for that one. Filters keep
the tokens down to some depth. A sample of the row says about where that is. All tokens above the
bracket are kept and need only be added; those inside it are listed, equal ones together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.dependents_triton import follow
from guided_spec.ops.verify_decide_triton import DRAW, FILTERED
from guided_spec.ops.verify_tiles_triton import depth_of, load_groups, load_tile

__all__ = ["bracket_kernel", "collect_kernel"]

_INFINITY = tl.constexpr(float("inf"))
_BOTH = tl.constexpr(DRAW.value + FILTERED.value)
# How exactly the ends of a bracket are sought: as a part of the row's depths, and of the bracket.
_FINENESS = tl.constexpr(2.0**-12)
_LOOSENESS = tl.constexpr(2.0**-3)
_VALUES = tl.constexpr(8)  # most that are listed together
_SINGLE = tl.constexpr(32)  # tokens of a chunk that are listed each for itself


@triton.jit  # type: ignore[untyped-decorator]
def _estimate(depth, weight, level, by_number, sampled, sureness: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """How many tokens of the row are down to ``level``, or what mass is below it; and the error.

    depth, weight: [S, 8] of the sample. sampled: its part of the vocabulary.

    The error is a bound in the manner of Bernstein's inequality: a token weighs ``most`` at most.
    """
    inside = tl.where(by_number, depth <= level, depth > level)
    found = tl.sum(tl.sum(tl.where(inside, weight, 0.0), 1), 0) / sampled
    most = tl.where(by_number, 1.0, tl.exp(-level)) / sampled
    error = sureness * (tl.sqrt(found * most) + 1.6 * most)
    return found, tl.where(sampled < 1.0, error, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _bracket(depth, weight, wanted, slack, by_number, cut, sampled, sureness: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Depths below which and above which the last kept token is not; most likely.

    Each is known to lie in an interval. Both are halved until that gains little: where the sample
    leaves much open between them, the ends need not be known exactly.
    """
    deepest = tl.max(tl.max(tl.where(depth < _INFINITY, depth, 0.0), 1), 0)
    deepest = tl.minimum(deepest, cut)
    low, high = deepest * 0.0 - 1.0, cut
    low_start, low_end = deepest * 0.0, deepest
    high_start, high_end = low_start, low_end
    width = deepest
    while width > tl.maximum(deepest * _FINENESS, (high_start - low_end) * _LOOSENESS):
        level = (low_start + low_end) * 0.5
        found, error = _estimate(depth, weight, level, by_number, sampled, sureness)
        above = tl.where(by_number, found + error < wanted, found - error - slack > wanted)
        low = tl.where(above, level, low)
        # Far above the error of a mass is large, so nothing is sure there, but is further down.
        is_early = above | ((by_number == 0) & (found > 2.0 * wanted))
        low_start = tl.where(is_early, level, low_start)
        low_end = tl.where(is_early, low_end, level)
        level = (high_start + high_end) * 0.5
        found, error = _estimate(depth, weight, level, by_number, sampled, sureness)
        below = tl.where(by_number, found - error >= wanted, found + error + slack <= wanted)
        high = tl.where(below, level, high)
        high_start = tl.where(below, high_start, level)
        high_end = tl.where(below, level, high_end)
        width *= 0.5
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _sample(step, rules, request, place, groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits [groups, 8] from all over a row, and their part of the vocabulary."""
    num_groups = (step.vocab_size + 7) // 8
    group = tl.arange(0, groups).to(tl.int64)
    if num_groups > groups:
        group = group * num_groups // groups
    scores = load_groups(step, rules, request, place, group)
    return scores, tl.minimum(groups * 1.0 / num_groups, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def bracket_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    filters,
    groups: tl.constexpr,
    sureness: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """``work.low`` and ``work.high`` of filtered rows: grid (N,). The latter is ``cut`` at most."""
    follow(FOLLOWS)
    row = tl.program_id(0).to(tl.int64)
    request = (row // (step.num_draft + 1)).to(tl.int32)
    place = (row % (step.num_draft + 1)).to(tl.int32)
    length, state = tl.load(step.lengths + request), tl.load(work.state + row)
    if (place <= length) & ((state & _BOTH) == _BOTH):
        temperature = tl.load(step.temperature + request)
        cut = tl.load(work.cut + row)
        low, high = cut, cut  # min-p alone keeps what is down to its cut
        total = tl.load(work.total + row)
        never = tl.full([], 0, tl.int1)  # known to the compiler, which leaves out what it rules out
        has_min, by_number, by_mass = never, never, never
        wanted, slack = total, total * 3e-6
        if filters.min_p:
            has_min = tl.load(step.min_p + request) > 0
        if filters.top_p:
            top_p = tl.load(step.top_p + request)
            by_mass = top_p < 1
            wanted = (1.0 - top_p) * total
            slack += wanted * 1e-4
        if filters.top_k:
            k = tl.load(step.top_k + request)
            by_number = (k > 0) & (k < step.vocab_size)
            wanted = tl.where(by_number, k.to(tl.float32), wanted)
        if by_number | (by_mass & (has_min == 0)):
            largest = tl.load(work.row_max + row)
            scores, sampled = _sample(step, rules, request, place, groups)
            depth = depth_of(scores, largest, temperature)
            weight = tl.where(by_number, 1.0, tl.exp(-depth))
            low, high = _bracket(depth, weight, wanted, slack, by_number, cut, sampled, sureness)
        # What top-p takes its part of is not known before the others are done.
        low = tl.where(by_mass & (by_number | has_min), -1.0, low)
        tl.store(work.low + row, low)
        tl.store(work.high + row, high)


@triton.jit  # type: ignore[untyped-decorator]
def _list(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    work, row, depth, low, high, left, capacity, few: tl.constexpr, size: tl.constexpr
):
    """Append the depths of a chunk, [size], between ``low`` and ``high``: ``left`` of them."""
    turn = left * 0
    while (left > few) & (turn < _VALUES):
        first = tl.min(tl.where(depth > low, depth, _INFINITY), 0)
        count = tl.sum((depth == first).to(tl.int32), 0)
        at = tl.atomic_add(work.num_listed + row, 1)
        is_stored = at < capacity
        tl.store(work.listed_depths + row * capacity + at, first, mask=is_stored)
        tl.store(work.listed_counts + row * capacity + at, count, mask=is_stored)
        low = first
        left -= count
        turn += 1
    if left > 0:
        is_in = (depth > low) & (depth <= high)
        ones = tl.full([size], 1, tl.int32)
        if left > _SINGLE:
            at = tl.atomic_add(work.num_listed + row, left) + tl.cumsum(is_in.to(tl.int32), 0) - 1
        else:  # each for itself: sooner done than a running sum
            numbers = work.num_listed + row + tl.zeros([size], tl.int32)
            at = tl.atomic_add(numbers, ones, mask=is_in)
        is_stored = is_in & (at < capacity)
        tl.store(work.listed_depths + row * capacity + at, depth, mask=is_stored)
        tl.store(work.listed_counts + row * capacity + at, ones, mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _collect(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    request,
    place,
    chunk,
    num_chunks,
    capacity,
    few: tl.constexpr,
    words: tl.constexpr,
):
    """One chunk of one row."""
    row = (request * (step.num_draft + 1) + place).to(tl.int64)
    temperature = tl.load(step.temperature + request)
    largest = tl.load(work.row_max + row)
    at = row * num_chunks + chunk
    behind = depth_of(tl.load(work.chunk_max + at), largest, temperature)
    low, high = tl.load(work.low + row), tl.minimum(tl.load(work.high + row), 3e38)
    mass, number = 0.0, 0
    if behind <= high:
        scores = load_tile(step, rules, request, place, chunk, words)
        depth = tl.reshape(depth_of(scores, largest, temperature), [words * 32])
        is_sure = (depth <= low) & (depth < _INFINITY)
        is_in = (depth > low) & (depth <= high)
        # A chunk has fewer tokens than 2^16.
        both = tl.sum(is_sure.to(tl.int32) + (is_in.to(tl.int32) << 16), 0)
        number = both & 65535
        if number > 0:
            mass = tl.sum(tl.where(is_sure, tl.exp(-depth), 0.0), 0)
        _list(work, row, depth, low, high, both >> 16, capacity, few, words * 32)
    tl.store(work.sure_mass + at, mass)
    tl.store(work.sure_number + at, number)


@triton.jit  # type: ignore[untyped-decorator]
def collect_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    capacity,
    stride,
    few: tl.constexpr,
    words: tl.constexpr,
    rows: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Add up what is above the brackets and list what is inside: grid (B, C, stride).

    A program goes over every ``stride``-th row of its request; most rows need nothing. Up to
    ``few`` tokens of a chunk are listed one by one, and of more those together that are equal.
    rows: a power of two, at least K + 1.
    """
    follow(FOLLOWS)
    request, chunk = tl.program_id(0), tl.program_id(1)
    length = tl.load(step.lengths + request)
    places = tl.arange(0, rows)
    states = work.state + (request * (step.num_draft + 1)).to(tl.int64) + places
    state = tl.load(states, mask=places <= step.num_draft, other=0)
    is_wanted = ((state & _BOTH) == _BOTH) & (places <= length)
    is_wanted = is_wanted & (places % stride == tl.program_id(2))
    place = tl.min(tl.where(is_wanted, places, rows), 0)
    while place < rows:
        _collect(step, rules, work, request, place, chunk, num_chunks, capacity, few, words)
        place = tl.min(tl.where(is_wanted & (places > place), places, rows), 0)
