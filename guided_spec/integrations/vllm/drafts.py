"""vLLM's own drafters, EAGLE-3, EAGLE, MTP and draft models, under the grammars of their requests.

vLLM drafts without a grammar, and cuts what its grammar then refuses. Here the drafter's tokens are
legal from the start, by masks on its logits: see ``drafting``. The functions are wrapped where vLLM
makes its workers: no other process needs them.

In the older model runner the draft loop is Python. Only the drafter's forward is captured in CUDA
graphs there, piece by piece, and what is drawn from its logits is not. So the graphs stay as they
are, and the masks of a position are made while its forward runs.

In the new model runner the draft loop is made of CUDA graphs, with the sampling in them. It finds
its masks at one address, where the host writes them between two replays; so there has to be a graph
for each position. vLLM 0.33.0 may also capture all those behind the first in one graph: here it
goes by its other way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from guided_spec.integrations.vllm.drafting import FEATURE, Drafting, drafting_of, is_covered
from guided_spec.integrations.vllm.plugin import (
    VARIABLE,
    VERSIONS,
    Patch,
    Wrapper,
    around_drafting,
    install,
)
from guided_spec.integrations.vllm.requests import GrammarRequests

__all__ = [
    "PATCHES",
    "V1_PATCHES",
    "V2_PATCHES",
    "WORKER_PATCHES",
    "draft_legal",
    "guide_proposer",
    "guide_speculator",
    "in_workers",
    "note_requests",
    "note_sampled_v1",
    "note_sampled_v2",
    "propose_legal",
    "split_graphs",
]


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


def note_sampled_v1(original: Callable[..., Any]) -> Callable[..., Any]:
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


V1_PATCHES = (
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
        note_sampled_v1,
    ),
    around_drafting(draft_legal),
)


def guide_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a speculator's ``load_model``: it is looked at from then on."""

    @functools.wraps(original)
    def load_model(self: Any, target_model: Any) -> Any:
        result = original(self, target_model)
        if is_covered(self):
            Drafting(
                self,
                self.num_speculative_steps,
                lambda before, count: self.draft_tokens[:count, before],
            )
        return result

    return load_model


def split_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a speculator's ``init_cudagraph_manager``: a graph for each position.

    That is vLLM's own way where an attention backend needs it.
    """

    @functools.wraps(original)
    def init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> Any:
        drafting = drafting_of(self)
        if drafting is None:
            return original(self, cudagraph_mode)
        is_full = cudagraph_mode.decode_mode().name == "FULL" and self.num_speculative_steps > 1
        if is_full and getattr(self, "supports_decode_metadata_update", False):
            self.supports_decode_metadata_update = False
        result = original(self, cudagraph_mode)
        _follow_graphs(self, drafting)
        return result

    return init_cudagraph_manager


def propose_legal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a speculator's ``propose``: one step."""

    @functools.wraps(original)
    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafting = drafting_of(self)
        if drafting is None:
            return original(self, input_batch, *args, **kwargs)
        num_draft = kwargs.get("num_speculative_tokens")
        num_draft = drafting.num_draft if num_draft is None else num_draft
        with drafting.step(input_batch.req_ids, num_draft):
            return original(self, input_batch, *args, **kwargs)

    return propose


def note_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``add_requests``: who asked for which grammar."""

    @functools.wraps(original)
    def add_requests(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        drafting = drafting_of(self.speculator)
        if drafting is not None:
            states = self.req_states
            drafting.requests.keep(states.req_id_to_index)
            for new in scheduler_output.scheduled_new_reqs:
                prompt_len = int(states.prompt_len.np[states.req_id_to_index[new.req_id]])
                output = new.prefill_token_ids[prompt_len:]
                drafting.requests.add(new.req_id, new.sampling_params, output)
        return result

    return add_requests


def note_sampled_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``sample``: the tokens that the target committed."""

    @functools.wraps(original)
    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        result = original(self, hidden_states, input_batch, grammar_output)
        drafting = drafting_of(self.speculator)
        if drafting is not None:
            token_ids, num_tokens = result[0].sampled_token_ids, result[1]
            drafting.requests.note(input_batch.req_ids, token_ids, num_tokens)
        return result

    return sample


def _follow_graphs(speculator: Any, drafting: Drafting) -> None:
    """The graphs of this speculator are captured with the policy in them, and give it its turns."""
    for manager in (speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager):
        manager.run_fullgraph = functools.partial(drafting.replay, manager.run_fullgraph)
    capture = speculator.capture

    @functools.wraps(capture)
    def captured(*args: Any, **kwargs: Any) -> Any:
        with drafting.capturing():
            return capture(*args, **kwargs)

    speculator.capture = captured


def _patch(where: str, parameters: str, wrap: Wrapper, *versions: str) -> Patch:
    module, _, path = where.partition(":")
    names = ("self", *parameters.split())
    return Patch(f"vllm.v1.{module}", path, dict.fromkeys(versions or VERSIONS, names), wrap)


_OLD, _NEW = VERSIONS
_SPECULATORS = "worker.gpu.spec_decode"
_OLD_LOOP = f"{_SPECULATORS}.autoregressive.speculator:AutoRegressiveSpeculator"
_NEW_LOOP = f"{_SPECULATORS}.target_dependent_ar.speculator:TargetDependentARSpeculator"
_INPUTS = (
    "input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled "
    "num_rejected last_sampled next_prefill_tokens temperature seeds"
)
_OPTIONS = "dummy_run skip_attn_for_dummy_run mm_inputs is_profile"

V2_PATCHES = (
    _patch(
        f"{_SPECULATORS}.speculator:DraftModelSpeculator.load_model",
        "target_model",
        guide_speculator,
    ),
    _patch(f"{_OLD_LOOP}.init_cudagraph_manager", "cudagraph_mode", split_graphs, _OLD),
    _patch(f"{_NEW_LOOP}.init_cudagraph_manager", "cudagraph_mode", split_graphs, _NEW),
    _patch(
        f"{_OLD_LOOP}.propose", f"{_INPUTS} num_tokens_across_dp {_OPTIONS}", propose_legal, _OLD
    ),
    _patch(
        f"{_NEW_LOOP}.propose",
        f"{_INPUTS} dp_sync_state {_OPTIONS} num_speculative_tokens",
        propose_legal,
        _NEW,
    ),
    _patch(
        "worker.gpu.model_runner:GPUModelRunner.add_requests", "scheduler_output", note_requests
    ),
    _patch(
        "worker.gpu.model_runner:GPUModelRunner.sample",
        "hidden_states input_batch grammar_output",
        note_sampled_v2,
    ),
)


WORKER_PATCHES = (*V1_PATCHES, *V2_PATCHES)


def in_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``WorkerWrapperBase.init_device``: the drafters' own patches come first."""

    @functools.wraps(original)
    def init_device(self: Any) -> Any:
        install(f"{VARIABLE}={FEATURE}", WORKER_PATCHES)
        return original(self)

    return init_device


PATCHES = (
    Patch(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.init_device",
        dict.fromkeys(VERSIONS, ("self",)),
        in_workers,
    ),
)
