"""What LMDeploy's speculative agent gets of ours: the guided helper, and the rejection sampler.

The helper fills each mask once, of drafts and targets, and commits what is sampled. It answers the
calls of LMDeploy's ``GuidedSpecHelper``, in the same order and with the same arguments, so that
LMDeploy's own drafters work with it as they are.

The sampler replaces LMDeploy's own ``RejectionSampler``: it takes LMDeploy's records and
returns its tensors, and is exact for every setting, with the same filters on all K + 1 rows. The
logits have been masked and divided by the temperature before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.errors import VocabularyMismatchError
from guided_spec.integrations.lmdeploy.manager import (
    DraftProcessor,
    GrammarProcessor,
    GuidedManager,
    fit_bitmask,
)
from guided_spec.ops.bitmask import apply_token_bitmask, translate_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import VERIFIERS, draw_noise, verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows, warp
from guided_spec.types import Accepted, Draft

_Processors = Mapping[int, GrammarProcessor]
_Drafts = Mapping[int, DraftProcessor]


class GuidedHelper:
    """Does nothing where there is no manager or no guided request, as LMDeploy's does."""

    def __init__(self, guided_manager: GuidedManager | None = None) -> None:
        self._manager = guided_manager

    @property
    def manager(self) -> GuidedManager | None:
        """Where the processors of the requests are kept."""
        return self._manager

    def cleanup_sessions(self, session_ids: Sequence[Any] | None) -> None:
        """Forget sessions that have ended."""
        for session_id in session_ids or ():
            if self._manager is not None:
                self._manager.remove_processor(session_id)

    def get_processors(
        self, session_ctx: Any, response_formats: Any
    ) -> dict[int, GrammarProcessor]:
        """The processors of the guided rows of a batch, by row."""
        if self._manager is None or session_ctx is None:
            return {}
        return self._manager.get_processors(session_ctx, response_formats)

    async def prepare_bitmask(
        self, logits: Tensor, processors: _Processors | _Drafts | None
    ) -> Tensor | None:
        """int32 [B, W] on the device of ``logits`` [B, V]: the tokens legal after each row's draft.

        None where nothing is guided. Of the same rows the target's masks are made later.
        """
        if not processors or self._manager is None:
            return None
        bitmask = self._staged(len(logits), 1, logits.device)
        array = (
            bitmask.numpy()
        )  # another thread is not in inference mode, and may not write tensors

        def fill() -> None:
            for row, processor in processors.items():
                words = processor.next_row()
                if words is not None:
                    array[row, 0] = words

        await asyncio.to_thread(fill)
        return bitmask[:, 0].to(logits.device, non_blocking=True)

    def apply_bitmask(self, logits: Tensor, bitmask: Tensor | None) -> None:
        """Set illegal tokens of logits [B, V] to -inf, in-place; no sync.

        A row without any legal token stays as it is, so that its argmax is a token that the drafter
        means, if an illegal one; ``accept_draft_tokens`` deals with it.
        """
        if bitmask is None or self._manager is None:
            return
        masked = apply_token_bitmask(logits, fit_bitmask(bitmask, logits.shape[-1]))
        is_starved = masked.amax(-1, keepdim=True) == float("-inf")
        logits.copy_(torch.where(is_starved, logits, masked))

    async def accept_draft_tokens(
        self, draft_token_ids: Tensor, processors: _Drafts | None
    ) -> None:
        """Advance every guided row by one drafted token, int64 [B, 1]; one download.

        Where the drafter knew none of the legal tokens and there is but one, that one is written
        into ``draft_token_ids``.
        """
        if not processors or self._manager is None:
            return
        token_ids = draft_token_ids[:, 0].tolist()
        drafted = {row: processor.draft(token_ids[row]) for row, processor in processors.items()}
        changed = {row: token for row, token in drafted.items() if token != token_ids[row]}
        if changed:
            draft_token_ids[list(changed), 0] = draft_token_ids.new_tensor(list(changed.values()))

    async def apply_serial_bitmask(
        self,
        scores_3d: Tensor,
        processors: _Processors,
        draft_token_ids: Tensor,
        num_spec_tokens: int,
    ) -> None:
        """Mask the target's logits [B, K + 1, V] in-place, all rows in one pass.

        Rows that drafting has filled are not filled again; the draft is downloaded only where its
        drafter did not advance the grammar.
        """
        if not processors or self._manager is None:
            return
        width = num_spec_tokens + 1
        is_missing = any(processor.missing(num_spec_tokens) for processor in processors.values())
        drafts = draft_token_ids.tolist() if is_missing else None
        bitmask = self._staged(len(scores_3d), width, scores_3d.device)
        array = bitmask.numpy()

        def fill() -> None:
            for row, processor in processors.items():
                rows = processor.verify_rows(num_spec_tokens, drafts[row] if drafts else None)
                if rows is not None:
                    array[row] = rows.numpy()

        await asyncio.to_thread(fill)
        fitted = fit_bitmask(bitmask, scores_3d.shape[-1])
        with torch.inference_mode():
            on_device = fitted.to(scores_3d.device, non_blocking=True)
            scores_3d.copy_(apply_token_bitmask(scores_3d, on_device))

    async def accept_rejection_sampled_tokens(
        self,
        processors: _Processors,
        num_rejected: Tensor,
        output_token_ids: Tensor,
        next_token_ids: Tensor,
        num_spec_tokens: int,
    ) -> None:
        """Commit what was sampled; one download.

        num_rejected: [B]. output_token_ids: [B, K + 1] or [B, 1]. next_token_ids: [B].

        A refusal ends its request alone: its row becomes the end-of-text token, in-place, and is
        among the manager's ``take_stops``.
        """
        if not processors or self._manager is None:
            return
        counts = num_rejected.to(output_token_ids.device).unsqueeze(1)
        packed = torch.cat([counts, next_token_ids.unsqueeze(1), output_token_ids], 1).tolist()
        for row, processor in processors.items():
            rejected, last, *tokens = packed[row]
            tokens = [*tokens[: num_spec_tokens - rejected], last]
            if not self._manager.commit(row, processor, tokens):
                output_token_ids[row] = -1
                output_token_ids[row, 0] = self._manager.stop_token_id
                next_token_ids[row] = self._manager.stop_token_id

    def _staged(self, requests: int, depths: int, device: torch.device) -> Tensor:
        """int32 [B, depths, W] on the host, all ones; pinned where a GPU is to read it."""
        assert self._manager is not None
        shape = (requests, depths, num_mask_words(self._manager.vocab_size))
        return torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")


