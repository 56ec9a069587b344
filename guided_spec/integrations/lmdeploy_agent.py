"""What LMDeploy's own methods become: each takes the method it replaces and returns the new one.

``guided_spec.integrations.lmdeploy`` puts them in place. None of them copies what LMDeploy does;
each adds to it before or behind.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.integrations.lmdeploy_helper import GuidedHelper
from guided_spec.integrations.lmdeploy_manager import TURN, compile_ahead
from guided_spec.integrations.lmdeploy_sampler import RejectionSampler

__all__ = [
    "guided_logits",
    "next_positions",
    "with_ended_rows",
    "with_grammar_compiled",
    "with_guided_blocks",
    "with_guided_helper",
    "with_own_engine",
    "with_own_workers",
    "with_positions",
    "with_turns",
]

Method = Callable[..., Any]
AsyncMethod = Callable[..., Coroutine[Any, Any, Any]]

_turns = itertools.count()

_FIX = "install() reaches its own process alone; {}, or leave install() out"


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


def with_own_workers(build: Method) -> Method:
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


def with_guided_helper(init: Method) -> Method:
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


def with_positions(sample: AsyncMethod) -> AsyncMethod:
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
            sampling_inputs = replace(sampling_inputs, random_offsets=next_positions(model_inputs))
        return await sample(agent, model_inputs, extra_inputs, sampling_inputs)

    return new_sample


def next_positions(model_inputs: Any) -> Tensor:
    """int64 [B]: the position in its text of the first token that each row is about to get."""
    history: Tensor = model_inputs.history_lengths
    # A decode forward begins with the last committed token, and drafts follow it.
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

    target_logits: [B * (K + 1), V], changed in place. rows: the guided places, B and K + 1.

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


def with_ended_rows(postprocess: AsyncMethod) -> AsyncMethod:
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


def with_guided_blocks(propose: AsyncMethod) -> AsyncMethod:
    """``DFlash.propose``: raises for guided requests; now it drafts them without a mask.

    The verification walks what it drafted, and refuses what is illegal.
    """

    async def new_propose(
        proposer: Any, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any, **kwargs: Any
    ) -> Any:
        if sampling_inputs is not None:
            sampling_inputs = replace(sampling_inputs, response_formats=())
        return await propose(proposer, model_inputs, extra_inputs, sampling_inputs, **kwargs)

    return new_propose


def with_turns(make: Method) -> Method:
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


def with_grammar_compiled(preprocess: AsyncMethod) -> AsyncMethod:
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
