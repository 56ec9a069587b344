"""transformers' own generate, run by this engine: grammars, drafts and batches, exactly.

    model.generate(
        **inputs, custom_generate=guided_spec.generate, tokenizer=tokenizer, grammar=grammar
    )

transformers prepares a call before it hands it over: it merges the settings, turns them into logits
processors and stopping criteria, and repeats the prompts for several samples. Tested with
transformers 5.17 to 5.24. A model has one engine, for as long as it lives.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.home import once_per_process
from guided_spec.integrations.transformers.params import Asked, Grammars, list_grammars
from guided_spec.models.tokenizer import end_of_text_ids
from guided_spec.models.transformers_version import CACHE_NAMES
from guided_spec.types import SamplingParams

PREPARED = ("attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache")
"""What transformers adds to a call itself, or what does not change the result."""

_DRAFTING = "the engine drafts by itself: pass proposer= and draft= instead"
_ALONE = "the engine samples one text a row; leave it out, or leave out custom_generate"
_REFUSED = {
    "num_beams": _ALONE,
    "num_beam_groups": _ALONE,
    "penalty_alpha": _ALONE,
    "dola_layers": _ALONE,
    "constraints": _ALONE,
    "force_words_ids": _ALONE,
    "token_healing": _ALONE,
    "prompt_lookup_num_tokens": _DRAFTING,
    "assistant_early_exit": _DRAFTING,
    "assistant_ensemble_weight": _DRAFTING,
    "use_mtp": _DRAFTING,
    "speculation_type": _DRAFTING,
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class LeftOut(NamedTuple):
    """Arguments of generate that transformers does not hand on to a callable (5.17 to 5.24).

    It takes them out of the call and then keeps only those of the callable's own names.
    """

    tokenizer: Any = None
    streamer: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    synced_gpus: bool | None = None


def find_left_out(model: Any, handed_on: Mapping[str, Any]) -> LeftOut:
    """Look for them in ``handed_on``, then in the frame of the call of ``model.generate``.

    That is where they are: the alternative is to let a streamer stay silent. Nothing is found, and
    nothing is wrong, where ``functools.partial`` holds them.
    """
    found = {name: handed_on[name] for name in LeftOut._fields if name in handed_on}
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None or frame.f_locals.get("self") is not model:
        return LeftOut(**found)
    # The tokenizers are keywords, and taken out of the frame's own dict of these. The decorator
    # around generate holds another.
    around = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
    scopes = (frame.f_locals, around if isinstance(around, dict) else {})
    for name in LeftOut._fields:
        values = (scope.get(name) for scope in scopes)
        found.setdefault(name, next((value for value in values if value is not None), None))
    return LeftOut(**found)


def check_call(model: Any, call: Mapping[str, Any], left_out: LeftOut, num_texts: int) -> None:
    """Refuse what the engine cannot do. Raises ConfigError.

    call: what transformers hands on, but for the prompts. num_texts: to be written.
    """
    config = call.get("generation_config")
    if config is None:
        fix = "call it through model.generate(..., custom_generate=guided_spec.generate)"
        raise ConfigError("generation_config", None, fix)
    if getattr(model.config, "is_encoder_decoder", False):
        kind = type(model).__name__
        raise ConfigError("model", kind, "the engine runs decoders only; use another model")
    if model.training:
        raise ConfigError("model", "in training mode", "call model.eval() first")
    for name in ("assistant_model", "assistant_tokenizer"):
        if getattr(left_out, name) is not None:
            raise ConfigError(name, type(getattr(left_out, name)).__name__, _DRAFTING)
    if left_out.synced_gpus:
        fix = "the engine takes as many steps as its texts need; leave it out"
        raise ConfigError("synced_gpus", left_out.synced_gpus, fix)
    if left_out.streamer is not None and num_texts > 1:
        fix = f"it takes one text, and {num_texts} are to be written; leave it out"
        raise ConfigError("streamer", type(left_out.streamer).__name__, fix)
    _check_settings(config)
    _check_inputs(call)


def _check_settings(config: Any) -> None:
    for name, fix in _REFUSED.items():
        value = getattr(config, name, None)
        is_neutral = value == 1 if name.startswith("num_beam") else not value
        if value is not None and not is_neutral:
            raise ConfigError(name, value, fix)
    for name in _OUTPUTS:
        value = getattr(config, name, None)
        if value and config.return_dict_in_generate:
            fix = "the engine keeps none; LLM reports log-probabilities"
            raise ConfigError(name, value, fix)


def _check_inputs(call: Mapping[str, Any]) -> None:
    own = {"generation_config", "logits_processor", "stopping_criteria", "synced_gpus"}
    for name, value in call.items():
        if name in own or name in PREPARED or name in LeftOut._fields or value is None:
            continue
        if name in CACHE_NAMES:
            if value.get_seq_length() > 0:
                fix = "the engine has a cache of its own; pass the whole text as input_ids"
                raise ConfigError(name, f"{value.get_seq_length()} tokens", fix)
            continue
        if name.endswith("token_type_ids") and not value.any():
            continue
        fix = "the engine feeds token ids only; leave it out"
        raise ConfigError(name, type(value).__name__, fix)


def read_prompts(input_ids: Tensor, call: Mapping[str, Any]) -> list[list[int]]:
    """The rows of ``input_ids`` int64 [R, T] without their padding, which must be on the left.

    Raises ConfigError for padding elsewhere, an empty row, and positions that do not count from 0.
    """
    mask = call.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        fix = f"must have the shape of input_ids, {list(input_ids.shape)}"
        raise ConfigError("attention_mask", list(mask.shape), fix)
    counts: list[int] = (mask != 0).sum(1).tolist()
    width = input_ids.shape[1]
    if 0 in counts:
        row = counts.index(0)
        raise ConfigError("input_ids", f"row {row}", "it is empty; pass at least one token")
    kept = torch.arange(width) >= width - torch.tensor(counts).unsqueeze(1)
    wrong = ((mask != 0).cpu() != kept).any(1).nonzero().flatten().tolist()
    if wrong:
        fix = "must be 0 on the left only: set tokenizer.padding_side = 'left'"
        raise ConfigError("attention_mask", f"row {wrong[0]}", fix)
    positions = call.get("position_ids")
    if positions is not None:
        _check_positions(positions.cpu(), kept)
    return [ids[width - n :] for ids, n in zip(input_ids.tolist(), counts, strict=True)]


def _check_positions(positions: Tensor, kept: Tensor) -> None:
    """positions: int64 [..., R, T]; kept: bool [R, T]."""
    counted = kept.long().cumsum(1) - 1
    if positions.shape[-2:] != kept.shape or ((positions != counted) & kept).any():
        fix = "the engine counts each prompt from 0; leave it out"
        raise ConfigError("position_ids", list(positions.shape), fix)


SMALLEST_CONTEXT = 1024
SMALLEST_BATCH = 4


class Wanted(NamedTuple):
    """The engine that a call asks for.

    tokenizer: None is the model's own. proposer, draft: as of ``LLM``.
    options: of ``LLM``; they come before what the next two say.
    num_tokens: of the longest text, with its prompt. num_texts: at a time.
    """

    tokenizer: Any
    proposer: str | None
    draft: Any
    options: Mapping[str, Any]
    num_tokens: int
    num_texts: int


@dataclass(slots=True)
class _KeptEngine:
    """What is kept for one model: its engine, and what that was made of."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    llm: LLM | None = None
    settings: tuple[Any, ...] = ()

    def clear(self) -> None:
        llm, self.llm, self.settings = self.llm, None, ()
        if llm is not None:
            llm.close()


