"""What LMDeploy's own methods become, and our proposers among its drafting methods.

``with_...`` takes the method that it replaces and returns the new one; ``plugin`` installs them.
None of them copies what LMDeploy does; each adds to it before or after.

The proposers that need no draft model are ``guided_spec_ngram``, ``guided_spec_grammar_forced`` and
``guided_spec_chain``, which is ``chain:grammar_forced+ngram``. LMDeploy takes every method to have
a draft model with a KV cache, so three of its methods are replaced.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from guided_spec.errors import ConfigError, GuidedSpecError, ModelError
from guided_spec.integrations.host_drafter import HostDrafter, HostRequest, HostTexts
from guided_spec.integrations.lmdeploy.helper import GuidedHelper, RejectionSampler
from guided_spec.integrations.lmdeploy.manager import (
    TURN,
    GrammarProcessor,
    GuidedManager,
    compile_ahead,
)

METHODS = {
    "guided_spec_chain": "chain:grammar_forced+ngram",
    "guided_spec_grammar_forced": "grammar_forced",
    "guided_spec_ngram": "ngram",
}

_Method = Callable[..., Any]
_AsyncMethod = Callable[..., Coroutine[Any, Any, Any]]

_turns = itertools.count()

_FIX = "install() reaches its own process alone; {}, or leave install() out"
_BASE = "lmdeploy.pytorch.spec_decode.proposers.base"
_PAD = 0  # pads a draft that is too short; verified like any other token


def with_own_engine(from_pretrained: Any) -> Any:
    """``Engine.from_pretrained``: refused where the engine would be another process.

    Raises ConfigError.
    """
    original = from_pretrained.__func__

    def new_from_pretrained(
        cls: Any, model_path: str, engine_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if engine_config is not None and engine_config.enable_mp_engine:
            fix = _FIX.format("leave it out, and do not use api_server")
            raise ConfigError("enable_mp_engine", value=True, fix=fix)
        return original(cls, model_path, engine_config, *args, **kwargs)

    return classmethod(new_from_pretrained)


def with_own_workers(build: _Method) -> _Method:
    """``build_executor``: refused where the model would run in other processes.

    Raises ConfigError.
    """
    executors = importlib.import_module("lmdeploy.pytorch.engine.executor")

    def new_build(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(build).bind(*args, **kwargs)
        bound.apply_defaults()
        asked, dist = bound.arguments, bound.arguments["dist_config"]
        backend = asked["distributed_executor_backend"]
        if backend is None:
            device = asked["device_type"]
            backend = executors.get_distributed_executor_backend(dist.world_size, dist.dp, device)
        if backend != "uni":
            fix = _FIX.format("make the pipeline with tp=1 and dp=1")
            raise ConfigError("distributed_executor_backend", backend, fix)
        return build(*args, **kwargs)

    return new_build


def with_guided_helper(init: _Method) -> _Method:
    """``SpecModelAgent.__init__``: the agent gets our helper and our sampler."""

    def new_init(agent: Any, *args: Any, **kwargs: Any) -> None:
        init(agent, *args, **kwargs)
        manager = agent.guided_helper.manager
        if manager is not None:
            manager.num_draft = agent.num_spec_tokens
        agent.guided_helper = GuidedHelper(manager)
        agent.proposer.guided_helper = agent.guided_helper
        agent.rejection_sampler = RejectionSampler()

    return new_init


def with_positions(sample: _AsyncMethod) -> _AsyncMethod:
    """``SpecModelAgent._rejection_sampling``: noise by position, grammars compiled beforehand.

    LMDeploy adds one to ``random_offsets`` a step, however many tokens the step yields: a number
    would serve for several positions.
    """

    async def new_sample(
        agent: Any, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any
    ) -> Any:
        if not model_inputs.is_dummy:
            manager = agent.guided_helper.manager
            if manager is not None:
                await manager.compiled(
                    sampling_inputs.session_ctx, sampling_inputs.response_formats
                )
            sampling_inputs = replace(sampling_inputs, random_offsets=_next_positions(model_inputs))
        return await sample(agent, model_inputs, extra_inputs, sampling_inputs)

    return new_sample


def _next_positions(model_inputs: Any) -> Tensor:
    """int64 [B]: the position in its text of the first token that each row is about to get."""
    history: Tensor = model_inputs.history_lengths
    # A decode forward begins with the last committed token, and then has drafts.
    new = 1 if model_inputs.is_decoding else model_inputs.seq_length
    return (history + new).long()


async def guided_logits(
    agent: Any,
    target_logits: Tensor,
    expanded_sampling_inputs: Any,
    guided_helper: GuidedHelper,
    *rows: Any,
    draft_token_ids: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """``SpecModelAgent._guided_spec_logits_process``: the mask first, as without speculation.

    target_logits: [B * (K + 1), V], changed in-place. rows: the guided positions, B and K + 1.

    Returns the processed logits, and the raw log-probabilities or logits if they are asked for:
    they know nothing of the mask.
    """
    logits_process = importlib.import_module("lmdeploy.pytorch.engine.logits_process")
    guided_processors, batch_size, num_expand = rows
    raw = None
    if expanded_sampling_inputs.max_num_logprobs >= 0:
        mode = agent.misc_config.logprobs_mode
        if mode == "raw_logits":
            raw = target_logits.clone()
        elif mode == "raw_logprobs":
            raw = target_logits.log_softmax(-1)
    by_request = target_logits.view(batch_size, num_expand, -1)
    await guided_helper.apply_serial_bitmask(
        by_request, guided_processors, draft_token_ids, num_expand - 1
    )
    without_logprobs = replace(expanded_sampling_inputs, max_num_logprobs=-1)
    processor = logits_process.FusedLogitsProcessor(without_logprobs)
    scores, _ = await processor(target_logits)
    return scores, raw


def with_ended_rows(postprocess: _AsyncMethod) -> _AsyncMethod:
    """``BaseModelAgent._step_postprocess_with_output``: rows whose text is over stop there.

    That is where a grammar has failed, or has ended though ``ignore_eos`` keeps LMDeploy going.
    """

    async def new_postprocess(agent: Any, *args: Any, **kwargs: Any) -> Any:
        result = await postprocess(agent, *args, **kwargs)
        output = result[-1]
        stops = agent.guided_decoding_manager.take_stops() if agent.guided_decoding_manager else {}
        if output is not None and stops:
            _stop_rows(output, stops)
        return result

    return new_postprocess


def _stop_rows(output: Any, stops: dict[int, int]) -> None:
    rows = torch.tensor(list(stops), device=output.stopped.device)
    columns = torch.tensor(list(stops.values()), device=output.stop_pos.device)
    columns = columns.to(output.stop_pos.dtype)
    before = output.stop_pos[rows]
    has_stopped = output.stopped[rows]
    output.stop_pos[rows] = torch.where(has_stopped, torch.minimum(before, columns), columns)
    output.stopped[rows] = True


def with_guided_blocks(propose: _AsyncMethod) -> _AsyncMethod:
    """``DFlash.propose``: raises for guided requests; now it drafts them without a mask.

    The verification advances through the draft, and refuses what is illegal.
    """

    async def new_propose(
        proposer: Any, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any, **kwargs: Any
    ) -> Any:
        if sampling_inputs is not None:
            sampling_inputs = replace(sampling_inputs, response_formats=())
        return await propose(proposer, model_inputs, extra_inputs, sampling_inputs, **kwargs)

    return new_propose


def with_turns(make: _Method) -> _Method:
    """``ARSamplingStrategy.make_sampling_inputs``: says which turn of its session a row is.

    A turn is a message with its own sampling parameters; LMDeploy makes the object anew for each.
    """

    def new_make(strategy: Any, seqs: Sequence[Any]) -> Any:
        inputs = make(strategy, seqs)
        for context, seq in zip(inputs.session_ctx, seqs, strict=True):
            turn = getattr(seq.sampling_param, TURN, None)
            if turn is None:
                turn = next(_turns)
                setattr(seq.sampling_param, TURN, turn)
            context[TURN] = turn
        return inputs

    return new_make


def with_grammar_compiled(preprocess: _AsyncMethod) -> _AsyncMethod:
    """``AsyncEngine.preprocess``: a request's grammar compiles before the engine sees it.

    A grammar that cannot be enforced fails its request there, as an invalid one, before any token.
    """
    exceptions = importlib.import_module("lmdeploy.serve.core.exceptions")

    metrics = importlib.import_module("lmdeploy.metrics.metrics_processor").metrics_processor

    async def new_preprocess(engine: Any, *args: Any, **kwargs: Any) -> Any:
        request = await preprocess(engine, *args, **kwargs)
        try:
            await compile_ahead(request.gen_config.response_format)
        except GuidedSpecError as error:
            metrics.increase_total_requests()
            metrics.increase_failed_requests("error")
            engine.session_mgr.remove(request.session)
            reason = f"{type(error).__name__}: {error}"
            invalid = exceptions.ErrorCode.INVALID_REQUEST
            raise exceptions.RequestError(invalid, reason) from error
        return request

    return new_preprocess


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


def with_no_draft_graph(build: _Method) -> _Method:
    """``SpecModelAgent.build_graph_runner``: nothing to capture without a model."""

    def new_build(agent: Any) -> None:
        if agent.method not in METHODS:
            build(agent)

    return new_build


def register_proposers() -> None:
    """Add ``METHODS`` to LMDeploy's registry."""
    registry = importlib.import_module(_BASE).SPEC_PROPOSERS
    for method in METHODS:
        registry.register_module(name=method, module=_proposer_class())


