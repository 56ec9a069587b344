"""Drafts under grammars in vLLM's older model runner, whose draft loop is Python.

Only the drafter's forward is captured in CUDA graphs there, piece by piece, and what is drawn from
its logits is not. So the graphs stay as they are with either policy, and the masks of a position
are made while its forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from guided_spec.integrations.vllm_drafting import Drafting, asked_policy, drafting_of, is_covered
from guided_spec.integrations.vllm_patches import VERSIONS, Patch, around_drafting
from guided_spec.integrations.vllm_requests import GrammarRequests

__all__ = ["PATCHES", "draft_legal", "guide_proposer"]


def guide_proposer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a proposer's ``load_model``: it is looked at from then on."""

    @functools.wraps(original)
    def load_model(self: Any, target_model: Any) -> Any:
        result = original(self, target_model)
        if is_covered(self):
            # The token that was drafted last is what the drafter reads next.
            positions = self.arange[: self.num_speculative_tokens].long()
            drafting = Drafting(
                self,
                self.num_speculative_tokens,
                lambda before, count: self.input_ids[:count],  # noqa: ARG005
                lambda before: positions[before],
            )
            policy = asked_policy(is_sampled=self._enable_probabilistic_draft_probs)
            drafting.use(policy or "mask", "its loop is on the host")
        return result

    return load_model


def draft_legal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``propose_draft_token_ids``: one step, and who asked for what."""

    @functools.wraps(original)
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafting = drafting_of(self.drafter)
        if drafting is None:
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        names = self.input_batch.req_ids
        _note_states(self, drafting.requests, sampled_token_ids)
        num_draft = scheduler_output.num_spec_tokens_to_schedule
        sampled = functools.partial(_new_tokens, self, sampled_token_ids)
        with drafting.step(names, sampled, num_draft) as finish:
            draft = original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
            finish(draft)
        return draft

    return propose_draft_token_ids


def _note_states(runner: Any, requests: GrammarRequests, sampled_token_ids: Any) -> None:
    requests.keep(runner.requests)
    for at, name in enumerate(runner.input_batch.req_ids):
        state = runner.requests[name]
        if not requests.knows(name, state.sampling_params):
            # Tokens that come as lists are among the request's already, others are not.
            new = len(sampled_token_ids[at]) if isinstance(sampled_token_ids, list) else 0
            output = state.output_token_ids
            requests.add(name, state.sampling_params, output[: len(output) - new])


def _new_tokens(runner: Any, sampled_token_ids: Any) -> list[list[int]]:
    """[B] lists of what the runner just sampled; empty where it throws that away."""
    is_list = isinstance(sampled_token_ids, list)
    rows = sampled_token_ids if is_list else sampled_token_ids.tolist()
    dropped = runner.discard_request_mask.np[: len(rows)].tolist()
    size = runner.input_batch.vocab_size
    return [
        [] if gone else [token for token in row if 0 <= token < size]
        for row, gone in zip(rows, dropped, strict=True)
    ]


PATCHES = (
    Patch(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.load_model",
        dict.fromkeys(VERSIONS, ("self", "target_model")),
        guide_proposer,
    ),
    around_drafting(draft_legal),
)
