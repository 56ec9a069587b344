"""What speculators itself gives for heads in its format; only where it is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.heads.equations import Text


def eagle3_logits(folder: Path, text: Text, steps: int) -> list[Tensor]:
    """[P, D] for each of ``steps``; rows whose token would lie behind the last are not right."""
    core: Any = importlib.import_module("speculators.models.eagle3.core")
    config = core.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
    scores: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, output: scores.append(output[0]))
    length = len(text.states)
    with torch.no_grad():
        model.eval()(
            hidden_states=text.states[None],
            input_ids=text.tokens[None, :length],
            document_ids=torch.zeros(1, length, dtype=torch.int64),
            ttt_steps=steps,
        )
    return scores
