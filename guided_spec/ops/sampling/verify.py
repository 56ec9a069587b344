"""The verifier's decision from logits: mask, adjust, warp, and accept a prefix of each draft.

The composition below is the definition. On CUDA, with noise passed as keys, kernels decide the same
from one reading of the logits, and write nothing of their size.

Coupled verification: a draft token stays iff the target draws it itself.

The target's draw at each position uses noise of that position alone, so the text does not depend on
what was drafted: with a seed it is the text of plain sampling, token for token. A drafter that
samples with the same noise draws the same token whenever its distribution is close enough
(Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative
decoding", arXiv:2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor

from guided_spec.ops.bitmask import apply_token_bitmask
from guided_spec.ops.kernels import has_triton, kernels_of
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.rejection import draw, rejection_sample
from guided_spec.ops.sampling.warp import VerifyRows, warp
from guided_spec.types import Accepted, Draft, Noise


def coupled_sample(target_probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
    """Accept the draft tokens that equal the target's own draws, and emit the first that differs.

    target_probs: [B, K + 1, V] float32, row i after the draft tokens before i; a row of zeros means
        that no token is legal there.
    draft: K tokens a row; its ``probs`` are not used.
    noise: ``sample`` [B, >= K + 1, V], that of position i in row i.

    Where the row to draw from is all zeros the drawn token is -1. All on one device, no sync.
    """
    num_draft = draft.token_ids.shape[1]
    drawn = draw(target_probs, noise.sample[:, : num_draft + 1])
    depth = torch.arange(num_draft + 1, device=drawn.device)
    agrees = (drawn[:, :-1] == draft.token_ids) & (depth[:-1] < draft.num_tokens.unsqueeze(1))
    num_accepted = agrees.long().cumprod(1).sum(1)
    return Accepted(torch.where(depth <= num_accepted.unsqueeze(1), drawn, -1), num_accepted)


VERIFIERS = {"rejection": rejection_sample, "coupled": coupled_sample}
KERNEL_VERIFIERS = frozenset({"rejection", "coupled"})
"""Those that the kernels decide for. Others run as they are written."""


def verify(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Accepted:
    """Accept a prefix of every row's draft, and draw one more token.

    logits: [B, K + 1, V] float32, bfloat16 or float16; row i follows the draft tokens before i.
    bitmask: int32 [B, K + 1, W], the tokens that the grammar allows; None allows all.
    draft: K tokens a row.

    Changes none of them. All on one device, no sync. On CUDA the kernels compute masses in another
    order than the reference, so choices can differ where it is within rounding of a tie.
    """
    has_kernel = rows.verifier in KERNEL_VERIFIERS and isinstance(rows.noise, NoiseKeys)
    if logits.is_cuda and has_kernel and has_triton():
        found: Accepted = kernels_of(__name__).verify(logits, bitmask, draft, rows)
        return found
    noise = draw_noise(rows, draft.token_ids.shape[1], logits.shape[-1])
    logits = apply_token_bitmask(logits, bitmask)
    if rows.adjustments is not None:
        logits = rows.adjustments.apply(logits, draft.token_ids)
    return VERIFIERS[rows.verifier](warp(logits, rows.sampling), draft, noise)


def draw_noise(rows: VerifyRows, num_draft: int, vocab_size: int) -> Noise:
    """The noise of a step whose draft has ``num_draft`` tokens: as it is, or from its keys."""
    if isinstance(rows.noise, Noise):
        return rows.noise
    is_coupled, device = rows.verifier == "coupled", rows.noise.seeds.device
    if rows.sampling.all_greedy:  # one-hot targets decide the same under any noise
        batch = len(rows.noise.seeds)
        accept = torch.zeros(batch, num_draft, device=device)
        return Noise(accept, torch.ones(batch, *([1] * is_coupled), 1, device=device))
    return rows.noise.draw(num_draft, vocab_size, at_each=is_coupled)
