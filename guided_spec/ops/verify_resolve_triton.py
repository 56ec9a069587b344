"""The exact thresholds of filtered rows, and the draft tokens that bounds left open.

Masses of listed tokens are added as whole numbers, which gives the same sum in every order. Where
a row's bracket was wrong or its list too long, the row itself is searched, more slowly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.dependents_triton import follow
from guided_spec.ops.verify_decide_triton import ACCEPTED, DRAW, FILTERED, OPEN
from guided_spec.ops.verify_tiles_triton import depth_of, load_tile

__all__ = ["threshold_kernel"]

_UNIT = tl.constexpr(2.0**40)  # the whole number that a mass of 1 is
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_BOTH = tl.constexpr(DRAW.value + FILTERED.value)


@triton.jit
def _uses(step, filters, request):  # type: ignore[no-untyped-def]
    """min-p is used, top-k is, k, top-p is, and top_p, of a request."""
    has_min = tl.full([], 0, tl.int1)  # known to the compiler, which leaves out what it rules out
    has_k, has_p = has_min, has_min
    k = tl.full([], 0, tl.int64)
    top_p = tl.full([], 1.0, tl.float32)
    if filters.min_p:
        has_min = tl.load(step.min_p + request) > 0
    if filters.top_k:
        k = tl.load(step.top_k + request)
        has_k = (k > 0) & (k < step.vocab_size)
    if filters.top_p:
        top_p = tl.load(step.top_p + request)
        has_p = top_p < 1
    return has_min, has_k, k, has_p, top_p.to(tl.float64)


# --- among the listed depths ---


@triton.jit
def _search_list(depth, amount, whole, low, high, target):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """The deepest depth such that the amounts above it are short of ``target``; those down to it.

    ``high`` is one of the depths, and all are above ``low``, so the interval closes exactly.
    whole: the amounts down to ``high``.
    """
    before, until = whole * 0, whole  # the amounts down to either end
    while low < high:
        # Where a line between the ends has the target, but for the tenth next to either.
        part = (target - before.to(tl.float64)).to(tl.float32) / (until - before).to(tl.float32)
        middle = low + (high - low) * tl.minimum(tl.maximum(part, 0.1), 0.9)
        middle = tl.where(middle < high, middle, low)
        is_in = depth <= middle
        found = tl.sum(tl.where(is_in, amount, 0), 0)
        above = tl.max(tl.where(is_in, depth, -1.0), 0)
        below = tl.min(tl.where(is_in, _INFINITY, depth), 0)
        is_short = found.to(tl.float64) < target
        low, before = tl.where(is_short, below, low), tl.where(is_short, found, before)
        high, until = tl.where(is_short, high, above), tl.where(is_short, until, found)
    return low, until


@triton.jit  # type: ignore[untyped-decorator]
def _sure(work, row, num_chunks, chunks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number and the mass (as a whole number) of the tokens above the bracket, int64."""
    chunk = tl.arange(0, chunks)
    inside = chunk < num_chunks
    number = tl.load(work.sure_number + row * num_chunks + chunk, mask=inside, other=0)
    mass = tl.load(work.sure_mass + row * num_chunks + chunk, mask=inside, other=0.0)
    return tl.sum(number, 0).to(tl.int64), tl.sum((mass * _UNIT).to(tl.int64), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _listed_threshold(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    work,
    filters,
    num_chunks,
    capacity,
    row,
    chunks: tl.constexpr,
    listed: tl.constexpr,
):
    """The depth of the last kept token, the mass of all kept ones, and whether that is right."""
    has_min, has_k, k, has_p, top_p = _uses(step, filters, row // (step.num_draft + 1))
    low = tl.load(work.low + row)
    is_whole = tl.load(work.high + row) >= tl.load(work.cut + row)
    sure_number, sure_mass = _sure(work, row, num_chunks, chunks)
    count = tl.load(work.num_listed + row)
    entry = tl.arange(0, listed)
    exists = entry < tl.minimum(count, capacity)
    depth = tl.load(work.listed_depths + row * capacity + entry, mask=exists, other=_INFINITY)
    one = tl.load(work.listed_counts + row * capacity + entry, mask=exists, other=0).to(tl.int64)
    mass = one * (tl.exp(-depth) * _UNIT).to(tl.int64)
    is_right = count <= capacity
    start = tl.maximum(low, 0.0)
    level = tl.maximum(tl.max(tl.where(exists, depth, -1.0), 0), low)
    if has_k:
        listed_number = tl.sum(one, 0)
        number = sure_number + listed_number
        is_right = is_right & ((sure_number < k) | (number <= k)) & (is_whole | (number >= k))
        if is_right & (number > k):
            wanted = (k - sure_number).to(tl.float64)
            level, _ = _search_list(depth, one, listed_number, start, level, wanted)
    kept = tl.sum(tl.where(depth <= level, mass, 0), 0)
    if has_p:
        whole = (tl.load(work.total + row) * _UNIT).to(tl.float64)
        if has_min | has_k:
            whole = (sure_mass + kept).to(tl.float64)
        wanted = whole * top_p - sure_mass.to(tl.float64)
        is_all = is_whole | has_min | has_k
        is_right = is_right & ((wanted > 0) | (sure_number == 0))
        is_right = is_right & (is_all | (kept.to(tl.float64) >= wanted))
        if is_right:
            level, kept = _search_list(depth, mass, kept, start, level, wanted)
    return level, (sure_mass + kept).to(tl.float32) / _UNIT, is_right


# --- among all tokens of a row ---


@triton.jit  # type: ignore[untyped-decorator]
def _sweep(step, rules, work, num_chunks, row, level, words: tl.constexpr, counts: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Of the tokens down to ``level``: their mass (or number) as int64, and the deepest.

    Third the first one below ``level``. Tokens below the row's cut are none.
    """
    request = (row // (step.num_draft + 1)).to(tl.int32)
    place = (row % (step.num_draft + 1)).to(tl.int32)
    temperature = tl.load(step.temperature + request)
    largest, cut = tl.load(work.row_max + row), tl.load(work.cut + row)
    mass = tl.zeros([words, 32], tl.int64)
    deepest = tl.full([words, 32], -1.0, tl.float32)
    following = tl.full([words, 32], _INFINITY, tl.float32)
    for chunk in range(num_chunks):
        scores = load_tile(step, rules, request, place, chunk, words)
        depth = depth_of(scores, largest, temperature)
        depth = tl.where(depth <= cut, depth, _INFINITY)
        is_in = depth <= level
        if counts:
            mass += is_in.to(tl.int64)
        else:
            mass += tl.where(is_in, tl.exp(-depth) * _UNIT, 0.0).to(tl.int64)
        deepest = tl.maximum(deepest, tl.where(is_in, depth, -1.0))
        following = tl.minimum(following, tl.where(is_in, _INFINITY, depth))
    return (
        tl.sum(tl.sum(mass, 1), 0),
        tl.max(tl.max(deepest, 1), 0),
        tl.min(tl.min(following, 1), 0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    row,
    deepest,
    target,
    words: tl.constexpr,
    counts: tl.constexpr,
):
    """As ``_search_list``, among all tokens of the row down to ``deepest``."""
    low, high = deepest * 0.0, deepest
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        found, above, below = _sweep(step, rules, work, num_chunks, row, middle, words, counts)
        is_short = found.to(tl.float64) < target
        low = tl.where(is_short, below, low)
        high = tl.where(is_short, high, above)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _scanned_threshold(step, rules, work, filters, num_chunks, row, words: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """The depth of the last kept token, and the mass of all kept ones."""
    has_min, has_k, k, has_p, top_p = _uses(step, filters, row // (step.num_draft + 1))
    number, level, _ = _sweep(step, rules, work, num_chunks, row, _LARGEST, words, counts=True)
    if has_k & (number > k):
        wanted = k.to(tl.float64)
        level = _search(step, rules, work, num_chunks, row, level, wanted, words, counts=True)
    if has_p:
        whole = (tl.load(work.total + row) * _UNIT).to(tl.float64)
        if has_min | has_k:
            mass, _, _ = _sweep(step, rules, work, num_chunks, row, level, words, counts=False)
            whole = mass.to(tl.float64)
        wanted = whole * top_p
        level = _search(step, rules, work, num_chunks, row, level, wanted, words, counts=False)
    mass, _, _ = _sweep(step, rules, work, num_chunks, row, level, words, counts=False)
    return level, mass.to(tl.float32) / _UNIT


@triton.jit  # type: ignore[untyped-decorator]
def threshold_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    filters,
    num_chunks,
    capacity,
    words: tl.constexpr,
    chunks: tl.constexpr,
    short: tl.constexpr,
    listed: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """``work.cut`` and ``work.total`` of filtered rows as they are: grid (N,).

    Also whether the draft token stays where that was open. chunks, listed: powers of two, at least
    C and ``capacity``. short: likewise; lists of up to so many are searched as such.
    """
    follow(FOLLOWS)
    row = tl.program_id(0).to(tl.int64)
    request = (row // (step.num_draft + 1)).to(tl.int32)
    place = (row % (step.num_draft + 1)).to(tl.int32)
    length, state = tl.load(step.lengths + request), tl.load(work.state + row)
    num_listed = tl.load(work.num_listed + row)
    if (place <= length) & ((state & _BOTH) == _BOTH):
        if num_listed <= short:
            level, kept, is_right = _listed_threshold(
                step, work, filters, num_chunks, capacity, row, chunks, short
            )
        else:
            level, kept, is_right = _listed_threshold(
                step, work, filters, num_chunks, capacity, row, chunks, listed
            )
        if is_right == 0:
            level, kept = _scanned_threshold(step, rules, work, filters, num_chunks, row, words)
        tl.debug_barrier()  # all have read what is written here
        tl.store(work.cut + row, level)
        tl.store(work.total + row, kept)
        depth = tl.load(work.depth + row)
        share = tl.where(depth <= level, tl.exp(-depth) / kept, 0.0)
        if ((state & OPEN) != 0) & (tl.load(work.test + row) < share):
            tl.store(work.state + row, ACCEPTED)
