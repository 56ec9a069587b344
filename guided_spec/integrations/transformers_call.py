"""What a call of transformers' generate asks for, and whether the engine can do it.

transformers prepares a call before it hands it to a callable: it merges the settings, turns them
into logits processors and stopping criteria, and repeats the prompts for several samples.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationMixin

from guided_spec.errors import ConfigError

__all__ = ["LeftOut", "check_call", "find_left_out", "read_prompts"]

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
    """Arguments of generate that transformers does not hand on to a callable (5.17 to 5.23).

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
    places = (frame.f_locals, around if isinstance(around, dict) else {})
    for name in LeftOut._fields:
        values = (place.get(name) for place in places)
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
        if name == "past_key_values":
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
