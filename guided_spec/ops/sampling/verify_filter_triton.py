"""What the filters of a row keep: a bracket of its last kept token, then exactly which that is.

A token's depth is how far its score is below the largest of its row: 0 for that one. Filters keep
the tokens down to some depth. A sample of the row says about where that is. All tokens above the
bracket are kept and need only be added; those inside it are listed, equal ones together. Masses of
listed tokens are added as whole numbers, which gives the same sum in every order. Where a row's
bracket was wrong or its list too long, the row itself is searched, more slowly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.sampling.verify_tiles_triton import (
    ACCEPTED,
    DRAW,
    FILTERED,
    OPEN,
    Rules,
    Shape,
    Step,
    Work,
    depth_of,
    load_groups,
    load_tile,
    num_draft_of,
)

SHORT = 512  # depths that are searched without checking the capacity for more
SAMPLED = 8192  # tokens of a filtered row that bracket its threshold
SURENESS = 5.0  # standard errors between the bracket and its estimate
FEW = 128  # tokens of a chunk from which on equal ones are listed together
MANY_PROGRAMS = 8192  # from which on one program serves all rows of a request

_INFINITY = tl.constexpr(float("inf"))
_BOTH = tl.constexpr(DRAW.value + FILTERED.value)
# How exactly the ends of a bracket are sought: as a part of the row's depths, and of the bracket.
_FINENESS = tl.constexpr(2.0**-12)
_LOOSENESS = tl.constexpr(2.0**-3)
_VALUES = tl.constexpr(8)  # most that are listed together
_UNIT = tl.constexpr(2.0**40)  # the whole number that a mass of 1 is
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SINGLE = tl.constexpr(32)  # tokens of a chunk that are listed each for itself


def find_kept(step: Step, rules: Rules, work: Work, shape: Shape, *, coupled: bool) -> None:
    """``work.cut`` and ``work.total`` of every row that is filtered and needs them, as they are."""
    step = step.without_probs
    work = work._replace(race_value=None, race_token=None)
    batch, num_rows, num_chunks, words, capacity = shape
    total, lengths = batch * num_rows, step.lengths
    groups = min(SAMPLED // 8, triton.next_power_of_2(triton.cdiv(step.vocab_size, 8)))
    launch(_bracket_kernel, (total,), lengths)(step, rules, work, groups, SURENESS, num_warps=4)
    stride = num_rows if coupled or total * num_chunks <= MANY_PROGRAMS else 1
    launch(_collect_kernel, (batch, num_chunks, stride), lengths)(
        *(step, rules, work, num_chunks, capacity, stride, FEW, words),
        shape.most,
        num_warps=shape.num_warps,
    )
    chunks, listed = triton.next_power_of_2(num_chunks), triton.next_power_of_2(capacity)
    launch(_threshold_kernel, (total,), lengths)(
        *(step, rules, work, num_chunks, capacity, words, chunks),
        *(min(SHORT, listed), listed),
        num_warps=16,
    )


# --- bracket and list ---


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
def _sample(step, rules, request, offset, groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits [groups, 8] from all over a row, and their part of the vocabulary."""
    num_groups = (step.vocab_size + 7) // 8
    group = tl.arange(0, groups).to(tl.int64)
    if num_groups > groups:
        group = group * num_groups // groups
    scores = load_groups(step, rules, request, offset, group)
    return scores, tl.minimum(groups * 1.0 / num_groups, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _bracket_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    groups: tl.constexpr,
    sureness: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """``work.low`` and ``work.high`` of filtered rows: grid (N,). The latter is ``cut`` at most."""
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    request = (row // (num_draft_of(step) + 1)).to(tl.int32)
    offset = (row % (num_draft_of(step) + 1)).to(tl.int32)
    length, state = tl.load(step.lengths + request), tl.load(work.state + row)
    if (offset <= length) & ((state & _BOTH) == _BOTH):
        temperature = tl.load(step.temperature + request)
        cut = tl.load(work.cut + row)
        low, high = cut, cut  # min-p alone keeps what is down to its cut
        total = tl.load(work.total + row)
        has_min, by_number, k, by_mass, top_p = _uses(step, request)
        wanted = (1.0 - top_p) * total
        slack = total * 3e-6 + wanted * 1e-4
        wanted = tl.where(by_number, k.to(tl.float32), wanted)
        if by_number | (by_mass & (has_min == 0)):
            largest = tl.load(work.row_max + row)
            scores, sampled = _sample(step, rules, request, offset, groups)
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
    offset,
    chunk,
    num_chunks,
    capacity,
    few: tl.constexpr,
    words: tl.constexpr,
):
    """One chunk of one row."""
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    temperature = tl.load(step.temperature + request)
    largest = tl.load(work.row_max + row)
    at = row * num_chunks + chunk
    nearest = depth_of(tl.load(work.chunk_max + at), largest, temperature)
    low, high = tl.load(work.low + row), tl.minimum(tl.load(work.high + row), 3e38)
    mass, number = 0.0, 0
    if nearest <= high:
        scores = load_tile(step, rules, request, offset, chunk, words)
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


@triton.jit(do_not_specialize=["stride"])  # type: ignore[untyped-decorator]
def _collect_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    capacity,
    stride,
    few: tl.constexpr,
    words: tl.constexpr,
    rows: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Add up what is above the brackets and list what is inside: grid (B, C, stride).

    A program goes over every ``stride``-th row of its request; most rows need nothing. Up to
    ``few`` tokens of a chunk are listed one by one, and of more those together that are equal.
    rows: a power of two, at least K + 1.
    """
    await_previous(IS_DEPENDENT)
    request, chunk = tl.program_id(0), tl.program_id(1)
    length = tl.load(step.lengths + request)
    offsets = tl.arange(0, rows)
    states = work.state + (request * (num_draft_of(step) + 1)).to(tl.int64) + offsets
    state = tl.load(states, mask=offsets <= num_draft_of(step), other=0)
    is_wanted = ((state & _BOTH) == _BOTH) & (offsets <= length)
    is_wanted = is_wanted & (offsets % stride == tl.program_id(2))
    offset = tl.min(tl.where(is_wanted, offsets, rows), 0)
    while offset < rows:
        _collect(step, rules, work, request, offset, chunk, num_chunks, capacity, few, words)
        offset = tl.min(tl.where(is_wanted & (offsets > offset), offsets, rows), 0)


# --- the exact thresholds ---


@triton.jit
def _uses(step, request):  # type: ignore[no-untyped-def]
    """min-p is used, top-k is, k, top-p is, and top_p, of a request."""
    k, top_p = tl.load(step.top_k + request), tl.load(step.top_p + request)
    has_k = (k > 0) & (k < step.vocab_size)
    return tl.load(step.min_p + request) > 0, has_k, k, top_p < 1, top_p


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
    num_chunks,
    capacity,
    row,
    chunks: tl.constexpr,
    listed: tl.constexpr,
):
    """The depth of the last kept token, the mass of all kept ones, and whether that is right."""
    has_min, has_k, k, has_p, top_p = _uses(step, row // (num_draft_of(step) + 1))
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
        wanted = whole * top_p.to(tl.float64) - sure_mass.to(tl.float64)
        is_all = is_whole | has_min | has_k
        is_right = is_right & ((wanted > 0) | (sure_number == 0))
        is_right = is_right & (is_all | (kept.to(tl.float64) >= wanted))
        if is_right:
            level, kept = _search_list(depth, mass, kept, start, level, wanted)
    return level, (sure_mass + kept).to(tl.float32) / _UNIT, is_right


# --- among all tokens of a row ---


@triton.jit  # type: ignore[untyped-decorator]
def _sweep(step, rules, work, num_chunks, row, level, words: tl.constexpr, counts: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """The mass (or number) of the tokens down to ``level`` as int64, and the deepest of them.

    Third the first one below ``level``. Tokens below the row's cut are none.
    """
    request = (row // (num_draft_of(step) + 1)).to(tl.int32)
    offset = (row % (num_draft_of(step) + 1)).to(tl.int32)
    temperature = tl.load(step.temperature + request)
    largest, cut = tl.load(work.row_max + row), tl.load(work.cut + row)
    mass = tl.zeros([words, 32], tl.int64)
    deepest = tl.full([words, 32], -1.0, tl.float32)
    beyond = tl.full([words, 32], _INFINITY, tl.float32)
    for chunk in range(num_chunks):
        scores = load_tile(step, rules, request, offset, chunk, words)
        depth = depth_of(scores, largest, temperature)
        depth = tl.where(depth <= cut, depth, _INFINITY)
        is_in = depth <= level
        if counts:
            mass += is_in.to(tl.int64)
        else:
            mass += tl.where(is_in, tl.exp(-depth) * _UNIT, 0.0).to(tl.int64)
        deepest = tl.maximum(deepest, tl.where(is_in, depth, -1.0))
        beyond = tl.minimum(beyond, tl.where(is_in, _INFINITY, depth))
    return (
        tl.sum(tl.sum(mass, 1), 0),
        tl.max(tl.max(deepest, 1), 0),
        tl.min(tl.min(beyond, 1), 0),
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
    """``_search_list`` among all tokens of the row down to ``deepest``."""
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
def _scanned_threshold(step, rules, work, num_chunks, row, words: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """The depth of the last kept token, and the mass of all kept ones."""
    has_min, has_k, k, has_p, top_p = _uses(step, row // (num_draft_of(step) + 1))
    number, level, _ = _sweep(step, rules, work, num_chunks, row, _LARGEST, words, counts=True)
    if has_k & (number > k):
        wanted = k.to(tl.float64)
        level = _search(step, rules, work, num_chunks, row, level, wanted, words, counts=True)
    if has_p:
        whole = (tl.load(work.total + row) * _UNIT).to(tl.float64)
        if has_min | has_k:
            mass, _, _ = _sweep(step, rules, work, num_chunks, row, level, words, counts=False)
            whole = mass.to(tl.float64)
        wanted = whole * top_p.to(tl.float64)
        level = _search(step, rules, work, num_chunks, row, level, wanted, words, counts=False)
    mass, _, _ = _sweep(step, rules, work, num_chunks, row, level, words, counts=False)
    return level, mass.to(tl.float32) / _UNIT


@triton.jit  # type: ignore[untyped-decorator]
def _threshold_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    capacity,
    words: tl.constexpr,
    chunks: tl.constexpr,
    short: tl.constexpr,
    listed: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """``work.cut`` and ``work.total`` of filtered rows as they are: grid (N,).

    Also whether the draft token stays where that was open. chunks, listed: powers of two, at least
    C and ``capacity``. short: likewise; lists of up to so many are searched as such.
    """
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    request = (row // (num_draft_of(step) + 1)).to(tl.int32)
    offset = (row % (num_draft_of(step) + 1)).to(tl.int32)
    length, state = tl.load(step.lengths + request), tl.load(work.state + row)
    num_listed = tl.load(work.num_listed + row)
    if (offset <= length) & ((state & _BOTH) == _BOTH):
        if num_listed <= short:
            level, kept, is_right = _listed_threshold(
                step, work, num_chunks, capacity, row, chunks, short
            )
        else:
            level, kept, is_right = _listed_threshold(
                step, work, num_chunks, capacity, row, chunks, listed
            )
        if is_right == 0:
            level, kept = _scanned_threshold(step, rules, work, num_chunks, row, words)
        tl.debug_barrier()  # all have read what is written here
        tl.store(work.cut + row, level)
        tl.store(work.total + row, kept)
        depth = tl.load(work.depth + row)
        share = tl.where(depth <= level, tl.exp(-depth) / kept, 0.0)
        if ((state & OPEN) != 0) & (tl.load(work.test + row) < share):
            tl.store(work.state + row, ACCEPTED)
