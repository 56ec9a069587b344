"""The optimizer and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["make_optimizer", "rate_factor"]

FLOOR = 0.1  # what is left of the learning rate at the end
BETAS = (0.9, 0.95)  # as EAGLE-3 trains its heads: https://github.com/SafeAILab/EAGLE


def rate_factor(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """What the learning rate is multiplied with in step ``step``, counted from 0.

    Rises linearly to 1 over the first ``warmup_steps``, then falls along half a cosine to ``FLOOR``
    at ``total_steps``. Never 0, so that every step moves the parameters.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW over the parameters that take a gradient; vectors (norms, biases) do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS)
