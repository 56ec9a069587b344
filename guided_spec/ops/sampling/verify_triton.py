"""The verify decision as kernels: three launches for greedy batches, one more for sampled ones.

One pass reads the logits once. After it only the rows that a token is drawn from are read again;
where any is filtered, three more launches find what is kept of rows that need it. Grids depend on
shapes alone and nothing waits for the host, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.adjust import ANY, Adjustments
from guided_spec.ops.sampling.noise import Stream
from guided_spec.ops.sampling.verify_filter_triton import find_kept
from guided_spec.ops.sampling.verify_tiles_triton import (
    ACCEPTED,
    DRAW,
    FILTERED,
    NO_TOKEN,
    OPEN,
    Rules,
    Shape,
    Step,
    depth_of,
    exponential,
    load_points,
    load_tile,
    make_rules,
    make_step,
    make_work,
    mask_of,
    no_rules,
    num_draft_of,
    odd,
    philox_points,
    philox_tile,
    tile_tokens,
)
from guided_spec.ops.sampling.warp import VerifyRows
from guided_spec.types import Accepted, Draft

MOST_WORDS = 64  # of a tile
CAPACITY = 8192  # depths of a filtered row that are listed; rows of more are searched slowly
BAN_BLOCK = 64
# What the kernels use of ``Work``.
STATS = ("chunk_max", "chunk_sum")
ROWS = ("row_max", "total", "state", "token")
CUTS = ("cut", "depth", "test", "num_listed")
RACED = ("chunk_max", "row_max", "total", "cut", "state", "race_value", "race_token")
ANSWERED = ("state", "token", "race_value", "race_token")

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_SAMPLE = tl.constexpr(int(Stream.SAMPLE))
_ANY = tl.constexpr(ANY)
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MARGIN = tl.constexpr(1e-5)  # bounds decide only outside of it


def verify(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Accepted:
    """``verify.verify`` by kernels; ``rows.noise`` are keys, all on one CUDA device."""
    batch, num_rows, vocab_size = logits.shape
    num_words = num_mask_words(vocab_size)
    # Small vocabularies are cut into a few chunks too.
    words = min(MOST_WORDS, max(1, triton.next_power_of_2(num_words) // 4))
    capacity = min(CAPACITY, triton.next_power_of_2(num_words * 32))
    shape = Shape(batch, num_rows, triton.cdiv(num_words, words), words, capacity)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        step = make_step(logits, bitmask, draft, rows)
        rules = None
        if rows.adjustments is not None:
            rules = make_rules(rows.adjustments)
            step = _ban(step, rows.adjustments, num_words)
        return _launch(step, rules, rows, shape)


def _launch(step: Step, own_rules: Rules | None, rows: VerifyRows, shape: Shape) -> Accepted:
    """Run the kernels over memory of their own."""
    sampling, device = rows.sampling, step.lengths.device
    # One kernel for all filters: each row looks at which of them it has.
    has_filters = sampling.any_top_k or sampling.any_top_p or sampling.any_min_p
    filtered = has_filters and not sampling.all_greedy
    batch, num_rows, num_chunks, words, _ = shape
    coupled, total = rows.verifier == "coupled", batch * num_rows
    is_split = not sampling.all_greedy and step.probs is not None and not coupled
    races = 0 if sampling.all_greedy else 1 + is_split
    work = make_work(shape, device, races, filtered=filtered)
    width, chunks = shape.width, triton.next_power_of_2(num_chunks)
    launch(_stats_kernel, (total, num_chunks), step.lengths)(
        *(step.without_probs, own_rules or Rules(), work.only(*STATS), num_chunks, words),
        num_warps=2,
    )
    # Only the pass over all logits is worth a kernel without rules.
    count = triton.next_power_of_2(batch)
    rules = own_rules or no_rules(device, step.vocab_size, count)
    launch(_decide_kernel, (batch,), step.lengths)(
        step if races else step.without_probs,
        *(rules, work.only(*STATS, *ROWS, *CUTS), num_chunks, coupled, filtered, width, chunks),
    )
    if not sampling.all_greedy:
        if filtered:
            find_kept(step, rules, work, shape, coupled=coupled)
        raced = step if is_split else step.without_probs
        grid = (batch, num_chunks, num_rows if coupled else 1)
        launch(_race_kernel, grid, step.lengths)(
            *(raced, rules, work.only(*RACED), num_chunks, coupled, filtered, is_split),
            *(words, shape.most),
            num_warps=shape.num_warps,
        )
    token_ids = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    launch(_assemble_kernel, (batch,), step.lengths)(
        *(step.without_probs, work.only(*ANSWERED), token_ids, num_accepted, num_chunks),
        *(coupled, is_split, width, chunks),
        num_warps=4 if races else 1,
    )
    return Accepted(token_ids, num_accepted)


def _ban(step: Step, adjustments: Adjustments, num_words: int) -> Step:
    """The step with a mask of its own that lacks the banned tokens."""
    bans = adjustments.table.bans
    if bans is None:
        return step
    num_rows = step.logits.shape[1]
    mask = step.mask.expand(len(step.lengths), num_rows, num_words).clone(
        memory_format=torch.contiguous_format
    )
    step = step._replace(mask=mask, odd_mask_stride=odd(num_words))
    tensors: list[Any] = [bans.owners, bans.tokens, bans.prefixes, bans.until]
    tensors += [adjustments.table.index, adjustments.num_output, adjustments.tails]
    parts = tuple(one.contiguous() for one in tensors)
    count = len(bans.owners)
    grid = (triton.cdiv(count, BAN_BLOCK), num_rows)
    launch(_ban_kernel, grid, step.lengths)(
        *(step.without_probs, parts, bans.prefixes.shape[1], count, BAN_BLOCK), num_warps=2
    )
    return step


@triton.jit(do_not_specialize=["depth", "count"])  # type: ignore[untyped-decorator]
def _ban_kernel(step, bans, depth, count, block: tl.constexpr, IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Clear the bits of banned tokens in ``step.mask``: grid (ceil(count / block), K + 1).

    bans: (owners, tokens, prefixes, until, requests, num_output, tails), see ``Bans`` and
        ``Adjustments``. depth: P, the tokens of a prefix.
    """
    await_previous(IS_DEPENDENT)
    owners, tokens, prefixes, until, requests, num_output, tails = bans
    ban = tl.program_id(0) * block + tl.arange(0, block)
    offset = tl.program_id(1)
    exists = ban < count
    owner = tl.load(owners + ban, mask=exists, other=0)
    request = tl.load(requests + owner, mask=exists, other=0)
    length = tl.load(num_output + owner, mask=exists, other=0) + offset
    applies = exists & (length < tl.load(until + ban, mask=exists, other=0))
    for index in range(depth):
        # The text is the tail and then the draft; its window of row r begins at token r.
        at = tl.zeros([block], tl.int32) + (offset + index)
        old = tl.load(tails + owner * depth + at, mask=exists & (at < depth), other=0)
        drafted = request * num_draft_of(step) + (at - depth)
        new = tl.load(step.drafted + drafted, mask=exists & (at >= depth), other=0)
        wanted = tl.load(prefixes + ban * depth + index, mask=exists, other=0)
        applies = applies & ((wanted == _ANY) | (wanted == tl.where(at < depth, old, new)))
    token = tl.load(tokens + ban, mask=exists, other=0)
    word = mask_of(step, request * (num_draft_of(step) + 1) + offset) + (token >> 5)
    bit = tl.full([block], 1, tl.int32) << (token & 31).to(tl.int32)
    tl.atomic_and(word, ~bit, mask=applies)


