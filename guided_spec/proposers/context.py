"""What a proposer may use when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from guided_spec.config import EngineConfig
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["ProposerContext"]


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """The one argument of every proposer's constructor.

    vocabulary: the target's tokens.
    encode: text to the tokenizer's own token ids, no special tokens added.
    tokenizer: the target's tokenizer, None when the engine runs without one.
    target: the target as a transformers model; None when the target is not one.
    config: the engine's settings.
    num_slots, max_model_len: how many requests run at once, and how long each may become.
    device, dtype: where and in what the target computes.
    argument: what stood after the colon of the proposer's name, "" when nothing did.
    draft: the draft model or head the user named: a folder, a hub id, a model, or None.
    """

    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]
    tokenizer: Any
    target: Any
    config: EngineConfig
    num_slots: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    argument: str = ""
    draft: Any = None
