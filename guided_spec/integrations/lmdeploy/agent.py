"""What LMDeploy's own methods become: each takes the method it replaces and returns the new one.

``plugin`` puts them in place. None of them copies what LMDeploy does; each adds to it before or
behind.

LMDeploy's rejection sampler, exact for every setting: the same filters on all K + 1 rows.

It takes LMDeploy's records and returns its tensors, so it stands where LMDeploy's own
``RejectionSampler`` stood. The logits have been masked and divided by the temperature before.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.integrations.lmdeploy.helper import GuidedHelper
from guided_spec.integrations.lmdeploy.manager import TURN, compile_ahead
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import VERIFIERS, draw_noise, verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows, warp
from guided_spec.types import Accepted, Draft

__all__ = [
    "RejectionSampler",
    "Sampled",
    "guided_logits",
    "next_positions",
    "request_sampling",
    "with_ended_rows",
    "with_grammar_compiled",
    "with_guided_blocks",
    "with_guided_helper",
    "with_own_engine",
    "with_own_workers",
    "with_positions",
    "with_turns",
]


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