@dataclass(slots=True)
class _Engines:
    """The engines of models, each kept as long as its model lives."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: weakref.WeakKeyDictionary[Any, _KeptEngine] = field(
        default_factory=weakref.WeakKeyDictionary
    )


@once_per_process
def _engines() -> _Engines:
    return _Engines()


@contextmanager
def using_engine(model: Any, wanted: Wanted) -> Iterator[LLM]:
    """The model's engine, for one caller at a time: that of the last call, or a new one.

    The weights are the model's own, and the model is not kept alive. Raises ConfigError where a
    text does not fit the context, or there is no tokenizer, and what ``LLM`` raises.
    """
    _check(model, wanted)
    engines = _engines()
    with engines.lock:
        kept = engines.kept.setdefault(model, _KeptEngine())
    with kept.lock:
        settings = _settings(model, wanted)
        if kept.llm is None or kept.settings != settings or not _fits(kept.llm, wanted):
            kept.clear()  # first, for its memory
            kept.llm, kept.settings = _build(model, wanted), settings
        yield kept.llm


def release(model: Any) -> None:
    """Free the engine that calls of ``model.generate`` have left for the next one, if there is any.

    The model's death frees it too, but where something in the model refers to all of it, as the
    hooks do with which accelerate spreads one over devices. Waits for a call that runs.
    """
    engines = _engines()
    with engines.lock:
        kept = engines.kept.get(model)
    if kept is not None:
        with kept.lock:
            kept.clear()


def _check(model: Any, wanted: Wanted) -> None:
    if wanted.tokenizer is None and not model.config.name_or_path:
        fix = "the engine needs the model's tokenizer: model.generate(..., tokenizer=tokenizer)"
        raise ConfigError("tokenizer", None, fix)
    limit = _limit(model, wanted)
    if limit is not None and wanted.num_tokens > limit:
        fix = f"prompt and new tokens may be {limit} together; lower max_new_tokens"
        raise ConfigError("max_new_tokens", f"{wanted.num_tokens} with the prompt", fix)


def _limit(model: Any, wanted: Wanted) -> int | None:
    text_config = model.config.get_text_config(decoder=True)
    own = getattr(text_config, "max_position_embeddings", None)
    limits = [n for n in (own, wanted.options.get("max_model_len")) if n is not None]
    return min(limits, default=None)


def _settings(model: Any, wanted: Wanted) -> tuple[Any, ...]:
    """What an engine depends on: of the call, and of the model as it is now."""
    call = (wanted.tokenizer, wanted.proposer, wanted.draft, dict(wanted.options))
    text_config = model.config.get_text_config(decoder=True)
    ends = end_of_text_ids(model, wanted.tokenizer)
    form = (model.device, model.dtype, text_config.vocab_size, model.config._attn_implementation)
    return (*call, ends, *form)


def _fits(llm: LLM, wanted: Wanted) -> bool:
    has_slots = "max_batch_size" in wanted.options
    has_slots = has_slots or llm.config.max_batch_size >= wanted.num_texts
    return has_slots and llm.max_model_len >= wanted.num_tokens


def _build(model: Any, wanted: Wanted) -> LLM:
    """On a second object around the same modules: an engine on ``model`` would keep it alive."""
    length = max(SMALLEST_CONTEXT, _power_of_two(wanted.num_tokens))
    options: dict[str, Any] = {
        "kernels": "stock",  # packing would move the weights
        "max_batch_size": max(SMALLEST_BATCH, _power_of_two(wanted.num_texts)),
        "max_model_len": min(length, _limit(model, wanted) or length),
        **wanted.options,
    }
    twin = copy.copy(model)
    return LLM(twin, wanted.proposer, draft=wanted.draft, tokenizer=wanted.tokenizer, **options)


def _power_of_two(number: int) -> int:
    """The smallest one that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def generate(  # noqa: PLR0913 - transformers hands on those keywords that are named here
    model: Any,
    input_ids: Tensor,
    *,
    grammar: Grammars | None = None,
    proposer: str | None = None,
    draft: Any = None,
    num_draft_tokens: int = 5,
    complete: bool | None = None,
    engine_options: Mapping[str, Any] | None = None,
    **call: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The callable for ``model.generate(**inputs, custom_generate=guided_spec.generate, ...)``.

    grammar: what the texts must match: one for all prompts, or a list with one for each, None for
        free text.
    proposer, draft, num_draft_tokens: who drafts, see ``LLM``.
    complete: see ``SamplingParams``: texts with a grammar end within ``max_new_tokens`` where that
        can be.
    engine_options: further settings of the engine, see ``EngineConfig``. Its ``kernels`` are
        "stock" by default: others move the model's weights.
    call: what transformers prepared. The settings of generate are applied: lengths, end and
        padding tokens, ``do_sample`` with temperature, top_k, top_p and min_p, repetition_penalty,
        biases and bans of tokens, num_return_sequences, streamer, return_dict_in_generate. With
        ``tokenizer=``, as of generate itself; None is the one of the model's folder.

    Returns int64 [R, T] as generate does: the prompts with their padding, the new tokens, padding
    on the right; or ``GenerateDecoderOnlyOutput`` with these ``sequences``.

    Sampling takes its seeds from torch's own generator of the CPU: after ``torch.manual_seed`` it
    repeats itself. The model is as it was. Its engine stays for the next call; see ``release``.

    Raises ConfigError for what the engine cannot do, naming it, and the error of the first text
    that could not be written: UnsupportedSchemaError, GrammarDeadEndError, ...
    """
    left_out = find_left_out(model, call)
    check_call(model, call, left_out, len(input_ids))
    config, asked = call["generation_config"], Asked.read(call, input_ids.shape[1])
    prompts = read_prompts(input_ids, call)[:: asked.fields["n"]]
    specs = _one_each(grammar, len(prompts))
    if complete and grammar is None:
        raise ConfigError("complete", complete, "needs a grammar; pass None without one")
    wanted = Wanted(
        left_out.tokenizer,
        proposer,
        draft,
        {"num_draft_tokens": num_draft_tokens, **(engine_options or {})},
        num_tokens=max(map(len, prompts)) + asked.ends.max_tokens,
        num_texts=len(input_ids),
    )
    with using_engine(model, wanted) as llm:
        ends = llm.vocabulary.stop_token_ids
        params = [asked.params(spec, ends, complete=complete) for spec in specs]
        texts = _run(llm, prompts, params, left_out.streamer)
    pads = (config.pad_token_id, *asked.ends.eos_ids, ends[0])
    sequences = _join(input_ids, texts, next(pad for pad in pads if pad is not None))
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences))
    return sequences


def _one_each(grammar: Grammars | None, num_prompts: int) -> list[GrammarSpec | None]:
    specs: list[GrammarSpec | None] = [None] if grammar is None else list_grammars(grammar)
    if len(specs) not in (1, num_prompts):
        fix = f"pass one for all prompts, or one for each of the {num_prompts}"
        raise ConfigError("grammar", f"{len(specs)} of them", fix)
    return specs * num_prompts if len(specs) == 1 else specs


def _run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], streamer: Any
) -> list[list[int]]:
    """The new tokens of every text, the samples of a prompt one after another."""
    if streamer is not None:
        return [_stream(llm, prompts[0], params[0], streamer)]
    texts = []
    for output in llm.generate(prompts, params):
        for completion in output.completions:
            if completion.error is not None:
                raise completion.error
            texts.append(completion.token_ids)
    return texts


def _stream(llm: LLM, prompt: list[int], params: SamplingParams, streamer: Any) -> list[int]:
    """The tokens come as those that log-probabilities are reported of: a chunk has text alone."""
    token_ids: list[int] = []
    for chunk in llm.stream([prompt], replace(params, logprobs=0)):
        new = [one.token_id for one in chunk.logprobs]
        if chunk.completion is not None:
            if chunk.completion.error is not None:
                raise chunk.completion.error
            new = chunk.completion.token_ids[len(token_ids) :]
        token_ids += new
        if new:
            streamer.put(torch.tensor([new]))
    streamer.end()
    return token_ids


def _join(input_ids: Tensor, texts: list[list[int]], pad: int) -> Tensor:
    """int64 [R, T]: the rows of ``input_ids`` and what follows them, padded on the right."""
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts])
    return torch.cat([input_ids, padded.to(input_ids)], 1)
