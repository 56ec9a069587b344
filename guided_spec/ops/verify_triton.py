"""The verify decision as kernels: three launches for greedy batches, one more for sampled ones.

One pass reads the logits once. After it only the rows that a token is drawn from are read again;
where any is filtered, three more launches find what is kept of rows that need it. Grids depend on
shapes alone and nothing waits for the host, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.adjust import Adjustments
from guided_spec.ops.bitmask import num_mask_words
from guided_spec.ops.dependents_triton import following
from guided_spec.ops.noise import NoiseKeys
from guided_spec.ops.verify_decide_triton import Filters, assemble_kernel, decide_kernel
from guided_spec.ops.verify_draw_triton import race_kernel
from guided_spec.ops.verify_filter_triton import bracket_kernel, collect_kernel
from guided_spec.ops.verify_resolve_triton import threshold_kernel
from guided_spec.ops.verify_stats_triton import ban_kernel, stats_kernel
from guided_spec.ops.verify_tiles_triton import Rules, Step, Work
from guided_spec.ops.warp import VerifyRows
from guided_spec.types import Accepted, Draft

__all__ = ["verify"]

MOST_WORDS = 64  # of a tile
CAPACITY = 8192  # depths of a filtered row that are listed; rows of more are searched slowly
SHORT = 512  # depths that are searched without looking at what room there is for more
SAMPLED = 8192  # tokens of a filtered row that bracket its threshold
SURENESS = 5.0  # standard errors between the bracket and its estimate
FEW = 128  # tokens of a chunk from which on equal ones are listed together
MANY_PROGRAMS = 8192  # from which on one program serves all rows of a request
AT_ONCE = 1024  # programs of eight warps that a large device runs at once
BAN_BLOCK = 64


class _Shape(NamedTuple):
    """What the grids depend on."""

    batch: int
    rows: int
    num_chunks: int
    words: int
    capacity: int


def verify(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Accepted:
    """See ``guided_spec.ops.verify.verify``; ``rows.noise`` are keys, all on one CUDA device."""
    batch, num_rows, vocab_size = logits.shape
    num_words = num_mask_words(vocab_size)
    # Small vocabularies are cut into a few chunks too.
    words = min(MOST_WORDS, max(1, triton.next_power_of_2(num_words) // 4))
    capacity = min(CAPACITY, triton.next_power_of_2(num_words * 32))
    shape = _Shape(batch, num_rows, triton.cdiv(num_words, words), words, capacity)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        step = _step(logits, bitmask, draft, rows)
        rules = Rules()
        if rows.adjustments is not None:
            rules = _rules(rows.adjustments)
            step = _ban(step, rows.adjustments, num_words)
        return _launch(step, rules, rows, shape)


def _launch(step: Step, rules: Rules, rows: VerifyRows, shape: _Shape) -> Accepted:
    """Run the kernels over memory of their own."""
    sampling, device = rows.sampling, step.lengths.device
    filters = Filters(
        *map(tl.constexpr, (sampling.any_top_k, sampling.any_top_p, sampling.any_min_p))
    )
    filtered = sampling.any_top_k or sampling.any_top_p or sampling.any_min_p
    batch, num_rows, num_chunks, words, _ = shape
    coupled, total = rows.verifier == "coupled", batch * num_rows
    is_split = step.probs is not None and not coupled
    races = 0 if sampling.all_greedy else 1 + is_split
    work = _work(shape, device, races, filtered=filtered)
    width, chunks = triton.next_power_of_2(num_rows), triton.next_power_of_2(num_chunks)
    follows = following(step.lengths)
    stats_kernel[(total, num_chunks)](step, rules, work, num_chunks, words, num_warps=2, **follows)
    decide_kernel[(batch,)](
        step, rules, work, filters, num_chunks, coupled, width, chunks, **follows
    )
    if not sampling.all_greedy:
        if filtered:
            _filter(step, rules, work, filters, shape, coupled=coupled)
        race_kernel[(batch, num_chunks, num_rows if coupled else 1)](
            *(step, rules, work, num_chunks, coupled, filtered, is_split, words, width),
            num_warps=_warps(shape),
            **follows,
        )
    token_ids = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    assemble_kernel[(batch,)](
        *(step, work, token_ids, num_accepted, num_chunks, coupled, is_split, width, chunks),
        num_warps=4 if races else 1,
        **follows,
    )
    return Accepted(token_ids, num_accepted)


def _filter(
    step: Step, rules: Rules, work: Work, filters: Filters, shape: _Shape, *, coupled: bool
) -> None:
    """Find what the filters keep of every row that needs it."""
    batch, num_rows, num_chunks, words, capacity = shape
    total, follows = batch * num_rows, following(step.lengths)
    groups = min(SAMPLED // 8, triton.next_power_of_2(triton.cdiv(step.vocab_size, 8)))
    bracket_kernel[(total,)](step, rules, work, filters, groups, SURENESS, num_warps=4, **follows)
    stride = num_rows if coupled or total * num_chunks <= MANY_PROGRAMS else 1
    collect_kernel[(batch, num_chunks, stride)](
        *(step, rules, work, num_chunks, capacity, stride, FEW, words),
        triton.next_power_of_2(num_rows),
        num_warps=_warps(shape),
        **follows,
    )
    chunks, listed = triton.next_power_of_2(num_chunks), triton.next_power_of_2(capacity)
    threshold_kernel[(total,)](
        *(step, rules, work, filters, num_chunks, capacity, words, chunks),
        *(min(SHORT, listed), listed),
        num_warps=16,
        **follows,
    )


def _warps(shape: _Shape) -> int:
    """Of programs that go over one chunk of a request each.

    The sooner each is done where all run at once, the more run at once where they take turns.
    """
    return 8 if shape.batch * shape.num_chunks <= AT_ONCE else 4


def _step(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Step:
    """The arguments, copied only where a kernel could not address them."""
    assert isinstance(rows.noise, NoiseKeys)
    num_words = num_mask_words(logits.shape[-1])
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    probs, certain = draft.probs, draft.is_certain
    if probs is not None and probs.stride(-1) != 1:
        probs = probs.contiguous()
    has_probs = probs is not None and probs.numel() > 0
    sampling = rows.sampling
    return Step(
        logits=logits,
        batch_stride=logits.stride(0),
        row_stride=logits.stride(1),
        mask=None if bitmask is None else bitmask[..., :num_words].contiguous(),
        # An empty draft has no memory to point at; nothing of it is read.
        drafted=(draft.token_ids if draft.token_ids.numel() else draft.num_tokens).contiguous(),
        lengths=draft.num_tokens.contiguous(),
        probs=probs if has_probs else None,
        probs_batch_stride=probs.stride(0) if probs is not None else 0,
        probs_row_stride=probs.stride(1) if probs is not None else 0,
        columns=draft.columns.contiguous() if has_probs and draft.columns is not None else None,
        is_certain=certain.contiguous() if has_probs and certain is not None else None,
        temperature=sampling.temperature.contiguous(),
        top_k=sampling.top_k.contiguous(),
        top_p=sampling.top_p.contiguous(),
        min_p=sampling.min_p.contiguous(),
        seeds=rows.noise.seeds.contiguous(),
        first=rows.noise.positions.contiguous(),
        vocab_size=logits.shape[-1],
        num_draft=logits.shape[1] - 1,
    )


def _rules(adjustments: Adjustments) -> Rules:
    table, counts = adjustments.table, adjustments.counts
    rule_of = torch.full((table.batch_size,), -1, dtype=torch.int32, device=table.device)
    order = torch.arange(len(table.rules), dtype=torch.int32, device=table.device)
    rules = Rules(rule_of.index_copy_(0, table.index, order))
    if table.bias is not None:
        rules = rules._replace(bias=table.bias.contiguous())
    if counts is None or adjustments.in_prompt is None or table.penalties is None:
        return rules
    repetition, frequency, presence = (one.flatten().contiguous() for one in table.penalties)
    return rules._replace(
        counts=counts.contiguous(),
        in_prompt=adjustments.in_prompt.contiguous().view(torch.uint8),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


def _ban(step: Step, adjustments: Adjustments, num_words: int) -> Step:
    """The step with a mask of its own that lacks the banned tokens."""
    bans = adjustments.table.bans
    if bans is None:
        return step
    shape = (len(step.lengths), step.num_draft + 1, num_words)
    device = step.lengths.device
    free = step.mask is None
    mask = torch.full(shape, -1, dtype=torch.int32, device=device) if free else step.mask.clone()
    step = step._replace(mask=mask)
    tensors: list[Any] = [bans.owners, bans.tokens, bans.prefixes, bans.until]
    tensors += [adjustments.table.index, adjustments.num_output, adjustments.tails]
    parts = tuple(one.contiguous() for one in tensors)
    count = len(bans.owners)
    grid = (triton.cdiv(count, BAN_BLOCK), step.num_draft + 1)
    ban_kernel[grid](
        *(step, parts, bans.prefixes.shape[1], count, BAN_BLOCK),
        num_warps=2,
        **following(step.lengths),
    )
    return step


def _work(shape: _Shape, device: torch.device, races: int, *, filtered: bool) -> Work:
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
