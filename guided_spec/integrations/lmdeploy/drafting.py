"""Our proposers that need no draft model, as methods of LMDeploy's speculative decoding.

``guided_spec_ngram``, ``guided_spec_grammar_forced`` and ``guided_spec_chain``, which is
``chain:grammar_forced+ngram``. LMDeploy takes every method to have a draft model with a KV cache,
so three of its methods are told otherwise.

Drafts without a model for LMDeploy: each session's text, and a proposer that goes on from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, Proposer, ProposerContext
from guided_spec.errors import ModelError
from guided_spec.integrations.lmdeploy.manager import GuidedManager, Place
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers import build_proposer
from guided_spec.types import SamplingParams

__all__ = [
    "METHODS",
    "Drafting",
    "register_proposers",
    "unregister_proposers",
    "with_no_draft_cache",
    "with_no_draft_config",
    "with_no_draft_graph",
]

_CPU = torch.device("cpu")
_PAD = 0  # what stands behind a draft that is too short; verified like any other token


@dataclass(slots=True)
class _Text:
    """One session's tokens as far as they were seen, and the slot its proposer knows it by."""

    slot: int
    token_ids: list[int] = field(default_factory=list)


class Drafting:
    """One of our proposers over the sessions of an engine, a request at a time.

    proposer: its name, such as ``ngram``. num_draft: K. Raises ModelError where the manager could
    not read the tokenizer.
    """

    def __init__(self, proposer: str, manager: GuidedManager, num_draft: int) -> None:
        if manager.error is not None:
            raise ModelError(f"{proposer} needs the tokens of the model") from manager.error
        self.num_draft = num_draft
        self._manager = manager
        self._texts: dict[Any, _Text] = {}
        self._next_slot = 0
        self._rows = MaskRows(1, num_draft + 1, manager.vocab_size, _CPU)
        self._sampling = Sampling.stack([SamplingParams()], [0], _CPU)
        tokenizer = manager.tokenizer
        self._proposer: Proposer = build_proposer(
            proposer,
            ProposerContext(
                vocabulary=manager.vocabulary,
                encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
                tokenizer=tokenizer,
                target=None,
                config=EngineConfig(),
                num_slots=1,
                max_model_len=1,
                device=_CPU,
                dtype=torch.float32,
            ),
        )

    def propose(
        self, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any, helper: Any
    ) -> Tensor:
        """int64 [B, K] on LMDeploy's device, behind what each row has just got; one download."""
        shape = (len(model_inputs.seq_length), self.num_draft)
        empty: Tensor = model_inputs.input_ids.new_full(shape, _PAD)
        context = sampling_inputs.session_ctx
        self.release(sampling_inputs.session_to_cleanup or ())
        keys = [(row["session_id"], row["seq_id"]) for row in context]
        is_whole = not model_inputs.is_chunk or model_inputs.is_last_chunk
        self._read_step(keys, model_inputs, extra_inputs.output_token_ids if is_whole else None)
        if not is_whole:
            return empty
        places = helper.get_processors(context, sampling_inputs.response_formats)
        drafts = [self.draft(key, places.get(row)) for row, key in enumerate(keys)]
        return torch.tensor(drafts).to(empty)

    def read(self, key: Any, history: int | None, token_ids: Sequence[int]) -> None:
        """Append what a session got; ``history`` is where a prompt's tokens begin."""
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _Text(self._take_slot())
        if history is not None and history < len(text.token_ids):
            self._proposer.release([text.slot])  # what is kept of a slot is of a text that grows
            text.slot = self._take_slot()
            del text.token_ids[history:]
        # Where an earlier part was never seen, as with a cached prefix, the rest must do.
        text.token_ids += token_ids

    def draft(self, key: Any, place: Place | None) -> list[int]:
        """K tokens behind a session's text, padded."""
        constraint, lookahead = None, None
        if place is not None and not place.is_terminated() and not place.is_broken:
            constraint, lookahead = place.constraint, place.begin()
        if lookahead is None:
            lookahead = Lookahead.fork([None], self._rows, [self.num_draft])
        text = self._texts[key]
        self._proposer.begin(self._batch(text, constraint), lookahead).finish()
        drafted = [*lookahead.drafted[0]]
        refused = lookahead.refused[0]
        if refused is not None:
            # It has to stand in the draft: the verifier refuses it, and no row behind it is masked.
            drafted.append(refused)
        drafted += [_PAD] * (self.num_draft - len(drafted))
        if constraint is not None and place is not None:
            place.end_draft(drafted)
        return drafted

    def release(self, session_ids: Sequence[Any]) -> None:
        """Forget sessions that have ended."""
        ended = [key for key in self._texts if key[0] in session_ids]
        self._proposer.release([self._texts.pop(key).slot for key in ended])

    def _take_slot(self) -> int:
        self._next_slot += 1
        return self._next_slot - 1

    def _read_step(self, keys: Sequence[Any], inputs: Any, output: Tensor | None) -> None:
        """What each session got: its prompt, or a part of it, and what was sampled behind."""
        new = [[] for _ in keys] if output is None else output.view(len(keys), -1).tolist()
        sampled = [[token for token in tokens if token >= 0] for tokens in new]
        if inputs.is_decoding:
            for key, tokens in zip(keys, sampled, strict=True):
                self.read(key, None, tokens)
            return
        lengths, histories = inputs.seq_length.tolist(), inputs.history_lengths.tolist()
        prompts = inputs.input_ids.flatten().split(lengths)
        for key, history, prompt, tokens in zip(keys, histories, prompts, sampled, strict=True):
            self.read(key, history, [*prompt.tolist(), *tokens])

    def _batch(self, text: _Text, constraint: Constraint | None) -> DecodeBatch:
        return DecodeBatch(
            slots=(text.slot,),
            contexts=(text.token_ids,),
            prompt_lengths=(0,),
            constraints=(constraint,),
            limits=(self.num_draft,),
            sampling=self._sampling,
            mask_rows=self._rows,
            num_draft_tokens=self.num_draft,
            vocab_size=self._manager.vocab_size,
            device=_CPU,
        )


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
