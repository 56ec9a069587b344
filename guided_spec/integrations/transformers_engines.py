"""One engine for each model that transformers' generate runs on, for as long as the model lives."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.models.loading import end_of_text_ids

__all__ = ["Wanted", "release", "using_engine"]

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
class _Place:
    """What is kept for one model: its engine, and what that was made of."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    llm: LLM | None = None
    settings: tuple[Any, ...] = ()

    def clear(self) -> None:
        llm, self.llm, self.settings = self.llm, None, ()
        if llm is not None:
            llm.close()


_places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()
_places_lock = threading.Lock()


@contextmanager
def using_engine(model: Any, wanted: Wanted) -> Iterator[LLM]:
    """The model's engine, for one caller at a time: that of the last call, or a new one.

    The weights are the model's own, and the model is not kept alive. Raises ConfigError where a
    text does not fit the context, or there is no tokenizer, and what ``LLM`` raises.
    """
    _check(model, wanted)
    with _places_lock:
        place = _places.setdefault(model, _Place())
    with place.lock:
        settings = _settings(model, wanted)
        if place.llm is None or place.settings != settings or not _fits(place.llm, wanted):
            place.clear()  # first, for its memory
            place.llm, place.settings = _build(model, wanted), settings
        yield place.llm


def release(model: Any) -> None:
    """Free the engine that calls of ``model.generate`` have left for the next one, if there is any.

    The model's death frees it too, but where something in the model refers to all of it, as the
    hooks do with which accelerate spreads one over devices. Waits for a call that runs.
    """
    with _places_lock:
        place = _places.get(model)
    if place is not None:
        with place.lock:
            place.clear()


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
