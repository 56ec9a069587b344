"""The verify decision as kernels: three launches for greedy batches, five for any other.

One pass reads the logits once. After it only the rows that a token is drawn from are read again,
and of filtered rows those chunks alone that hold a token which may be kept. Grids depend on shapes
alone and nothing waits for the host, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.adjust import Adjustments
from guided_spec.ops.bitmask import num_mask_words
from guided_spec.ops.verify import NoiseKeys, VerifyRows
from guided_spec.ops.verify_decide_triton import Filters, assemble_kernel, decide_kernel
from guided_spec.ops.verify_draw_triton import draw_kernel
from guided_spec.ops.verify_resolve_triton import resolve_kernel
from guided_spec.ops.verify_stats_triton import ban_kernel, stats_kernel
from guided_spec.ops.verify_tiles_triton import Rules, Step, Work
from guided_spec.types import Accepted, Draft

__all__ = ["verify"]

MOST_WORDS = 64  # of a tile
CAPACITY = 32_768  # tokens of a filtered row that are listed; longer lists are made again and again
MANY_PROGRAMS = 8192  # from which on one program serves all rows of a request
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
    shape = _Shape(
        batch, num_rows, triton.cdiv(num_words, words), words, min(CAPACITY, num_words * 32)
    )
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
    work = _work(shape, device, greedy=sampling.all_greedy, filtered=filtered)
    batch, num_rows, num_chunks, words, capacity = shape
    coupled, total = rows.verifier == "coupled", batch * num_rows
    width, chunks = triton.next_power_of_2(num_rows), triton.next_power_of_2(num_chunks)
    stats_kernel[(total, num_chunks)](step, rules, work, num_chunks, words, num_warps=2)
    decide_kernel[(batch,)](step, rules, work, filters, num_chunks, coupled, width, chunks)
    if not sampling.all_greedy:
        is_wide = coupled or total * num_chunks <= MANY_PROGRAMS
        stride = num_rows if is_wide else 1
        draw_kernel[(batch, num_chunks, stride)](
            *(step, rules, work, num_chunks, capacity, stride, coupled, filtered, words),
            num_warps=8,
            maxnreg=80,  # most of its programs have nothing to do and should not wait for room
        )
        resolve_kernel[(total,)](
            *(step, rules, work, filters, num_chunks, capacity, coupled, filtered, words, chunks),
            num_warps=8,
        )
    token_ids = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    assemble_kernel[(batch,)](step, work, token_ids, num_accepted, coupled, width, num_warps=1)
    return Accepted(token_ids, num_accepted)


def _step(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Step:
    """The arguments, copied only where a kernel could not address them."""
    assert isinstance(rows.noise, NoiseKeys)
    num_words = num_mask_words(logits.shape[-1])
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    probs = draft.probs
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
    ban_kernel[grid](step, parts, bans.prefixes.shape[1], count, BAN_BLOCK, num_warps=2)
    return step


def _work(shape: _Shape, device: torch.device, *, greedy: bool, filtered: bool) -> Work:
    total, chunks = shape.batch * shape.rows, shape.num_chunks
    is_listed = filtered and not greedy

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
        depth=numbers(total) if is_listed else None,
        test=numbers(total) if is_listed else None,
        state=integers(total),
        token=integers(total),
        num_listed=integers(total) if is_listed else None,
        listed_depths=numbers(total, shape.capacity) if is_listed else None,
        listed_tokens=integers(total, shape.capacity) if is_listed else None,
        race_value=None if greedy else numbers(total, chunks, 2),
        race_token=None if greedy else integers(total, chunks, 2),
    )
