"""Drafts under grammars in vLLM's older model runner, whose draft loop is Python.

Only the drafter's forward is captured in CUDA graphs there, piece by piece, and what is drawn from
its logits is not. So the graphs stay as they are, and the masks of a position are made while its
forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from guided_spec.integrations.vllm.drafting import Drafting, drafting_of, is_covered
from guided_spec.integrations.vllm.plugin import VERSIONS, Patch, around_drafting
from guided_spec.integrations.vllm.requests import GrammarRequests

__all__ = ["PATCHES", "draft_legal", "guide_proposer", "note_sampled"]


def guide_proposer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a proposer's ``load_model``: it is looked at from then on."""

    @functools.wraps(original)
    def load_model(self: Any, target_model: Any) -> Any:
        result = original(self, target_model)
        if is_covered(self):
            # The token that was drafted last is what the drafter reads next.
            Drafting(
                self,
                self.num_speculative_tokens,
                lambda before, count: self.input_ids[:count],  # noqa: ARG005
            )
        return result

    return load_model


def note_sampled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``_sample``: who asked for what, and the tokens that they got.

    The runner calls it in every step, and a drafter only where the texts fit it.
    """

    @functools.wraps(original)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        result = original(self, logits, spec_decode_metadata)
        drafting = drafting_of(getattr(self, "drafter", None))
        if drafting is not None:
            names = self.input_batch.req_ids
            _note_states(self, names, drafting.requests)
            token_ids = result.sampled_token_ids
            is_dropped = self.discard_request_mask.gpu[: len(names)]
            counts = torch.where(is_dropped, 0, token_ids.shape[1])
            drafting.requests.note(names, token_ids[: len(names)], counts)
        return result

    return _sample


def draft_legal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``propose_draft_token_ids``: one step."""

    @functools.wraps(original)
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafting = drafting_of(self.drafter)
        if drafting is None:
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        num_draft = scheduler_output.num_spec_tokens_to_schedule
        with drafting.step(self.input_batch.req_ids, num_draft):
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)

    return propose_draft_token_ids


def _note_states(runner: Any, names: Sequence[str], requests: GrammarRequests) -> None:
    """The requests of a step whose tokens are not among their outputs yet."""
    requests.keep(runner.requests)
    for name in names:
        state = runner.requests[name]
        output = state.output_token_ids
        if not requests.knows(name, state.sampling_params):
            requests.add(name, state.sampling_params, output)
        elif not output or output[-1] >= 0:  # else vLLM itself does not know them yet
            requests.restate(name, output)


PATCHES = (
    Patch(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.load_model",
        dict.fromkeys(VERSIONS, ("self", "target_model")),
        guide_proposer,
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        dict.fromkeys(VERSIONS, ("self", "logits", "spec_decode_metadata")),
        note_sampled,
    ),
    around_drafting(draft_legal),
)
