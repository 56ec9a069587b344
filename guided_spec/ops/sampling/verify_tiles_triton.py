"""What the kernels of the verify decision share: arguments, tiles of logits, random bits.

A tile is ``[words, 32]``: one mask word covers 32 neighbouring logits, so the predicate of a load
is a word's, the loads stay wide, and words of illegal tokens alone are not read.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.warp import VerifyRows
from guided_spec.types import Draft

# Rows of a request that a program holds. Each width is a kernel of its own, so there are few: for
# drafts of a head, for those with a forced text, and for the longest.
WIDTHS = (8, 32, 64, 256)
LEAST_MOST = 64
AT_ONCE = 1024  # programs of eight warps that a large device runs at once

# The bits of a row's state.
ACCEPTED = tl.constexpr(1)  # its draft token stays
DRAW = tl.constexpr(2)  # a token has to be drawn from it
OPEN = tl.constexpr(4)  # its draft token is decided with the exact threshold
FILTERED = tl.constexpr(8)

NO_TOKEN = tl.constexpr(2**31 - 1)  # above every token


# What a kernel gets; the members are tensors, None for what nobody uses, and numbers.
class Step(NamedTuple):
    """One step's inputs.

    logits: [B, K + 1, V] with its two strides.
    mask: int32 [B * (K + 1), W]; its stride is 0 where one row serves all.
    drafted: int64 [B, K], lengths: int64 [B]. probs: [B, K, D] or None, with two strides.
    columns: int32 [V] or None, is_certain: bool [B, K] or None, see ``Draft``.
    seeds, first: int64 [B], the keys of the noise.
    odd_num_draft, odd_mask_stride: see ``odd``.
    """

    logits: Any
    batch_stride: Any
    row_stride: Any
    mask: Any
    odd_mask_stride: Any
    drafted: Any
    lengths: Any
    probs: Any
    probs_batch_stride: Any
    probs_row_stride: Any
    columns: Any
    is_certain: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seeds: Any
    first: Any
    vocab_size: Any
    odd_num_draft: Any

    @property
    def without_probs(self) -> Step:
        """For kernels that take no probabilities: compiled once, whether a draft has any or not."""
        return self._replace(probs=None, columns=None, is_certain=None)


class Rules(NamedTuple):
    """The rules of U requests.

    rule_of: int32 [B], each request's row below, -1 for none. All are None for a kernel of its own
        where nobody has rules.
    bias, counts: float32 [U, V]; in_prompt: uint8 [U, V]; the penalties: float32 [U]. What nobody
        has is one row that changes nothing, so that there is one kernel for all rules.
    odd_bias_stride, odd_count_stride: V or 0, see ``odd``.
    """

    rule_of: Any = None
    bias: Any = None
    odd_bias_stride: Any = None
    counts: Any = None
    in_prompt: Any = None
    odd_count_stride: Any = None
    repetition: Any = None
    frequency: Any = None
    presence: Any = None


class Work(NamedTuple):
    """What the kernels pass to one another. N = B * (K + 1) rows, C chunks of a row.

    Rows after a draft's end hold anything.

    chunk_max: [N, C] the largest logit. chunk_sum: [N, C] the mass relative to it, for greedy
        requests the first token that has it; NaN where a logit is.
    row_max, total: [N] of the whole row; total is of the kept tokens once they are known.
    cut: [N] how far below the largest score a token of a filtered row can stand and be kept; how
        far it may, once that is known. low, high: [N] what that is probably between: tokens down to
        low are kept.
    depth, test: [N] how far below the draft token is, and its u * q.
    state, token: int32 [N] what is known of a row, and the token of a greedy one.
    num_listed: int32 [N], listed_depths: [N, M], listed_counts: int32 [N, M]: depths of tokens
        between low and high, in any order, and of how many tokens each.
    sure_mass: [N, C], sure_number: int32 [N, C] the tokens of a chunk down to low.
    race_value, race_token: [2, N, C] the best of each chunk, by the residual and by the target;
        [1, N, C] where the residual is the target without one token.
    """

    chunk_max: Any
    chunk_sum: Any
    row_max: Any
    total: Any
    cut: Any
    low: Any
    high: Any
    depth: Any
    test: Any
    state: Any
    token: Any
    num_listed: Any
    listed_depths: Any
    listed_counts: Any
    sure_mass: Any
    sure_number: Any
    race_value: Any
    race_token: Any

    def only(self, *names: str) -> Work:
        """What a kernel uses: it is compiled once, whatever else there is."""
        return Work(*(one if n in names else None for n, one in self._asdict().items()))


class Shape(NamedTuple):
    """What the grids depend on."""

    batch: int
    rows: int
    num_chunks: int
    words: int
    capacity: int

    @property
    def width(self) -> int:
        """Rows that a program which looks at all of a request's holds, a power of two."""
        widths = (width for width in WIDTHS if width >= self.rows)
        return next(widths, None) or int(triton.next_power_of_2(self.rows))

    @property
    def most(self) -> int:
        """The same where a row is one number, which costs little: one kernel for most lengths."""
        return max(self.width, LEAST_MOST)

    @property
    def num_warps(self) -> int:
        """Warps of programs that each read one chunk of a request.

        8 where all programs run at once, so that each is fast; else 4, so that more run at once.
        """
        return 8 if self.batch * self.num_chunks <= AT_ONCE else 4


