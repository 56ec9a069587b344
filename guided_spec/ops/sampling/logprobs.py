"""Log-probabilities of committed tokens, and of the likeliest alternatives.

The rows of one verify forward hold everything: row i of a request says how likely each token was
after i draft tokens, whether that token was then drafted and accepted or drawn. Of requests that
are watched, drafted tokens are recorded too, and how many tokens the grammar left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from guided_spec.ops.bitmask import apply_token_bitmask, unpack_bitmask
from guided_spec.ops.host import to_device
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.rejection import proposed_probs
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import Draft, LogprobsMode, SamplingParams, TokenLogprobs, TopLogprob


class Scores(NamedTuple):
    """What one step's tokens were chosen from, on one device.

    logits: [B, K + 1, V], the model's. bitmask: int32 [B, K + 1, W], the legal tokens; None: all.
    drafted: int64 [B, K]. sampling, adjustments: as the step had them.
    """

    logits: Tensor
    bitmask: Tensor | None
    drafted: Tensor
    sampling: Sampling
    adjustments: Adjustments | None = None

    def logprobs(self, mode: LogprobsMode, requests: Tensor) -> Tensor:
        """float32 [R, K + 1, V]: log-probabilities in the rows of ``requests`` int64 [R]."""
        logits = self.logits[requests]
        if mode == "raw":
            return torch.log_softmax(logits.float(), -1)
        bitmask = None if self.bitmask is None else self.bitmask[requests]
        masked = apply_token_bitmask(logits, bitmask)
        if mode == "masked":
            return torch.log_softmax(masked.float(), -1)
        if self.adjustments is not None:  # which know all requests and no others
            whole = apply_token_bitmask(self.logits, self.bitmask)
            masked = self.adjustments.apply(whole, self.drafted)[requests]
        return warp(masked, self.sampling.select(requests)).log()  # filtered tokens at -inf


@dataclass(frozen=True, slots=True)
class LogprobsPlan:
    """Which requests of a batch ask for what; made by ``stack``.

    counts: [B] how many likeliest tokens each wants, None where it asks for nothing.
    rows: for each mode in use the asking requests, int64 [R] on the device.
    order: the requests in the order of ``rows``, mode after mode.
    """

    counts: tuple[int | None, ...]
    rows: dict[LogprobsMode, Tensor]
    order: tuple[int, ...]

    @classmethod
    def stack(cls, params: Sequence[SamplingParams], device: torch.device) -> LogprobsPlan | None:
        """The plan of a batch, a request for each of ``params``; None where none asks for them."""
        rows: dict[LogprobsMode, list[int]] = {}
        for mode in get_args(LogprobsMode):
            for request, one in enumerate(params):
                if one.logprobs is not None and one.logprobs_mode == mode:
                    rows.setdefault(mode, []).append(request)
        if not rows:
            return None
        return cls(
            counts=tuple(one.logprobs for one in params),
            rows={mode: to_device(asking, device) for mode, asking in rows.items()},
            order=tuple(request for asking in rows.values() for request in asking),
        )


class Logprobs(NamedTuple):
    """What ``gather_logprobs`` found, still on the device.

    values: float64 [R, K + 1, 1 + 2 * k]: the token's log-probability, those of the k likeliest
        tokens in descending order, and their ids. R are the requests of ``plan.order``, k the
        largest count that any of them asks for.
    """

    values: Tensor
    plan: LogprobsPlan

    def records(self, token_ids: Sequence[Sequence[int]]) -> list[list[TokenLogprobs]]:
        """[B] lists in step with ``token_ids``, the committed tokens; one download.

        Empty for a request that did not ask.
        """
        found: list[list[TokenLogprobs]] = [[] for _ in token_ids]
        for request, rows in zip(self.plan.order, self.values.tolist(), strict=True):
            count = self.plan.counts[request] or 0
            tokens = token_ids[request]
            found[request] = [
                _record(token, row, count) for token, row in zip(tokens, rows, strict=False)
            ]
        return found


def gather_logprobs(scores: Scores, token_ids: Tensor, plan: LogprobsPlan) -> Logprobs:
    """Log-probabilities of ``token_ids`` and of the likeliest tokens, for the requests that ask.

    token_ids: int64 [B, K + 1], what was accepted and drawn; padding is -1, and the values
        at its positions mean nothing.

    Computes in float32 on the device of the scores, which are not changed; no sync.
    """
    wanted = max(plan.counts[request] or 0 for request in plan.order)
    parts = []
    for mode, rows in plan.rows.items():
        logprobs = scores.logprobs(mode, rows)
        chosen = logprobs.gather(-1, token_ids[rows].clamp_min(0).unsqueeze(-1))
        top = logprobs.topk(min(wanted, logprobs.shape[-1]), -1)
        # float64 holds every float32 and every token id, so that one download takes them all.
        parts.append(torch.cat([chosen.double(), top.values.double(), top.indices.double()], -1))
    return Logprobs(torch.cat(parts), plan)


def _record(token_id: int, row: list[float], count: int) -> TokenLogprobs:
    wanted = len(row) // 2
    pairs = zip(row[1 : wanted + 1], row[wanted + 1 :], strict=True)
    top = [TopLogprob(int(token), logprob) for logprob, token in pairs if not isinf(logprob)]
    top.sort(key=lambda one: (-one.logprob, one.token_id))  # among equals topk has no order
    return TokenLogprobs(token_id, row[0], tuple(top[:count]))


class PositionProbs(NamedTuple):
    """One position of one request's step, on the host.

    draft_id: the drafted token; one past the end of the draft means nothing.
    allowed: tokens that the mask row admits.
    draft_prob: what it was drawn with; NaN where the draft is one-hot, and past its end.
    draft_masked, draft_processed: the target's probability of it, in these modes of
        ``SamplingParams.logprobs_mode``.
    masked, processed: that of the token which was accepted or drawn there; where there is none,
        nothing.
    """

    draft_id: int
    allowed: int
    draft_prob: float
    draft_masked: float
    draft_processed: float
    masked: float
    processed: float


class StepProbs(NamedTuple):
    """What ``gather_step_probs`` found, still on the device.

    values: float64 [R, K + 1, 7], the fields of ``PositionProbs``.
    """

    values: Tensor

    def rows(self) -> list[list[PositionProbs]]:
        """[R] lists of the K + 1 positions; one download."""
        return [
            [PositionProbs(int(row[0]), int(row[1]), *row[2:]) for row in rows]
            for rows in self.values.tolist()
        ]


def gather_step_probs(
    scores: Scores, draft: Draft, token_ids: Tensor, requests: Sequence[int]
) -> StepProbs:
    """Probabilities of the drafted tokens and of ``token_ids``, for some requests.

    draft: of K tokens. token_ids: int64 [B, K + 1], what was accepted and drawn, padded with -1.
    requests: R of them, by their rows.

    Computes in float32 on the device of the scores, which are not changed; no sync.
    """
    rows = to_device(requests, token_ids.device)
    chosen = token_ids[rows].clamp_min(0)
    drafted = torch.nn.functional.pad(draft.token_ids[rows], (0, 1))
    pairs = torch.stack([drafted, chosen], -1)
    masked = scores.logprobs("masked", rows).gather(-1, pairs).exp()
    processed = scores.logprobs("processed", rows).gather(-1, pairs).exp()
    columns = [
        drafted,
        _allowed(scores, rows),
        _draft_probs(draft)[rows],
        masked[..., 0],
        processed[..., 0],
        masked[..., 1],
        processed[..., 1],
    ]
    # float64 holds every float32 and every token id, so that one download takes them all.
    return StepProbs(torch.stack([column.double() for column in columns], -1))


def _draft_probs(draft: Draft) -> Tensor:
    """float [B, K + 1]: NaN where no distribution was drawn from."""
    probs = proposed_probs(draft)
    if draft.probs is None:
        probs = torch.full_like(probs, torch.nan)
    elif draft.is_certain is not None:
        probs = probs.masked_fill(draft.is_certain, torch.nan)
    return torch.nn.functional.pad(probs, (0, 1), value=torch.nan)


def _allowed(scores: Scores, rows: Tensor) -> Tensor:
    """int64 [R, K + 1]: set bits of the mask rows, V without a mask."""
    vocab_size = scores.logits.shape[-1]
    if scores.bitmask is None:
        shape = (len(rows), scores.logits.shape[1])
        return torch.full(shape, vocab_size, device=rows.device)
    return unpack_bitmask(scores.bitmask[rows], vocab_size).sum(-1)
