"""Our proposers that need no draft model, as methods of LMDeploy's speculative decoding.

``guided_spec_ngram``, ``guided_spec_grammar_forced`` and ``guided_spec_chain``, which is
``chain:grammar_forced+ngram``. LMDeploy takes every method to have a draft model with a KV cache,
so three of its methods are told otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.integrations.lmdeploy_drafting import Drafting

__all__ = [
    "METHODS",
    "register_proposers",
    "unregister_proposers",
    "with_no_draft_cache",
    "with_no_draft_config",
    "with_no_draft_graph",
]

METHODS = {
    "guided_spec_chain": "chain:grammar_forced+ngram",
    "guided_spec_grammar_forced": "grammar_forced",
    "guided_spec_ngram": "ngram",
}

_BASE = "lmdeploy.pytorch.spec_decode.proposers.base"


def register_proposers() -> None:
    """Add ``METHODS`` to LMDeploy's registry."""
    registry = importlib.import_module(_BASE).SPEC_PROPOSERS
    for method in METHODS:
        registry.register_module(name=method, module=_proposer_class())


def unregister_proposers() -> None:
    """Take them out again."""
    registry = importlib.import_module(_BASE).SPEC_PROPOSERS
    for method in METHODS:
        registry.module_dict.pop(method, None)


def with_no_draft_config(from_hf_config: Any) -> Any:
    """``ModelConfig.from_hf_config``: with one of ``METHODS`` any target can be verified."""
    original = from_hf_config.__func__

    def new_from_hf_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("spec_method") not in METHODS:
            return original(cls, *args, **kwargs)
        plain = {**kwargs, "spec_method": None, "is_draft_model": False}
        config = original(cls, *args, **plain)
        config.model_paradigm = "ar_spec"
        return config

    return classmethod(new_from_hf_config)


def with_no_draft_cache(from_config: Any) -> Any:
    """``SpecDecodeConfig.from_config``: a method without a model has no KV cache to reserve."""
    original = from_config.__func__

    def new_from_config(cls: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        config = original(cls, method, *args, **kwargs)
        if method in METHODS:
            config.cache_config = None
        return config

    return classmethod(new_from_config)


def with_no_draft_graph(build: Callable[..., None]) -> Callable[..., None]:
    """``SpecModelAgent.build_graph_runner``: nothing to capture without a model."""

    def new_build(agent: Any) -> None:
        if agent.method not in METHODS:
            build(agent)

    return new_build


class _NoModel:
    """What LMDeploy asks of a draft model although there is none."""

    def get_model(self) -> None:
        return None

    def get_capture_batch_sizes(self) -> list[int]:
        return []


@cache
def _proposer_class() -> Any:
    """The class that LMDeploy builds, a subclass of its own: made when LMDeploy is there."""
    base = importlib.import_module(_BASE)

    class ModelFreeProposer(base.BaseSpecProposer):  # type: ignore[misc, name-defined]
        """Drafts without a model, all K tokens at once."""

        proposal_method = base.ProposalMethod.DIFFUSION

        def __init__(self, specdecode_config: Any, device: Any = None) -> None:
            super().__init__(specdecode_config, device)
            self.model = _NoModel()
            self.drafting: Drafting | None = None

        def build_model(
            self, empty_init: Any, target_model: Any = None, build_model_ctx: Any = None
        ) -> None:
            """Nothing to build."""
            del empty_init, build_model_ctx
            self.target_model = target_model

        def get_warmup_plan(self, *args: Any, **kwargs: Any) -> Any:
            """Nothing to warm up."""
            del args, kwargs
            return base.ProposalWarmupPlan(cases=())

        async def propose(
            self,
            model_inputs: Any,
            extra_inputs: Any,
            sampling_inputs: Any,
            proposal_ctx: Any = None,
        ) -> Any:
            """K tokens a request behind what it has just got; one download."""
            del proposal_ctx
            return _propose(self, model_inputs, extra_inputs, sampling_inputs)

    return ModelFreeProposer


def _propose(proposer: Any, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any) -> Any:
    num_draft = proposer.num_speculative_tokens
    helper, method = proposer.guided_helper, proposer.specdecode_config.method
    if model_inputs.is_dummy:
        rows = len(model_inputs.seq_length)
        drafts: Tensor = model_inputs.input_ids.new_zeros(rows, num_draft)
    else:
        if proposer.drafting is None:
            if helper.manager is None:
                raise ModelError(f"{method} needs the tokens of the model; use another method")
            proposer.drafting = Drafting(METHODS[method], helper.manager, num_draft)
        drafts = proposer.drafting.propose(model_inputs, extra_inputs, sampling_inputs, helper)
    return type(extra_inputs)(
        output_draft_token_ids=drafts,
        next_token_ids=extra_inputs.next_token_ids,
        num_rejected_tokens=extra_inputs.num_rejected_tokens,
        output_token_ids=extra_inputs.output_token_ids,
        logprobs=extra_inputs.logprobs,
    )