def odd(number: int) -> int:
    """-(2 * number + 1), for kernels to read with ``even``.

    Triton compiles 1 and multiples of 16 by themselves, which such numbers never are.
    """
    return ~(2 * number)


def make_step(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Step:
    """Copied only where a kernel could not address them."""
    assert isinstance(rows.noise, NoiseKeys)
    num_words = num_mask_words(logits.shape[-1])
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    mask = _allow_all(logits.device, num_words)
    if bitmask is not None:
        mask = bitmask[..., :num_words].contiguous()
    probs = draft.probs
    if probs is not None and probs.stride(-1) != 1:
        probs = probs.contiguous()
    has_probs = probs is not None and probs.numel() > 0
    certain, sampling = draft.is_certain, rows.sampling
    if certain is None:
        certain = _none_certain(logits.device, triton.next_power_of_2(draft.token_ids.numel() or 1))
    return Step(
        logits=logits,
        batch_stride=logits.stride(0),
        row_stride=logits.stride(1),
        mask=mask,
        odd_mask_stride=odd(0 if bitmask is None else num_words),
        # An empty draft has no memory to point at; nothing of it is read.
        drafted=(draft.token_ids if draft.token_ids.numel() else draft.num_tokens).contiguous(),
        lengths=draft.num_tokens.contiguous(),
        probs=probs if has_probs else None,
        probs_batch_stride=probs.stride(0) if probs is not None else 0,
        probs_row_stride=probs.stride(1) if probs is not None else 0,
        columns=draft.columns.contiguous() if has_probs and draft.columns is not None else None,
        is_certain=certain.contiguous() if has_probs else None,
        temperature=sampling.temperature.contiguous(),
        top_k=sampling.top_k.contiguous(),
        top_p=sampling.top_p.contiguous(),
        min_p=sampling.min_p.contiguous(),
        seeds=rows.noise.seeds.contiguous(),
        first=rows.noise.positions.contiguous(),
        vocab_size=logits.shape[-1],
        odd_num_draft=odd(logits.shape[1] - 1),
    )


@cache
def _allow_all(device: torch.device, num_words: int) -> Tensor:
    """int32 [W]. Cached, since captured graphs keep reading it."""
    return torch.full((num_words,), -1, dtype=torch.int32, device=device)


@cache
def _none_certain(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bool, device=device)


def make_rules(adjustments: Adjustments) -> Rules | None:
    """All but the bans, which ``Step.mask`` has to hold; None where there are no others."""
    table, counts, in_prompt = adjustments.table, adjustments.counts, adjustments.in_prompt
    if table.bias is None and table.penalties is None:
        return None
    device, vocab_size, number = table.device, table.vocab_size, len(table.rules)
    rule_of = torch.full((table.batch_size,), -1, dtype=torch.int32, device=device)
    order = torch.arange(number, dtype=torch.int32, device=device)
    rules = no_rules(device, vocab_size, triton.next_power_of_2(number))._replace(
        rule_of=rule_of.index_copy_(0, table.index, order)
    )
    if table.bias is not None:
        rules = rules._replace(bias=table.bias.contiguous(), odd_bias_stride=odd(vocab_size))
    if counts is None or in_prompt is None or table.penalties is None:
        return rules
    # Copies: their addresses would be multiples of 16 bytes or not, each with a kernel of its own.
    repetition, frequency, presence = (one.flatten().clone() for one in table.penalties)
    return rules._replace(
        counts=counts.contiguous(),
        in_prompt=in_prompt.contiguous().view(torch.uint8),
        odd_count_stride=odd(vocab_size),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


@cache
def no_rules(device: torch.device, vocab_size: int, number: int) -> Rules:
    """Empty rules of ``number`` requests; cached, since captured graphs keep reading them."""
    zeros = torch.zeros(max(vocab_size, number), device=device)
    return Rules(
        rule_of=torch.full((number,), -1, dtype=torch.int32, device=device),
        bias=zeros,
        odd_bias_stride=odd(0),
        counts=zeros,
        in_prompt=zeros.view(torch.uint8),
        odd_count_stride=odd(0),
        repetition=torch.ones(number, device=device),
        frequency=zeros,
        presence=zeros,
    )


def make_work(shape: Shape, device: torch.device, races: int, *, filtered: bool) -> Work:
    """Memory of a launch's own. races: how many each row has."""
    total, chunks = shape.batch * shape.rows, shape.num_chunks
    is_listed = filtered and races > 0

    def numbers(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def integers(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    return Work(
        chunk_max=numbers(total, chunks),
        chunk_sum=numbers(total, chunks),
        row_max=numbers(total),
        total=numbers(total),
        cut=numbers(total) if is_listed else None,
        low=numbers(total) if is_listed else None,
        high=numbers(total) if is_listed else None,
        depth=numbers(total) if is_listed else None,
        test=numbers(total) if is_listed else None,
        state=integers(total),
        token=integers(total),
        num_listed=integers(total) if is_listed else None,
        listed_depths=numbers(total, shape.capacity) if is_listed else None,
        listed_counts=integers(total, shape.capacity) if is_listed else None,
        sure_mass=numbers(total, chunks) if is_listed else None,
        sure_number=integers(total, chunks) if is_listed else None,
        race_value=numbers(races, total, chunks) if races else None,
        race_token=integers(races, total, chunks) if races else None,
    )


# Triton reads annotations as its own, so the arguments have none.
@triton.jit
def even(number):  # type: ignore[no-untyped-def]
    """The value that ``odd`` was called with."""
    return (~number) >> 1


@triton.jit
def num_draft_of(step):  # type: ignore[no-untyped-def]
    """K, the tokens of a draft at most."""
    return even(step.odd_num_draft)


@triton.jit
def mask_of(step, row):  # type: ignore[no-untyped-def]
    """Where the mask words of rows begin."""
    return step.mask + row * even(step.odd_mask_stride)


@triton.jit  # type: ignore[untyped-decorator]
def tile_tokens(chunk, words: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 [words, 32]: the tokens of a chunk."""
    word = chunk * words + tl.arange(0, words)
    return word[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(step, rules, request, offset, chunk, words: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 [words, 32]: a chunk of row ``offset`` of a request; illegal tokens are -inf."""
    lane = tl.arange(0, 32)
    word = chunk * words + tl.arange(0, words)
    token = word[:, None] * 32 + lane[None, :]
    num_words = (step.vocab_size + 31) // 32
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    bits = tl.load(mask_of(step, row) + word, mask=word < num_words, other=0)
    start = step.logits + request.to(tl.int64) * step.batch_stride
    start += offset.to(tl.int64) * step.row_stride
    is_read = (bits != 0)[:, None]
    if (chunk + 1) * words * 32 > step.vocab_size:  # only here each token's column is checked
        inside = is_read & (token < step.vocab_size)
        scores = tl.load(start + token, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        scores = tl.load(start + token, mask=is_read, other=float("-inf")).to(tl.float32)
    scores = tl.where(((bits[:, None] >> lane[None, :]) & 1) != 0, scores, float("-inf"))
    return _adjusted(scores, token, step, rules, request, offset)


@triton.jit
def load_points(step, rules, request, offset, token, is_used):  # type: ignore[no-untyped-def]
    """float32 like ``token``: the logits of ``token`` in rows ``offset``; -inf where illegal."""
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    start = request.to(tl.int64) * step.batch_stride + offset.to(tl.int64) * step.row_stride
    bits = tl.load(mask_of(step, row) + (token >> 5), mask=is_used, other=0)
    legal = is_used & (((bits >> (token & 31).to(tl.int32)) & 1) != 0)
    scores = tl.load(step.logits + start + token, mask=legal, other=float("-inf")).to(tl.float32)
    return _adjusted(scores, token, step, rules, request, offset)


@triton.jit
def load_groups(step, rules, request, offset, group):  # type: ignore[no-untyped-def]
    """float32 [groups, 8]: the logits of row ``offset`` at eight tokens from 8 * ``group`` on."""
    lane = tl.arange(0, 8)
    token = group[:, None] * 8 + lane[None, :]
    inside = token < step.vocab_size
    start = step.logits + request.to(tl.int64) * step.batch_stride
    start += offset.to(tl.int64) * step.row_stride
    scores = tl.load(start + token, mask=inside, other=float("-inf")).to(tl.float32)
    num_words = (step.vocab_size + 31) // 32
    row = (request * (num_draft_of(step) + 1) + offset).to(tl.int64)
    word = group >> 2
    bits = tl.load(mask_of(step, row) + word, mask=word < num_words, other=0)
    place_in_word = (group & 3).to(tl.int32)[:, None] * 8 + lane[None, :]
    is_legal = ((bits[:, None] >> place_in_word) & 1) != 0
    scores = tl.where(is_legal, scores, float("-inf"))
    return _adjusted(scores, token, step, rules, request, offset)


@triton.jit
def _adjusted(scores, token, step, rules, request, offset):  # type: ignore[no-untyped-def]
    """Bias and penalties, as ``Adjustments.apply`` has them; bans are in the mask by now."""
    if rules.rule_of is not None:
        rule = tl.load(rules.rule_of + request)
        if rule >= 0:
            at = rule.to(tl.int64)
            legal = scores != float("-inf")
            bias = rules.bias + at * even(rules.odd_bias_stride)
            scores += tl.load(bias + token, mask=legal, other=0.0)
            start = at * even(rules.odd_count_stride)
            count = tl.load(rules.counts + start + token, mask=legal, other=0.0)
            drafts = step.drafted + request.to(tl.int64) * num_draft_of(step)
            for index in range(num_draft_of(step)):
                once = tl.where(offset > index, 1.0, 0.0)
                count += tl.where(token == tl.load(drafts + index), once, 0.0)
            in_prompt = tl.load(rules.in_prompt + start + token, mask=legal, other=0) != 0
            factor = tl.load(rules.repetition + rule)
            repeated = tl.where(scores > 0, tl.div_rn(scores, factor), scores * factor)
            scores = tl.where((count > 0) | in_prompt, repeated, scores)
            scores -= tl.load(rules.frequency + rule) * count
            scores -= tl.load(rules.presence + rule) * tl.where(count > 0, 1.0, 0.0)
    return scores


@triton.jit
def depth_of(scores, largest, temperature):  # type: ignore[no-untyped-def]
    """How far ``scores`` are below the largest of their row, at a temperature above 0."""
    return (largest - scores) * tl.minimum(tl.div_rn(1.0, temperature), 1e30)


@triton.jit  # type: ignore[untyped-decorator]
def philox_tile(seed, position, stream: tl.constexpr, chunk, words: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint32 [words, 32]: the random bits of a chunk, those of ``noise``."""
    counter = chunk * (words * 8) + tl.arange(0, words * 8)
    zeros = tl.zeros([words * 8], tl.uint32)
    low, high = zeros + position.to(tl.uint32), zeros + (position >> 32).to(tl.uint32)
    purpose = tl.full([words * 8], stream, tl.uint32)
    a, b, c, d = tl.philox(seed, counter, low, high, purpose)
    # Four neighbouring columns are one counter's words, in this order.
    even = tl.join(a.to(tl.uint32), c.to(tl.uint32))
    bits = tl.join(even, tl.join(b.to(tl.uint32), d.to(tl.uint32)))
    return tl.reshape(bits, [words, 32])


@triton.jit  # type: ignore[untyped-decorator]
def philox_points(seed, position, stream: tl.constexpr, column):  # type: ignore[no-untyped-def]
    """uint32 like ``column`` int32, with ``position`` int64 of the same shape."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    purpose = tl.full(column.shape, stream, tl.uint32)
    a, b, c, d = tl.philox(seed, column >> 2, low, high, purpose)
    word = column & 3
    even = tl.where(word == 0, a.to(tl.uint32), c.to(tl.uint32))
    odd = tl.where(word == 1, b.to(tl.uint32), d.to(tl.uint32))
    return tl.where((word & 1) == 0, even, odd)


@triton.jit
def exponential(bits):  # type: ignore[no-untyped-def]
    """float32 exponential(1) of uint32 bits, as ``exponential_noise`` makes it of them."""
    value = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    # -log(1 - v) by its series where the plain logarithm loses the small ones.
    series = 1 / 3 + value * (1 / 4 + value * (1 / 5 + value * (1 / 6)))
    series = value * (1.0 + value * (0.5 + value * series))
    return tl.where(value < 0.0625, series, -0.6931471805599453 * tl.log2(1.0 - value))