def translate_for_draft(drafter: Any, target_bitmask: Tensor) -> Tensor:
    """A mask over target tokens to one over an EAGLE-3 head's draft tokens, on its device.

    Replaces ``Eagle3._translate_bitmask``, which works on the host from a table that is
    frozen when the model is built. Raises VocabularyMismatchError for a head of another target.
    """
    largest = int(drafter._max_d2t_word)
    if largest >= target_bitmask.shape[-1]:
        words = target_bitmask.shape[-1]
        raise VocabularyMismatchError(
            f"the draft head names target tokens of word {largest}, the mask has {words} words; "
            "use a head of this target"
        )
    target_ids = drafter.draft_id_to_target_id.to(target_bitmask.device, torch.int64)
    return translate_bitmask(target_bitmask, target_ids)


class _Sampled(NamedTuple):
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
    ) -> _Sampled:
        """One step of a batch.

        target_logits: [B, K + 1, V], processed; row i follows the draft tokens before i.
        draft_token_ids: int64 [B, K]. draft_probs: [B, K, V] what they were sampled from; None:
            they are a function of the text.
        expanded_sampling_inputs: LMDeploy's ``SamplingInputs`` of B * (K + 1) rows.

        Where no token has any probability, token 0 is drawn: a grammar refuses it when it is
        committed, and LMDeploy's own argmax of nothing gives it to a free request. Does not sync.
        """
        width = target_logits.shape[1]
        sampling = _sampling(expanded_sampling_inputs, width, target_logits.device)
        lengths = torch.full_like(draft_token_ids[:, 0], width - 1)
        draft = Draft(draft_token_ids, lengths, draft_probs)
        rows = VerifyRows(
            sampling, NoiseKeys(sampling.seeds, _positions(expanded_sampling_inputs, width))
        )
        accepted = _accept(target_logits, draft, rows)
        drawn = accepted.token_ids.gather(1, accepted.num_accepted.unsqueeze(1)).clamp_min(0)
        output = accepted.token_ids.scatter(1, accepted.num_accepted.unsqueeze(1), drawn)
        return _Sampled(output, width - 1 - accepted.num_accepted, drawn.squeeze(1))


def _sampling(expanded: Any, width: int, device: torch.device) -> Sampling:
    """One row a request of LMDeploy's ``SamplingInputs``, which hold ``width`` rows of each.

    The temperature has been applied: it is 1, or 0 for a request with ``top_k`` 1, which means
    greedy in LMDeploy.
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
    # LMDeploy's min-p comes after its top-p, which then normalizes another mass.
    probs = warp(logits, replace(sampling, any_min_p=False))
    least = sampling.min_p.view(-1, 1, 1) * probs.amax(-1, keepdim=True)
    kept = probs.masked_fill(probs < least, 0.0)
    probs = kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
    noise = draw_noise(rows, draft.token_ids.shape[1], logits.shape[-1])
    return VERIFIERS[rows.verifier](probs, draft, noise)