def unregister_proposers() -> None:
    """Unregister the proposers of this package."""
    registry = importlib.import_module(_BASE).SPEC_PROPOSERS
    for method in METHODS:
        registry.module_dict.pop(method, None)


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
            """K tokens a request after its new tokens; one download."""
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


class _NoModel:
    """What LMDeploy asks of a draft model although there is none."""

    def get_model(self) -> None:
        return None

    def get_capture_batch_sizes(self) -> list[int]:
        return []


class Drafting:
    """One of our proposers over the sessions of an engine, a request at a time.

    proposer: its name, such as ``ngram``. num_draft: K. Raises ModelError where the manager could
    not read the tokenizer.
    """

    def __init__(self, proposer: str, manager: GuidedManager, num_draft: int) -> None:
        if manager.error is not None:
            raise ModelError(f"{proposer} needs the tokens of the model") from manager.error
        self.num_draft = num_draft
        tokens = manager.vocabulary, manager.tokenizer
        self._drafter = HostDrafter(*tokens, num_draft, num_requests=1, proposer=proposer)
        self._texts = HostTexts(self._drafter.release)

    def propose(
        self, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any, helper: Any
    ) -> Tensor:
        """int64 [B, K] on LMDeploy's device, drafted after each row's new tokens; one download."""
        shape = (len(model_inputs.seq_length), self.num_draft)
        empty: Tensor = model_inputs.input_ids.new_full(shape, _PAD)
        context = sampling_inputs.session_ctx
        self.release(sampling_inputs.session_to_cleanup or ())
        keys = [(row["session_id"], row["seq_id"]) for row in context]
        is_whole = not model_inputs.is_chunk or model_inputs.is_last_chunk
        self._read_step(keys, model_inputs, extra_inputs.output_token_ids if is_whole else None)
        if not is_whole:
            return empty
        processors = helper.get_processors(context, sampling_inputs.response_formats)
        drafts = [self.draft(key, processors.get(row)) for row, key in enumerate(keys)]
        return torch.tensor(drafts).to(empty)

    def read(self, key: Any, history: int | None, token_ids: Sequence[int]) -> None:
        """Append what a session got; ``history`` is where a prompt's tokens begin."""
        # Where an earlier part was never seen, as with a cached prefix, the rest must do.
        self._texts.write(key, history, token_ids)

    def draft(self, key: Any, processor: GrammarProcessor | None) -> list[int]:
        """K tokens after a session's text, padded."""
        text = self._texts[key]
        request = HostRequest(text.slot, text.token_ids, 0, self.num_draft, None)
        if processor is None or processor.is_terminated() or processor.is_broken:
            return self._padded(self._drafter.draft([request])[0])
        lookahead = processor.begin()
        request = request._replace(constraint=processor.constraint)
        self._drafter.extend(self._drafter.batch([request]), lookahead)
        refused = lookahead.refused[0]
        # It has to be in the draft: the verifier refuses it, and no row after it is masked.
        drafted = [*lookahead.drafted[0], *([] if refused is None else [refused])]
        processor.end_draft(self._padded(drafted))
        return self._padded(drafted)

    def release(self, session_ids: Sequence[Any]) -> None:
        """Forget sessions that have ended."""
        self._texts.forget([key for key in self._texts if key[0] in session_ids])

    def _padded(self, drafted: list[int]) -> list[int]:
        return drafted + [_PAD] * (self.num_draft - len(drafted))

    def _read_step(self, keys: Sequence[Any], inputs: Any, output: Tensor | None) -> None:
        """Read each session's new tokens: its prompt or a part of it, and the sampled ones."""
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
