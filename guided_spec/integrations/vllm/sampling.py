"""Sampling settings of ``LLM(engine="vllm")`` as vLLM's own; what it cannot honour is refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from guided_spec.engine.request import Job
from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.endings import ARGUMENT
from guided_spec.integrations.vllm.grammars import GrammarText
from guided_spec.types import SamplingParams, TokenLogprobs, TopLogprob

LEAST_TEMPERATURE = 0.01  # vLLM raises what is lower, and not 0, to it
MOST_TOKENS = 1024  # of a bias, of those that are allowed, and of all bad words
MOST_WORDS = 128
MOST_STOPS = 128
PROCESSED = "processed_logprobs"


class SamplingFacts(NamedTuple):
    """What of an engine decides which settings it honours.

    drafts: whether it speculates. masks: whether drafts are kept to the grammar.
    logprobs_mode: vLLM's. num_ends: tokens of the vocabulary that end a text.
    """

    drafts: bool
    masks: bool
    logprobs_mode: str
    num_ends: int


def require_honoured(job: Job, facts: SamplingFacts) -> None:
    """Raise ConfigError for the first setting of a job that vLLM would not honour."""
    for name, value, fix in _refusals(job, facts):
        raise ConfigError(name, value, f"under engine='vllm' {fix}")


def _refusals(job: Job, facts: SamplingFacts) -> Iterator[tuple[str, object, str]]:
    """The argument, its value, and what is wrong with it."""
    params = job.params
    if job.scoring is not None:
        yield "choices", "of choose", "choices are not scored: use engine='guided_spec'"
    if job.traced is not None:
        yield "trace", True, "steps are not recorded: leave it out"
    if 0 < params.temperature < LEAST_TEMPERATURE:
        fix = f"it would be raised: pass 0, or {LEAST_TEMPERATURE} at least"
        yield "temperature", params.temperature, fix
    if params.complete:
        yield "complete", True, "a text that cannot be ended is cut off: leave it out"
    if params.on_short == "error":
        yield "on_short", "error", "nobody hears that a text was shortened: leave it out"
    if params.lora is not None:
        yield "lora", params.lora, "adapters are vLLM's own: use engine='guided_spec'"
    if params.return_routed_experts:
        yield "return_routed_experts", True, "experts are not recorded: leave it out"
    start = None if params.grammar is None else params.grammar.start
    if start is not None and start.reasoning_budget is not None:
        fix = "reasoning has no budget of its own: leave it out"
        yield "reasoning_budget", start.reasoning_budget, fix
    yield from _about_drafts(params, facts)
    yield from _about_tokens(job, facts)
    yield from _about_logprobs(params, facts)


def _about_drafts(
    params: SamplingParams, facts: SamplingFacts
) -> Iterator[tuple[str, object, str]]:
    for name in ("min_p", "logit_bias"):
        if facts.drafts and getattr(params, name):
            yield name, getattr(params, name), "nothing is drafted with it: pass proposer='none'"
    if params.draft_policy == "validate" or (params.draft_policy == "mask" and not facts.masks):
        fix = "the proposer decides how it keeps to the grammar: leave it out"
        yield "draft_policy", params.draft_policy, fix


def _about_tokens(job: Job, facts: SamplingFacts) -> Iterator[tuple[str, object, str]]:
    params, words = job.params, job.bad_words
    lists = {"logit_bias": params.logit_bias, "allowed_token_ids": params.allowed_token_ids or ()}
    for name, listed in lists.items():
        if len(listed) > MOST_TOKENS:
            yield name, f"{len(listed)} tokens", f"{MOST_TOKENS} is the most"
    if len(words) > MOST_WORDS or sum(map(len, words)) > MOST_TOKENS:
        fix = f"{MOST_WORDS} words of {MOST_TOKENS} tokens in all are the most"
        yield "bad_words", f"{len(words)} words in tokens", fix
    if params.min_tokens and len(params.stop_token_ids) > MOST_STOPS - facts.num_ends:
        fix = f"with min_tokens {MOST_STOPS - facts.num_ends} is the most"
        yield "stop_token_ids", f"{len(params.stop_token_ids)} tokens", fix
    tail = tuple(job.prompt_ids[-max((len(word) for word in words), default=1) :])
    for word in words:
        lengths = range(1, min(len(word), len(tail) + 1))
        if any(tail[-length:] == word[:length] for length in lengths):
            fix = (
                "the prompt ends with its first tokens, and vLLM sees the text alone: leave it out"
            )
            yield "bad_words", word, fix


def _about_logprobs(
    params: SamplingParams, facts: SamplingFacts
) -> Iterator[tuple[str, object, str]]:
    if params.logprobs is None:
        return
    if facts.logprobs_mode == PROCESSED:
        modes: Sequence[str] = ("processed",)
    elif params.grammar is not None:
        modes = ("masked",)  # the mask is applied before vLLM looks
    else:
        modes = ("raw", "masked")
    if params.logprobs_mode not in modes:
        fix = f"pass {modes[0]!r}: vLLM's own logprobs_mode is {facts.logprobs_mode!r}"
        reason = " and a grammar's mask comes first" if params.grammar is not None else ""
        yield "logprobs_mode", params.logprobs_mode, fix + reason


def to_vllm(job: Job, text: GrammarText | None, vocabulary: Vocabulary, *, in_parts: bool) -> Any:
    """vLLM's SamplingParams of one sample.

    text: of its grammar, None for free text. in_parts: whether vLLM reports tokens as they come.

    Raises ConfigError for what vLLM's own check refuses.
    """
    names: Any = importlib.import_module("vllm.sampling_params")
    params, kinds = job.params, names.RequestOutputKind
    ignores_end = params.ignore_eos and text is None  # a grammar ends where it ends
    stops = {*params.stop_token_ids, *(() if ignores_end else vocabulary.stop_token_ids)}
    try:
        made = names.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=None if params.seed is None else job.seed,
            stop_token_ids=sorted(stops),
            ignore_eos=ignores_end,
            logit_bias=dict(params.logit_bias) or None,
            allowed_token_ids=params.allowed_token_ids and [*params.allowed_token_ids],
            min_tokens=params.min_tokens,
            extra_args={ARGUMENT: False} if params.complete is False else None,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logprobs=params.logprobs,
            detokenize=False,  # texts are read here
            output_kind=kinds.DELTA if in_parts else kinds.FINAL_ONLY,
            structured_outputs=text and names.StructuredOutputsParams(**{text.kind: text.source}),
        )
    except Exception as error:  # a class of its own in newer releases, ValueError before
        raise ConfigError("params", params, f"vLLM refuses it: {error}") from error
    if job.bad_words:  # spelled here; vLLM spells words differently, and takes no token ids
        made._bad_words_token_ids = [list(word) for word in job.bad_words]
    return made


def read_logprobs(
    token_ids: Sequence[int], rows: Sequence[Mapping[int, Any]] | None, most: int | None
) -> list[TokenLogprobs]:
    """What vLLM says of each token. most: likeliest tokens that were asked for; None asked not."""
    if most is None or rows is None:
        return []
    found = []
    for token_id, row in zip(token_ids, rows, strict=True):
        likeliest = [
            TopLogprob(token, one.logprob)
            for token, one in row.items()
            if one.rank is not None and one.rank <= most and one.logprob > float("-inf")
        ]
        likeliest.sort(key=lambda one: (-one.logprob, one.token_id))
        found.append(TokenLogprobs(token_id, row[token_id].logprob, tuple(likeliest[:most])))
    return found


PATCHES = (
    Patch(
        "vllm.sampling_params",
        "SamplingParams",
        attributes="max_tokens temperature top_k top_p min_p seed stop_token_ids ignore_eos"
        " logit_bias allowed_token_ids min_tokens repetition_penalty frequency_penalty"
        " presence_penalty logprobs detokenize output_kind structured_outputs"
        " _bad_words_token_ids bad_words_token_ids",
    ),
    Patch("vllm.sampling_params", "StructuredOutputsParams", attributes="grammar structural_tag"),
    Patch("vllm.sampling_params", "RequestOutputKind", attributes="DELTA FINAL_ONLY"),
    Patch("vllm.logprobs", "Logprob", attributes="logprob rank"),
)
