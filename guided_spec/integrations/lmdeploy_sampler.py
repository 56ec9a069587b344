"""LMDeploy's rejection sampler, exact for every setting: the same filters on all K + 1 rows.

It takes LMDeploy's records and returns its tensors, so it stands where LMDeploy's own
``RejectionSampler`` stood. The logits have been masked and divided by the temperature before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.ops.noise import NoiseKeys
from guided_spec.ops.verify import VERIFIERS, draw_noise, verify
from guided_spec.ops.warp import Sampling, VerifyRows, warp
from guided_spec.types import Accepted, Draft

__all__ = ["RejectionSampler", "Sampled", "request_sampling"]


class Sampled(NamedTuple):
    """What LMDeploy's sampler returns, in its order.

    output_token_ids: int64 [B, K + 1], the accepted draft tokens and one more, then -1.
    num_rejected: int64 [B], draft tokens that were not accepted.
    last_token_ids: int64 [B], the last token of each row.
    """

    output_token_ids: Tensor
    num_rejected: Tensor
    last_token_ids: Tensor


class RejectionSampler(nn.Module):
    """Accepts a prefix of every draft and draws one more token, as plain decoding would have.

    Each row's noise is a function of its request's seed and of ``random_offsets``, which must be
    the position of the next token: not the number of steps, as LMDeploy counts it.
    """

    def forward(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        expanded_sampling_inputs: Any,
        draft_probs: Tensor | None = None,
    ) -> Sampled:
        """One step of a batch.

        target_logits: [B, K + 1, V], processed; row i follows the draft tokens before i.
        draft_token_ids: int64 [B, K]. draft_probs: [B, K, V] what they were sampled from; None:
            they are a function of the text.
        expanded_sampling_inputs: LMDeploy's ``SamplingInputs`` of B * (K + 1) rows.

        Where no token has any probability, token 0 is drawn: a grammar refuses it when it is
        committed, and LMDeploy's own argmax of nothing gives it to a free request. Does not sync.
        """
        width = target_logits.shape[1]
        sampling = request_sampling(expanded_sampling_inputs, width, target_logits.device)
        lengths = torch.full_like(draft_token_ids[:, 0], width - 1)
        draft = Draft(draft_token_ids, lengths, draft_probs)
        rows = VerifyRows(
            sampling, NoiseKeys(sampling.seeds, _positions(expanded_sampling_inputs, width))
        )
        accepted = _accept(target_logits, draft, rows)
        drawn = accepted.token_ids.gather(1, accepted.num_accepted.unsqueeze(1)).clamp_min(0)
        output = accepted.token_ids.scatter(1, accepted.num_accepted.unsqueeze(1), drawn)
        return Sampled(output, width - 1 - accepted.num_accepted, drawn.squeeze(1))


def request_sampling(expanded: Any, width: int, device: torch.device) -> Sampling:
    """One row a request of LMDeploy's ``SamplingInputs``, which hold ``width`` rows of each.

    The temperature has been applied: it is 1, or 0 for a request with ``top_k`` 1, LMDeploy's way
    to say greedy.
    """
    batch = expanded.batch_size // width
    ones = torch.ones(batch, device=device)

    def rows(values: Tensor | None, default: Tensor) -> Tensor:
        return default if values is None else values[::width].to(device=device, dtype=default.dtype)

    limit = max(int(expanded.max_top_k), 0)
    top_k = rows(expanded.top_k, torch.full_like(ones, limit, dtype=torch.int64)).clamp_min(0)
    return Sampling(
        temperature=torch.where(top_k == 1, 0.0, ones),
        top_k=top_k,
        top_p=rows(expanded.top_p, ones),
        min_p=rows(expanded.min_p, torch.zeros_like(ones)),
        seeds=rows(expanded.random_seeds, torch.zeros_like(top_k)),
        all_greedy=limit == 1,
        any_top_k=expanded.top_k is not None or limit > 0,
        any_top_p=expanded.top_p is not None,
        any_min_p=expanded.min_p is not None,
    )


def _positions(expanded: Any, width: int) -> Tensor:
    positions: Tensor = expanded.random_offsets[::width]
    return positions.long()


def _accept(logits: Tensor, draft: Draft, rows: VerifyRows) -> Accepted:
    sampling = rows.sampling
    if not (sampling.any_min_p and sampling.any_top_p) or sampling.all_greedy:
        return verify(logits, None, draft, rows)
    # LMDeploy's min-p comes behind its top-p, which then has another mass to share out.
    probs = warp(logits, replace(sampling, any_min_p=False))
    least = sampling.min_p.view(-1, 1, 1) * probs.amax(-1, keepdim=True)
    kept = probs.masked_fill(probs < least, 0.0)
    probs = kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
    noise = draw_noise(rows, draft.token_ids.shape[1], logits.shape[-1])
    return VERIFIERS[rows.verifier](probs, draft, noise)
