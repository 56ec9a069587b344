"""LoRA adapters of tiny models, as peft writes them, and their bases with one merged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "v_proj")


def write_adapter(
    model: PreTrainedModel,
    folder: Path,
    seed: int = 0,
    *,
    target_modules: Sequence[str] | str = ATTENTION,
    rank: int = 4,
    **settings: Any,
) -> str:
    """An adapter with random matrices, strong enough to write other texts; returns its folder."""
    torch.manual_seed(seed)
    names = target_modules if isinstance(target_modules, str) else list(target_modules)
    settings = {"lora_alpha": 8 * rank, "init_lora_weights": False, **settings}
    config = LoraConfig(r=rank, target_modules=names, **settings)
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    adapted.save_pretrained(str(folder))
    return str(folder)


def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The base with the adapter in its weights, by peft."""
    found: Any = PeftModel.from_pretrained(copy.deepcopy(model), folder)
    whole: PreTrainedModel = found.merge_and_unload().eval()
    return whole
