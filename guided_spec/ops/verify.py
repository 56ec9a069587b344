"""The verifier's decision from logits: mask, adjust, warp, and accept a prefix of each draft.

The composition below is the definition. On CUDA, with noise given by its keys, kernels decide the
same from one reading of the logits, and write nothing of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from guided_spec.ops.bitmask import apply_token_bitmask
from guided_spec.ops.coupled import coupled_sample
from guided_spec.ops.noise import NoiseKeys, Stream, exponential_noise, uniform_noise
from guided_spec.ops.rejection import rejection_sample
from guided_spec.ops.warp import VerifyRows, warp
from guided_spec.types import Accepted, Draft, Noise

__all__ = ["VERIFIERS", "draw_noise", "verify"]

VERIFIERS = {"rejection": rejection_sample, "coupled": coupled_sample}


def verify(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Accepted:
    """Accept a prefix of every row's draft and draw one more token.

    logits: [B, K + 1, V] float32, bfloat16 or float16; row i follows the draft tokens before i.
    bitmask: int32 [B, K + 1, W], the tokens that the grammar allows; None allows all.
    draft: K tokens a row.

    Changes none of them. All on one device, no sync. On CUDA the kernels compute masses in another
    order than the reference, so choices can differ where it is within rounding of a tie.
    """
    kernel = _kernel() if logits.is_cuda and isinstance(rows.noise, NoiseKeys) else None
    if kernel is not None:
        return kernel(logits, bitmask, draft, rows)
    noise = draw_noise(rows, draft.token_ids.shape[1], logits.shape[-1])
    logits = apply_token_bitmask(logits, bitmask)
    if rows.adjustments is not None:
        logits = rows.adjustments.apply(logits, draft.token_ids)
    return VERIFIERS[rows.verifier](warp(logits, rows.sampling), draft, noise)


def draw_noise(rows: VerifyRows, num_draft: int, vocab_size: int) -> Noise:
    """The noise of a step whose draft has ``num_draft`` tokens: as given, or what its keys give."""
    if isinstance(rows.noise, Noise):
        return rows.noise
    seeds, first = rows.noise
    batch, is_coupled, device = len(seeds), rows.verifier == "coupled", seeds.device
    if rows.sampling.all_greedy:  # one-hot targets decide alike under any noise
        accept = torch.zeros(batch, num_draft, device=device)
        return Noise(accept, torch.ones(batch, *([1] * is_coupled), 1, device=device))
    positions = first.unsqueeze(1) + torch.arange(num_draft + 1, device=device)
    accept = uniform_noise(seeds, positions[:, :-1], Stream.ACCEPT)
    if not is_coupled:
        return Noise(accept, exponential_noise(seeds, first, Stream.SAMPLE, vocab_size))
    repeated = seeds.repeat_interleave(num_draft + 1)
    sample = exponential_noise(repeated, positions.flatten(), Stream.SAMPLE, vocab_size)
    return Noise(accept, sample.view(batch, num_draft + 1, -1))


@cache
def _kernel() -> Callable[[Tensor, Tensor | None, Draft, VerifyRows], Accepted] | None:
    if find_spec("triton") is None:  # it exists for Linux only
        return None
    from guided_spec.ops import verify_triton  # imported here: it needs triton

    return verify_triton.verify
