"""Masked logits to the probabilities a token is drawn from.

Order: (mask, applied before) -> temperature -> min-p -> top-k -> top-p; each filter looks at what
the one before it left. Tokens that tie with the last one kept are kept, so the result does not
depend on the order of a sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from guided_spec.ops.host import to_device
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.types import Noise, SamplingParams, Verifier

ALIGNED = 16  # numbers: Triton compiles a kernel again for memory that begins elsewhere


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a batch, a row a request.

    temperature, top_p, min_p: float32 [B]; top_k: int64 [B], 0 keeps all; seeds: int64 [B].
    The host flags say which filters any row uses, so that unused ones cost nothing.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def stack(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device
    ) -> Sampling:
        """One row for each of ``params``, on ``device``; two copies, however many there are."""
        numbers = [[p.temperature for p in params], [p.top_p for p in params]]
        numbers.append([p.min_p for p in params])
        temperature, top_p, min_p = _together(numbers, device, torch.float32)
        integers = [[p.top_k for p in params], seeds]
        top_k, own_seeds = _together(integers, device, torch.int64)
        return cls(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=own_seeds,
            all_greedy=all(p.temperature == 0 for p in params),
            any_top_k=any(p.top_k > 0 for p in params),
            any_top_p=any(p.top_p < 1 for p in params),
            any_min_p=any(p.min_p > 0 for p in params),
        )

    def select(self, requests: Tensor) -> Sampling:
        """The rows of ``requests`` int64 [R]; the flags stay those of the whole batch."""
        names = ("temperature", "top_k", "top_p", "min_p", "seeds")
        return replace(self, **{name: getattr(self, name)[requests] for name in names})


def _together(
    columns: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Columns of one length in one copy, each aligned as memory of its own would be."""
    width = len(columns[0])
    length = -(-max(width, 1) // ALIGNED) * ALIGNED
    packed = np.zeros((len(columns), length), np.int64 if dtype == torch.int64 else np.float32)
    packed[:, :width] = np.array(columns, dtype=packed.dtype)
    return tuple(column[:width] for column in to_device(packed, device, dtype).unbind(0))


class VerifyRows(NamedTuple):
    """How B requests decide.

    sampling: their parameters. adjustments: biases, bans and penalties; None for none.
    verifier: which of ``guided_spec.ops.sampling.verify.VERIFIERS``.
    noise: the values themselves, or their keys.
    """

    sampling: Sampling
    noise: Noise | NoiseKeys
    verifier: Verifier = "rejection"
    adjustments: Adjustments | None = None


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [B, R, V], illegal tokens at -inf, to probabilities float32 [B, R, V].

    Rows of temperature 0 become one-hot at the first largest logit. A row without any legal token
    becomes all zeros. Does not change ``logits``.
    """
    greedy = _one_hot_argmax(logits)
    if sampling.all_greedy:
        return greedy
    temperature = sampling.temperature.view(-1, 1, 1)
    scores = logits.float()
    # Relative to the largest one, so that no temperature, however small, divides it to infinity.
    scores = scores - scores.amax(-1, keepdim=True)
    scores = scores / torch.where(temperature > 0, temperature, 1.0)
    if sampling.any_min_p:
        scores = _keep_min_p(scores, sampling.min_p.view(-1, 1, 1))
    if sampling.any_top_k or sampling.any_top_p:
        scores = _keep_top(scores, sampling)
    probs = torch.softmax(scores, -1).nan_to_num_(0.0)  # a row of -inf alone gives NaN
    return torch.where(temperature > 0, probs, greedy)


def _one_hot_argmax(logits: Tensor) -> Tensor:
    largest, index = logits.max(-1, keepdim=True)
    legal = (largest > float("-inf")).to(torch.float32)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, index, legal)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    # p >= min_p * max(p) in logarithms; log(0) = -inf keeps everything.
    threshold = scores.amax(-1, keepdim=True) + min_p.log()
    return scores.masked_fill(scores < threshold, float("-inf"))


def _keep_top(scores: Tensor, sampling: Sampling) -> Tensor:
    ordered = scores.sort(-1, descending=True).values
    if sampling.any_top_k:
        vocab_size = scores.shape[-1]
        top_k = sampling.top_k.view(-1, 1, 1)
        last = torch.where(top_k > 0, top_k, vocab_size).clamp_max(vocab_size) - 1
        threshold = ordered.gather(-1, last.expand(*ordered.shape[:-1], 1))
        scores = scores.masked_fill(scores < threshold, float("-inf"))
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if sampling.any_top_p:
        scores = _keep_top_p(scores, ordered, sampling.top_p.view(-1, 1, 1))
    return scores


def _keep_top_p(scores: Tensor, ordered: Tensor, top_p: Tensor) -> Tensor:
    probs = torch.softmax(ordered, -1)
    # A token is kept while the mass before it is short of top_p; the first one always is.
    kept = (probs.cumsum(-1) - probs < top_p) | (top_p >= 1)
    threshold = ordered.masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
    return scores.masked_fill(scores < threshold, float("-inf"))
