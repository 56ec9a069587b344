"""The drafting side's token choice: one token a request from a drafter's logits, masked and drawn.

The mask speaks of target tokens, the logits of draft tokens: a bit of the mask is looked up where
it is needed. On CUDA two kernels do all of it, unless a request filters (top-k, top-p, min-p).
"""

from __future__ import annotations

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.bitmask import apply_token_bitmask, only_legal_token, translate_bitmask
from guided_spec.ops.kernels import has_triton, kernels_of
from guided_spec.ops.sampling.noise import DraftNoise, exponential_noise
from guided_spec.ops.sampling.rejection import DraftChoice
from guided_spec.ops.sampling.warp import Sampling, warp

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_draft(
    logits: Tensor,
    bitmask: Tensor | None,
    target_ids: Tensor | None,
    sampling: Sampling,
    noise: DraftNoise | None,
) -> DraftChoice:
    """Draw one token for each row of logits [B, D], floating point.

    bitmask: int32 [B, W] over the target's tokens; None forbids nothing.
    target_ids: int64 [D], which target token each draft token is; None: the target's own V tokens.
    noise: None only where every request is greedy.

    Greedy rows take the first largest legal logit, others race their warped probabilities against
    exponential noise: the token with the largest p / E, where E is the noise of its target id. A
    row that is -inf throughout draws nothing and is not starved. Everything on one device; nothing
    waits for the host, so a CUDA graph may hold it. Raises ConfigError where noise is missing.
    """
    if noise is None and not sampling.all_greedy:
        raise ConfigError("noise", None, "pass its keys where a request samples")
    choose = choose_draft_reference
    if _is_fused(logits, sampling):
        choose = kernels_of(__name__).choose_draft
    return choose(logits, bitmask, target_ids, sampling, noise)


def choose_draft_reference(
    logits: Tensor,
    bitmask: Tensor | None,
    target_ids: Tensor | None,
    sampling: Sampling,
    noise: DraftNoise | None,
) -> DraftChoice:
    """``choose_draft`` in torch, on any device: the definition that the kernels implement."""
    is_reduced = target_ids is not None
    legal = bitmask
    if bitmask is not None and target_ids is not None:
        legal = translate_bitmask(bitmask, target_ids)
    scores = apply_token_bitmask(logits, legal)
    probs = None
    if noise is None or sampling.all_greedy:
        largest, choice = scores.max(-1)
        drawn = largest > float("-inf")
    else:
        probs = warp(scores.unsqueeze(1), sampling).squeeze(1)
        drawing = exponential_noise(*noise)
        raced, choice = (probs / (drawing[:, target_ids] if is_reduced else drawing)).max(-1)
        drawn = raced > 0
    if target_ids is None:
        return DraftChoice(torch.where(drawn, choice, -1), probs, None, None)
    starved = ~drawn & (logits.amax(-1) > float("-inf"))
    only = torch.full_like(choice, -1) if bitmask is None else only_legal_token(bitmask)
    rescued = torch.where(starved, only, -1)
    tokens = torch.where(drawn, target_ids[choice], rescued)
    return DraftChoice(tokens, probs, starved, rescued)


def _is_fused(logits: Tensor, sampling: Sampling) -> bool:
    """Whether the kernels can make the choice: they know no filters, and no doubles."""
    is_filtered = sampling.any_top_k or sampling.any_top_p or sampling.any_min_p
    has_filters = is_filtered and not sampling.all_greedy
    is_served = logits.is_cuda and logits.dtype in _KERNEL_DTYPES and has_triton()
    return is_served and logits.numel() > 0 and not has_filters
