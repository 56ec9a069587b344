"""The exact thresholds of filtered rows, searched among the tokens that may be kept.

A token's depth is how far its score is below the largest of its row: 0 for that one. Filters keep
the tokens down to some depth. The tokens are listed in any order: their masses are added as whole
numbers, which gives the same sum in every order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.verify_tiles_triton import load_tile, tile_tokens

__all__ = ["candidates", "threshold"]

_UNIT = tl.constexpr(2.0**40)  # the whole number that a mass of 1 is
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit  # type: ignore[untyped-decorator]
def candidates(step, rules, work, capacity, row, block, words: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Depths and tokens [words, 32] of a block of the list; depth inf where there is none.

    A list too long for its memory is made again, a chunk a block.
    """
    count = tl.load(work.num_listed + row)
    token = tile_tokens(block, words)
    if count <= capacity:
        inside = token < count
        depth = tl.load(work.listed_depths + row * capacity + token, mask=inside, other=_INFINITY)
        token = tl.load(work.listed_tokens + row * capacity + token, mask=inside, other=0)
    else:
        request = (row // (step.num_draft + 1)).to(tl.int32)
        place = (row % (step.num_draft + 1)).to(tl.int32)
        scores = load_tile(step, rules, request, place, block, words)
        temperature = tl.load(step.temperature + request)
        depth = tl.div_rn(tl.load(work.row_max + row) - scores, temperature)
        depth = tl.where(depth <= tl.load(work.cut + row), depth, _INFINITY)
    return depth, token


@triton.jit  # type: ignore[untyped-decorator]
def _sweep(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step, rules, work, capacity, row, blocks, level, words: tl.constexpr, counts: tl.constexpr
):
    """Of the candidates down to ``level``: their mass (or number) as int64, and the deepest.

    Third the first one below ``level``.
    """
    mass = tl.zeros([words, 32], tl.int64)
    deepest = tl.full([words, 32], -1.0, tl.float32)
    following = tl.full([words, 32], _INFINITY, tl.float32)
    for block in range(blocks):
        depth, _ = candidates(step, rules, work, capacity, row, block, words)
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
    capacity,
    row,
    blocks,
    deepest,
    target,
    words: tl.constexpr,
    counts: tl.constexpr,
):
    """The deepest depth such that what is above it, in mass or number, is short of ``target``.

    Both ends of the interval are depths of candidates, so it closes exactly.
    """
    low, high = deepest * 0.0, deepest
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        mass, above, below = _sweep(step, rules, work, capacity, row, blocks, middle, words, counts)
        is_short = mass.to(tl.float64) < target
        low = tl.where(is_short, below, low)
        high = tl.where(is_short, high, above)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def threshold(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step, rules, work, filters, capacity, row, blocks, words: tl.constexpr
):
    """The depth of the last kept token, and the mass of all kept ones."""
    request = row // (step.num_draft + 1)
    number, level, _ = _sweep(
        step, rules, work, capacity, row, blocks, _LARGEST, words, counts=True
    )
    whole = (tl.load(work.total + row) * _UNIT).to(tl.float64)
    is_cut = tl.load(step.temperature + request) < 0  # false so far
    if filters.min_p:
        is_cut = tl.load(step.min_p + request) > 0
    if filters.top_k:
        k = tl.load(step.top_k + request)
        uses_top_k = (k > 0) & (k < step.vocab_size)
        if uses_top_k & (number > k):
            wanted = k.to(tl.float64)
            level = _search(
                step, rules, work, capacity, row, blocks, level, wanted, words, counts=True
            )
        is_cut = is_cut | uses_top_k
    if filters.top_p:
        top_p = tl.load(step.top_p + request)
        if top_p < 1:
            if is_cut:
                mass, _, _ = _sweep(
                    step, rules, work, capacity, row, blocks, level, words, counts=False
                )
                whole = mass.to(tl.float64)
            wanted = whole * top_p.to(tl.float64)
            level = _search(
                step, rules, work, capacity, row, blocks, level, wanted, words, counts=False
            )
    mass, _, _ = _sweep(step, rules, work, capacity, row, blocks, level, words, counts=False)
    return level, mass.to(tl.float32) / _UNIT
