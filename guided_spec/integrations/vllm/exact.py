"""Sampled drafts in vLLM that the grammar refuses: verified as they were drawn, so nothing is bent.

A drafter that samples draws token x from q. Where the grammar refuses x, the target's probability
of it is 0: the rejection sampler refuses it and draws from the residual max(p - q, 0). vLLM takes
such a token out of the draft before it is verified, and then draws from p itself. What was drawn
then decides how the next token is drawn, and legal tokens that the drafter likes come out too
often: with p = (.5, .5) over two legal tokens and q = (.5, 0) over these and .5 on an illegal one,
the first legal token has probability .75 instead of .5.

Here the first refused token stays where it is. Those after it are never reached. Greedy drafts are
not drawn, so they are not affected.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from guided_spec.integrations.patches import OneOf, Patch
from guided_spec.integrations.vllm.plugin import acceptable_drafts, count

_PADDING = -1  # vLLM's placeholder for a draft token that is not there

# scheduler -> request id -> how many draft tokens come before the refused one
_refused: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def keep_refused_draft(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``grammar_invalid_drafts``: the first refused draft token keeps its id.

    The token's row of logits is constrained, so that the verifier refuses it by itself. Without
    counts every token is dropped, whatever it is; that is exact already.
    """

    @functools.wraps(original)
    def grammar_invalid_drafts(
        input_batch: Any, grammar_req_ids: list[str], num_acceptable_drafts: list[int] | None
    ) -> Any:
        if num_acceptable_drafts is not None:
            num_acceptable_drafts = [count + 1 for count in num_acceptable_drafts]
        return original(input_batch, grammar_req_ids, num_acceptable_drafts)

    return grammar_invalid_drafts


def keep_refused_in_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``Scheduler.update_draft_token_ids``: a draft is cut after its first refused token.

    Without asynchronous scheduling vLLM cuts it before that token, and draws from p there.
    """

    @functools.wraps(original)
    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> Any:
        pairs = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=False)
        drafts = {req_id: list(token_ids) for req_id, token_ids in pairs}
        result = original(self, draft_token_ids)
        if _samples(self):
            known = _refused.get(self, {})
            refused = {req_id: count for req_id, count in known.items() if req_id in self.requests}
            for req_id, token_ids in drafts.items():
                refused.pop(req_id, None)
                request = self.requests.get(req_id)
                if request is not None and _is_cut(request, token_ids):
                    refused[req_id] = len(request.spec_token_ids)
                    request.spec_token_ids = token_ids[: refused[req_id] + 1]
            _refused[self] = refused
        return result

    return update_draft_token_ids


def mark_refused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``Scheduler.get_grammar_bitmask``: the grammar is not led past such a token.

    Drafts that hold one are counted.
    """

    @functools.wraps(original)
    def get_grammar_bitmask(self: Any, scheduler_output: Any) -> Any:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        hidden = {
            req_id: [*token_ids[:count], *[_PADDING] * (len(token_ids) - count)]
            for req_id, count in _refused.get(self, {}).items()
            if len(token_ids := scheduled.get(req_id, ())) > count
        }
        if hidden:
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.scheduled_spec_decode_tokens = {**scheduled, **hidden}
        result = original(self, scheduler_output)
        if _samples(self):
            kept = {*hidden}
            counts = acceptable_drafts(result)
            if counts is not None:
                pairs = zip(result.structured_output_request_ids, counts, strict=True)
                kept |= {name for name, most in pairs if most < len(scheduled.get(name, ()))}
            count("exact", len(kept))
        return result

    return get_grammar_bitmask


def _samples(scheduler: Any) -> bool:
    config = scheduler.vllm_config.speculative_config  # None for diffusion models
    return config is not None and config.draft_sample_method == "probabilistic"


def _is_cut(request: Any, token_ids: Sequence[int]) -> bool:
    """Whether the grammar cut the draft ``token_ids`` of this request."""
    if not request.use_structured_output or request.is_finished() or request.is_prefill_chunk:
        return False
    kept = request.spec_token_ids
    cut = len(kept) < len(token_ids) and list(kept) == list(token_ids[: len(kept)])
    return cut and token_ids[len(kept)] >= 0


_SCHEDULER = "vllm.v1.core.sched.scheduler"
_WORKER = "vllm.v1.worker.gpu"

PATCHES = (
    Patch(_SCHEDULER, "Scheduler.update_draft_token_ids", "self draft_token_ids",
          keep_refused_in_step),
    Patch(_SCHEDULER, "Scheduler.get_grammar_bitmask", "self scheduler_output", mark_refused),
    Patch("vllm.v1.request", "Request",
          attributes="spec_token_ids use_structured_output is_finished is_prefill_chunk"),
    OneOf((
        (
            Patch(
                f"{_WORKER}.structured_outputs",
                "grammar_invalid_drafts",
                "input_batch grammar_req_ids num_acceptable_drafts",
                keep_refused_draft,
                importers=(f"{_WORKER}.model_runner",),
            ),
        ),
        # A release that drops no token there.
        (
            Patch(
                f"{_WORKER}.spec_decode.rejection_sampler",
                "RejectionSampler.__call__",
                "self logits input_batch draft_logits",
            ),
        ),
    )),
)  # fmt: skip
PARTS = {"": PATCHES}