@triton.jit  # type: ignore[untyped-decorator]
def _stats_kernel(step, rules, work, num_chunks, words: tl.constexpr, IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """``work.chunk_max`` and ``work.chunk_sum``: grid (N, C)."""
    await_previous(IS_DEPENDENT)
    row, chunk = tl.program_id(0), tl.program_id(1)
    request = row // (num_draft_of(step) + 1)
    offset = row % (num_draft_of(step) + 1)
    if offset <= tl.load(step.lengths + request):  # after the draft's end nothing is decided
        scores = load_tile(step, rules, request, offset, chunk, words)
        temperature = tl.load(step.temperature + request)
        largest = tl.max(tl.max(scores, 1), 0)
        if temperature > 0:
            # The largest one is taken off first, so that no temperature makes NaN of it.
            origin = tl.where(tl.abs(largest) <= _LARGEST, largest, 0.0)
            scale = tl.minimum(_LOG2_E / temperature, 1e30)
            found = tl.sum(tl.sum(tl.exp2((scores - origin) * scale), 1), 0)
        else:
            first = tl.where(scores == largest, tile_tokens(chunk, words), NO_TOKEN)
            is_nan = tl.max(tl.max((scores != scores).to(tl.int32), 1), 0) > 0
            token = tl.min(tl.min(first, 1), 0).to(tl.float32)  # exact below 2 ** 24
            found = tl.where(is_nan, float("nan"), token)
        at = row.to(tl.int64) * num_chunks + chunk
        tl.store(work.chunk_max + at, largest)
        tl.store(work.chunk_sum + at, found)


@triton.jit  # type: ignore[untyped-decorator]
def _kth_chunk(depth, k, chunks: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, 1]: the k-th smallest of ``depth`` [rows, chunks]; inf where there are fewer."""
    ordered = tl.sort(depth, dim=1)
    at = tl.arange(0, chunks)[None, :]
    kth = tl.min(tl.where(at == k - 1, ordered, _INFINITY), 1)
    return tl.where((k > 0) & (k <= chunks), kth, _INFINITY)


@triton.jit
def _maxima_mass(depths, cut):  # type: ignore[no-untyped-def]
    """[rows]: the mass of the chunks' largest tokens down to ``cut`` [rows]."""
    return tl.sum(tl.where(depths <= cut[:, None], tl.exp(-depths), 0.0), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _test_number(step, request, offset, drafted, is_drafted, rows: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """float32 [rows]: u * q, what p of each draft token has to exceed."""
    position = tl.load(step.first + request) + offset
    column = tl.zeros([rows], tl.int32)
    bits = philox_points(tl.load(step.seeds + request), position, _ACCEPT, column)
    test = (bits >> 8).to(tl.float32) * 5.9604644775390625e-08
    if step.probs is not None:
        start = step.probs + request.to(tl.int64) * step.probs_batch_stride
        column, is_known = drafted, is_drafted
        if step.columns is not None:
            column = tl.load(step.columns + drafted, mask=is_drafted, other=-1)
            is_known = is_drafted & (column >= 0)
        at = start + offset.to(tl.int64) * step.probs_row_stride + column
        q = tl.load(at, mask=is_known, other=0.0).to(tl.float32)
        if step.is_certain is not None:
            flags = step.is_certain + request * num_draft_of(step) + offset
            q = tl.where(tl.load(flags, mask=is_drafted, other=0) != 0, 1.0, q)
        test *= q
    return test


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step, request, depths, total, depth, share, rows: tl.constexpr, chunks: tl.constexpr
):
    """What the filters can keep of a sampled request's rows, by maxima and masses alone.

    depths: [rows, chunks], of the chunks' largest tokens. depth, share: [rows] of the
    draft tokens; share is of the whole mass.

    Returns the cut, the least mass that can be kept, whether a draft token within the cut is kept
    for sure, and whether the request has filters at all.
    """
    cut, least = tl.full([rows], _INFINITY, tl.float32), total
    is_sure, is_filtered = share >= 0, depth < 0  # none so far
    min_p = tl.load(step.min_p + request)
    if min_p > 0:
        cut = tl.minimum(cut, -tl.log(min_p))
        least = _maxima_mass(depths, cut)
        is_filtered = depth == depth
    k = tl.load(step.top_k + request)
    if (k > 0) & (k < step.vocab_size):
        kth = _kth_chunk(depths, k, chunks)
        # The chunks' largest tokens are different ones: k of them are no more than the top k.
        is_above = depths < kth[:, None]
        least = _maxima_mass(tl.where(is_above, depths, _INFINITY), cut)
        others = tl.maximum(k - tl.sum(is_above.to(tl.int32), 1), 0).to(tl.float32)
        least += tl.where(kth <= cut, others * tl.exp(-kth), 0.0)
        cut = tl.minimum(cut, kth)
        is_sure = is_sure & ((depth <= 0) | (share * (k + 1).to(tl.float32) > 1.0001))
        is_filtered = depth == depth
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
    chunk_max,
    chunk_sum,
    coupled: tl.constexpr,
    filtered: tl.constexpr,
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
    offset = tl.arange(0, rows)
    is_row, is_drafted = offset <= length, offset < length
    drafted = tl.load(
        step.drafted + request * num_draft_of(step) + offset, mask=is_drafted, other=0
    )
    temperature = tl.load(step.temperature + request)
    largest = tl.max(chunk_max, 1)
    has_any = chunk_max > float("-inf")
    depths = tl.where(has_any, depth_of(chunk_max, largest[:, None], temperature), _INFINITY)
    total = tl.sum(tl.exp(-depths) * chunk_sum, 1)
    is_alive = (total > 0) & (total < _INFINITY)
    score = load_points(step, rules, request, offset, drafted, is_drafted)
    depth = tl.where(score > float("-inf"), depth_of(score, largest, temperature), _INFINITY)
    weight = tl.exp(-depth)
    share = tl.where(is_alive, weight / total, 0.0)
    test = _test_number(step, request, offset, drafted, is_drafted, rows)
    cut, least = tl.full([rows], _INFINITY, tl.float32), total
    is_sure, is_filtered = share >= 0, depth < 0
    if filtered:
        cut, least, is_sure, is_filtered = _bounds(
            step, request, depths, total, depth, share, rows, chunks
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
        last = tl.min(tl.where(is_row & ~can_stay, offset, rows), 0)
        draws = is_alive & (((offset < last) & is_open) | (offset == last))
        state = tl.where(stays, ACCEPTED, 0) + tl.where(draws, DRAW, 0)
        state += tl.where(draws & is_open, OPEN, 0)
    state += tl.where(draws & is_filtered, FILTERED, 0)
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    tl.store(work.row_max + row, largest, mask=is_row)
    tl.store(work.total + row, total, mask=is_row)
    if work.cut is not None:
        tl.store(work.cut + row, cut, mask=is_row)
        tl.store(work.depth + row, depth, mask=is_row)
        tl.store(work.test + row, test, mask=is_row)
        tl.store(work.num_listed + row, tl.zeros([rows], tl.int32), mask=is_row)
    return state


@triton.jit  # type: ignore[untyped-decorator]
def _decide_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    coupled: tl.constexpr,
    filtered: tl.constexpr,
    rows: tl.constexpr,
    chunks: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Each row's state, and the tokens of greedy rows: grid (B,).

    rows, chunks: powers of two, at least K + 1 and C.
    """
    await_previous(IS_DEPENDENT)
    request = tl.program_id(0)
    length = tl.load(step.lengths + request)
    offset, chunk = tl.arange(0, rows), tl.arange(0, chunks)
    is_row, is_drafted = offset <= length, offset < length
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    at = row[:, None] * num_chunks + chunk[None, :]
    exists = is_row[:, None] & (chunk < num_chunks)[None, :]
    chunk_max = tl.load(work.chunk_max + at, mask=exists, other=float("-inf"))
    chunk_sum = tl.load(work.chunk_sum + at, mask=exists, other=0.0)
    token = tl.full([rows], -1, tl.int32)
    if tl.load(step.temperature + request) > 0:
        state = _decide_sampled(
            step, rules, work, chunk_max, chunk_sum, coupled, filtered, rows, chunks
        )
    else:
        drafts = step.drafted + request * num_draft_of(step)
        drafted = tl.load(drafts + offset, mask=is_drafted, other=0)
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
def _best(value, token):  # type: ignore[no-untyped-def]
    """The largest of a tile's values, and the first token that has it."""
    best = tl.max(tl.max(value, 1), 0)
    return best, tl.min(tl.min(tl.where(value == best, token, NO_TOKEN), 1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _drawn_row(step, work, request, coupled: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row that this program draws from; but for coupled noise a request has one."""
    offset = tl.program_id(2)
    if not coupled:
        turn = tl.arange(0, rows)
        at = (request * (num_draft_of(step) + 1) + turn).to(tl.int64)
        # Rows after the draft's end do not matter: the row of the end is never accepted.
        state = tl.load(work.state + at, mask=turn <= num_draft_of(step), other=0)
        offset = tl.min(tl.where((state & ACCEPTED) != 0, rows, turn), 0)
    return offset


@triton.jit
def _draft_probs(step, request, offset, token, is_read):  # type: ignore[no-untyped-def]
    """float32, of a tile of tokens: with which probability the drafter drew each at a position."""
    start = step.probs + request.to(tl.int64) * step.probs_batch_stride
    start += offset.to(tl.int64) * step.probs_row_stride
    column, is_known = token, is_read
    if step.columns is not None:
        column = tl.load(step.columns + token, mask=is_read, other=-1)
        is_known = is_read & (column >= 0)
    q = tl.load(start + column, mask=is_known, other=0.0).to(tl.float32)
    if step.is_certain is not None:
        at = request * num_draft_of(step) + offset
        drafted = tl.load(step.drafted + at)
        is_certain = tl.load(step.is_certain + at) != 0
        q = tl.where(is_certain, (token == drafted).to(tl.float32), q)
    return q


@triton.jit  # type: ignore[untyped-decorator]
def _race_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    rules,
    work,
    num_chunks,
    coupled: tl.constexpr,
    filtered: tl.constexpr,
    is_split: tl.constexpr,
    words: tl.constexpr,
    rows: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Race the chunks of the rows to draw from: grid (B, C, 1), for coupled noise (B, C, K + 1).

    is_split: residual and target each have a race. Without probabilities of the draft, what a
    refused token leaves is the target without it, in any scale.

    rows: a power of two, at least K + 1.
    """
    await_previous(IS_DEPENDENT)
    request, chunk = tl.program_id(0), tl.program_id(1)
    length, temperature = tl.load(step.lengths + request), tl.load(step.temperature + request)
    offset = _drawn_row(step, work, request, coupled, rows)
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    at = row * num_chunks + chunk
    state, largest = tl.load(work.state + row), tl.load(work.row_max + row)
    nearest = tl.load(work.chunk_max + at)
    if (offset <= length) & ((state & DRAW) != 0):
        depths = depth_of(nearest, largest, temperature)
        level = tl.full([], 3e38, tl.float32)
        if filtered:
            level = tl.minimum(tl.load(work.cut + row), level)
        value, winner = -1.0, NO_TOKEN
        plain, plain_winner = -1.0, NO_TOKEN
        if depths <= level:
            scores = load_tile(step, rules, request, offset, chunk, words)
            token = tile_tokens(chunk, words)
            depth = depth_of(scores, largest, temperature)
            weight = tl.exp(-depth)
            if filtered:
                weight = tl.where(depth <= level, weight, 0.0)
            position = tl.load(step.first + request)
            if coupled:
                position += offset
            seed = tl.load(step.seeds + request)
            noise = exponential(philox_tile(seed, position, _SAMPLE, chunk, words))
            if is_split:
                plain, plain_winner = _best(weight / noise, token)
                if offset < length:
                    q = _draft_probs(step, request, offset, token, weight > 0)
                    weight = tl.maximum(weight / tl.load(work.total + row) - q, 0.0)
            elif not coupled:
                drafts = step.drafted + request * num_draft_of(step)
                drafted = tl.load(drafts + offset, mask=offset < length, other=-1)
                weight = tl.where(token == drafted, 0.0, weight)
            value, winner = _best(weight / noise, token)
        tl.store(work.race_value + at, value)
        tl.store(work.race_token + at, winner)
        if is_split:
            size = (tl.num_programs(0) * (num_draft_of(step) + 1)).to(tl.int64) * num_chunks
            tl.store(work.race_value + size + at, plain)
            tl.store(work.race_token + size + at, plain_winner)


@triton.jit
def _race_winners(work, at, is_read):  # type: ignore[no-untyped-def]
    """The best of all chunks, for each row: its value and its token."""
    value = tl.load(work.race_value + at, mask=is_read, other=-1.0)
    token = tl.load(work.race_token + at, mask=is_read, other=NO_TOKEN)
    most = tl.max(value, 1)
    return most, tl.min(tl.where(value == most[:, None], token, NO_TOKEN), 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _assemble_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    step,
    work,
    token_ids,
    num_accepted,
    num_chunks,
    coupled: tl.constexpr,
    is_split: tl.constexpr,
    rows: tl.constexpr,
    chunks: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The decision: grid (B,). token_ids: int64 [B, K + 1], num_accepted: int64 [B].

    is_split: whether residual and target have races of their own.
    """
    await_previous(IS_DEPENDENT)
    request = tl.program_id(0)
    length = tl.load(step.lengths + request)
    offset, chunk = tl.arange(0, rows), tl.arange(0, chunks)
    is_row, is_drafted = offset <= length, offset < length
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    token = tl.load(work.token + row, mask=is_row, other=-1).to(tl.int64)
    drafted = tl.load(
        step.drafted + request * num_draft_of(step) + offset, mask=is_drafted, other=-1
    )
    state = tl.load(work.state + row, mask=is_row, other=0)
    count = tl.min(tl.where((state & ACCEPTED) != 0, NO_TOKEN, offset), 0)
    if work.race_value is not None:
        is_raced = (state & DRAW) != 0
        if not coupled:
            is_raced = is_raced & (offset == count)
        at = row[:, None] * num_chunks + chunk[None, :]
        is_read = is_raced[:, None] & (chunk < num_chunks)[None, :]
        most, winner = _race_winners(work, at, is_read)
        # Where rounding left nothing of the residual, its target decides; of a target without
        # one token only that one can be missing.
        other = tl.where(is_drafted, drafted, -1)
        if coupled:
            other = tl.full([rows], -1, tl.int64)
        if is_split:
            size = (tl.num_programs(0) * (num_draft_of(step) + 1)).to(tl.int64) * num_chunks
            second, found = _race_winners(work, at + size, is_read)
            other = tl.where(second > 0, found, -1)
        token = tl.where(is_raced, tl.where(most > 0, winner, other), token)
    if coupled:
        count = tl.min(tl.where(is_drafted & (token == drafted), NO_TOKEN, offset), 0)
    emitted = tl.where(offset < count, drafted, tl.where(offset == count, token, -1))
    tl.store(token_ids + row, emitted, mask=offset <= num_draft_of(step))
    tl.store(num_accepted + request, count.to(tl.int64))
