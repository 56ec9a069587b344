"""The draft's token choice as two kernels: one looks at every logit, one settles each row.

The first keeps, for each chunk of a row, its largest legal score and where it first stands, the sum
of exponentials and the winner of the race. The second puts the chunks together and, where a request
samples, writes the probabilities. The mask and the noise are looked up by target id as the logits
pass: neither is ever written for the draft vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch
from guided_spec.ops.sampling.noise import DraftNoise, Stream
from guided_spec.ops.sampling.rejection import DraftChoice
from guided_spec.ops.sampling.warp import Sampling

WORDS = 32  # mask words a program, 32 logits each
WARPS = 4


def choose_draft(
    logits: Tensor,
    bitmask: Tensor | None,
    target_ids: Tensor | None,
    sampling: Sampling,
    noise: DraftNoise | None,
) -> DraftChoice:
    """One token for each row of logits [B, D], without filters; at least one logit."""
    batch, columns = logits.shape
    device = logits.device
    is_greedy, is_reduced = noise is None or sampling.all_greedy, target_ids is not None
    chunks = triton.cdiv(columns, WORDS * 32)
    numbers = torch.empty(batch, 3, chunks, device=device)
    indices = torch.empty(batch, 3, chunks, dtype=torch.int32, device=device)
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    probs = None if is_greedy else torch.empty(batch, columns, device=device)
    starved = torch.empty(batch, dtype=torch.bool, device=device) if is_reduced else None
    rescued = torch.empty_like(tokens) if is_reduced else None
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    mask = bitmask if bitmask is None or bitmask.stride(1) == 1 else bitmask.contiguous()
    # An argument that a kernel leaves alone is any tensor: a pointer has to have a type.
    masked = (x, x.stride(0), indices, 0, 0) if mask is None else (
        x, x.stride(0), mask, mask.stride(0), mask.shape[1]
    )  # fmt: skip
    ids = indices if target_ids is None else target_ids.contiguous()
    temperature = numbers if is_greedy else sampling.temperature.contiguous()
    keys = DraftNoise(indices, indices, Stream.DRAFT, 0) if noise is None or is_greedy else noise
    shape = {"words": WORDS, "has_mask": mask is not None, "is_reduced": is_reduced}
    options = {**shape, "is_greedy": is_greedy, "num_warps": WARPS}
    launch(_scan, (batch, chunks))(
        *masked, ids, columns, temperature, keys.seeds.contiguous(), keys.positions.contiguous(),
        int(keys.stream), numbers, indices, **options,
    )  # fmt: skip
    launch(_combine, (batch, 1 if is_greedy else chunks))(
        *masked, ids, columns, temperature, numbers, indices, chunks, tokens,
        numbers if probs is None else probs, indices if starved is None else starved,
        indices if rescued is None else rescued,
        span=triton.next_power_of_2(chunks), **options,
    )  # fmt: skip
    return DraftChoice(tokens, probs, starved, rescued)


# Read a number at a time: where they begin depends on the size of the batch.
UNALIGNED = ("temperatures", "seeds", "positions")


# Triton reads annotations as its own, so the arguments have none.
@triton.jit(do_not_specialize_on_alignment=UNALIGNED)  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    logits, row_stride, bitmask, mask_stride, num_words, target_ids, columns, temperatures,
    seeds, positions, stream, numbers, indices,
    words: tl.constexpr, has_mask: tl.constexpr, is_reduced: tl.constexpr, is_greedy: tl.constexpr,
):  # fmt: skip
    """What one chunk of one row holds."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    x, column, target, legal = _read(
        logits + row * row_stride, bitmask + row * mask_stride, num_words, target_ids, columns,
        chunk, words, has_mask, is_reduced,
    )  # fmt: skip
    # 0: -inf, 1: a number, 2: NaN at an illegal token, 3: NaN at a legal one.
    state = tl.where(x != x, tl.where(legal, 3, 2), tl.where(x > float("-inf"), 1, 0))
    score = _score(x, legal)
    peak = tl.max(tl.max(score, 1), 0)
    first = tl.min(tl.min(tl.where(score == peak, column, columns), 1), 0)
    at = row * 3 * chunks + chunk
    tl.store(numbers + at, peak)
    tl.store(indices + at, tl.max(tl.max(state, 1), 0))
    tl.store(indices + at + chunks, first)
    if not is_greedy:
        temperature = tl.load(temperatures + row)
        if (temperature > 0) & (peak > float("-inf")):
            weight = tl.exp((score - peak) / temperature)
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            bits = _bits(seed, position, stream, target, chunk, words, is_reduced)
            key = weight / _exponential(bits)
            best = tl.max(tl.max(key, 1), 0)
            winner = tl.min(tl.min(tl.where(key == best, column, columns), 1), 0)
            tl.store(numbers + at + chunks, tl.sum(tl.sum(weight, 1), 0))
            tl.store(numbers + at + 2 * chunks, best)
            tl.store(indices + at + 2 * chunks, winner)
        else:  # no row is sampled here
            tl.store(numbers + at + chunks, 0.0)
            tl.store(numbers + at + 2 * chunks, 0.0)
            tl.store(indices + at + 2 * chunks, 0)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED[:1])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    logits, row_stride, bitmask, mask_stride, num_words, target_ids, columns, temperatures,
    numbers, indices, chunks, tokens, probs, starved, rescued,
    span: tl.constexpr, words: tl.constexpr, has_mask: tl.constexpr, is_reduced: tl.constexpr,
    is_greedy: tl.constexpr,
):  # fmt: skip
    """The chunks of one row put together; the first program of a row writes its token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, span)
    known = index < chunks
    at = row * 3 * chunks + index
    peaks = tl.load(numbers + at, mask=known, other=float("-inf"))
    state = tl.max(tl.load(indices + at, mask=known, other=0), 0)
    firsts = tl.load(indices + at + chunks, mask=known, other=0)
    peak = tl.max(peaks, 0)
    choice = tl.min(tl.where(peaks == peak, firsts, columns), 0)
    drawn = (peak > float("-inf")) & (state < 3)
    if not is_greedy:
        temperature = tl.load(temperatures + row)
        heat = tl.where(temperature > 0, temperature, 1.0)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        scale = tl.exp((peaks - base) / heat)
        total = tl.sum(tl.load(numbers + at + chunks, mask=known, other=0.0) * scale, 0)
        keys = tl.load(numbers + at + 2 * chunks, mask=known, other=0.0) * scale
        winners = tl.load(indices + at + 2 * chunks, mask=known, other=0)
        # Not greater than zero either where it is NaN, from a logit of +inf.
        drawn = tl.where(temperature > 0, (total > 0) & (state < 3), drawn)
        winner = tl.min(tl.where(keys == tl.max(keys, 0), winners, columns), 0)
        choice = tl.where(temperature > 0, winner, choice)
        x, column, _, legal = _read(
            logits + row * row_stride, bitmask + row * mask_stride, num_words, target_ids, columns,
            chunk, words, has_mask, is_reduced,
        )  # fmt: skip
        soft = tl.exp((_score(x, legal) - base) / heat) / tl.where(drawn, total, 1.0)
        p = tl.where(temperature > 0, soft, tl.where(column == choice, 1.0, 0.0))
        p = tl.where(drawn, p, 0.0)
        tl.store(probs + row * columns + column, p, mask=column < columns)
    if chunk == 0:
        token = choice.to(tl.int64)
        if is_reduced:
            token = tl.load(target_ids + choice, mask=drawn, other=-1)
            is_starved = (drawn == 0) & (state == 1)
            only = tl.full([], -1, tl.int64)
            if has_mask:
                # No words to read where no row is starved, which is nearly always.
                length = tl.where(is_starved, num_words, 0)
                only = _only_legal(bitmask + row * mask_stride, length)
            tl.store(starved + row, is_starved)
            tl.store(rescued + row, only)
            tl.store(tokens + row, tl.where(drawn, token, only))
        else:
            tl.store(tokens + row, tl.where(drawn, token, -1))


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    logits, bitmask, num_words, target_ids, columns, chunk,
    words: tl.constexpr, has_mask: tl.constexpr, is_reduced: tl.constexpr,
):  # fmt: skip
    """[words, 32] of a chunk: logits float32, columns, their target ids, which are legal."""
    word, lane = chunk * words + tl.arange(0, words), tl.arange(0, 32)
    column = word[:, None] * 32 + lane[None, :]
    inside = column < columns
    target, legal = column, inside
    if is_reduced:
        target = tl.load(target_ids + column, mask=inside, other=0).to(tl.int32)
    if has_mask:
        if is_reduced:
            of = target >> 5
            mask_words = tl.load(bitmask + of, mask=inside & (of < num_words), other=0)
            legal = ((mask_words >> (target & 31)) & 1) != 0
        else:
            # A word for 32 logits: their loads stay wide, and fall away where none is legal.
            mask_words = tl.load(bitmask + word, mask=word < num_words, other=0)[:, None]
            legal = inside & (((mask_words >> lane[None, :]) & 1) != 0)
            inside = inside & (mask_words != 0)
    x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return x, column, target, legal


@triton.jit
def _score(x, legal):  # type: ignore[no-untyped-def]
    """The logits that count: those of legal tokens, NaN left out."""
    return tl.where(legal & (x == x), x, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _bits(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    seed, position, stream, target, chunk, words: tl.constexpr, is_reduced: tl.constexpr
):
    """uint32 [words, 32], the bits of ``noise.philox`` at the target ids."""
    if is_reduced:
        counter = target >> 2
    else:  # the four words of a counter are four neighbours
        counter = (chunk * words + tl.arange(0, words))[:, None] * 8 + tl.arange(0, 8)[None, :]
    zeros = counter.to(tl.uint32) * 0
    low, high = zeros + position.to(tl.uint32), zeros + (position >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, low, high, tl.full(zeros.shape, stream, tl.uint32))
    a, b, c, d = a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), d.to(tl.uint32)
    if is_reduced:
        lane = target & 3
        bits = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    else:
        bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [words, 32])
    return bits


@triton.jit
def _exponential(bits):  # type: ignore[no-untyped-def]
    """-log(1 - u), as precise for small u, which decide who wins, as for others."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # The series to u^8 below 1/8: beyond it the logarithm of 1 - u is exact enough.
    series = 1 / 6 + u * (1 / 7 + u * (1 / 8))
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * series)))))
    return tl.where(u < 0.125, series, -tl.log(1.0 - u))


@triton.jit
def _only_legal(bitmask, num_words):  # type: ignore[no-untyped-def]
    """The one token of a mask row of ``num_words``; -1 where there is another, or no word."""
    offsets = tl.arange(0, 1024)
    used, sums, ats = offsets * 0, (offsets * 0).to(tl.int64), offsets * 0
    for start in range(0, num_words, 1024):
        at = start + offsets
        words = tl.load(bitmask + at, mask=at < num_words, other=0)
        used += (words != 0).to(tl.int32)
        sums += words.to(tl.int64)
        ats += tl.where(words != 0, at, 0)
    word = tl.sum(sums, 0) & 0xFFFFFFFF  # that of the only word in use, if any
    lane = tl.arange(0, 32)
    bit = tl.sum(((word >> lane.to(tl.int64)) & 1) * lane, 0)
    is_single = (tl.sum(used, 0) == 1) & ((word & (word - 1)) == 0)
    return tl.where(is_single, tl.sum(ats, 0).to(tl.int64) * 32 + bit, -1)
