"""The one pass over the logits: bans into the mask, then maximum and mass of each chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from guided_spec.ops.dependents_triton import follow
from guided_spec.ops.token_rules import ANY
from guided_spec.ops.verify_tiles_triton import NO_TOKEN, load_tile, tile_tokens

__all__ = ["ban_kernel", "stats_kernel"]

_ANY = tl.constexpr(ANY)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def ban_kernel(step, bans, depth, count, block: tl.constexpr, FOLLOWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Clear the bits of banned tokens in ``step.mask``: grid (ceil(count / block), K + 1).

    bans: (owners, tokens, prefixes, until, requests, num_output, tails), see ``Bans`` and
        ``Adjustments``. depth: P, the tokens of a prefix.
    """
    follow(FOLLOWS)
    owners, tokens, prefixes, until, requests, num_output, tails = bans
    ban = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.program_id(1)
    exists = ban < count
    owner = tl.load(owners + ban, mask=exists, other=0)
    request = tl.load(requests + owner, mask=exists, other=0)
    length = tl.load(num_output + owner, mask=exists, other=0) + place
    applies = exists & (length < tl.load(until + ban, mask=exists, other=0))
    for index in range(depth):
        # The text is the tail and then the draft; its window of row r begins at token r.
        at = tl.zeros([block], tl.int32) + (place + index)
        old = tl.load(tails + owner * depth + at, mask=exists & (at < depth), other=0)
        drafted = request * step.num_draft + (at - depth)
        new = tl.load(step.drafted + drafted, mask=exists & (at >= depth), other=0)
        wanted = tl.load(prefixes + ban * depth + index, mask=exists, other=0)
        applies = applies & ((wanted == _ANY) | (wanted == tl.where(at < depth, old, new)))
    token = tl.load(tokens + ban, mask=exists, other=0)
    num_words = (step.vocab_size + 31) // 32
    word = (request * (step.num_draft + 1) + place) * num_words + (token >> 5)
    bit = tl.full([block], 1, tl.int32) << (token & 31).to(tl.int32)
    tl.atomic_and(step.mask + word, ~bit, mask=applies)


@triton.jit  # type: ignore[untyped-decorator]
def stats_kernel(step, rules, work, num_chunks, words: tl.constexpr, FOLLOWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """``work.chunk_max`` and ``work.chunk_sum``: grid (N, C)."""
    follow(FOLLOWS)
    row, chunk = tl.program_id(0), tl.program_id(1)
    request = row // (step.num_draft + 1)
    place = row % (step.num_draft + 1)
    if place <= tl.load(step.lengths + request):  # behind the draft's end nothing is asked
        scores = load_tile(step, rules, request, place, chunk, words)
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
