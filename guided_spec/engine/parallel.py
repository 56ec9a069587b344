"""Several processes that run one model between them must all take the same decisions."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from guided_spec.types import MAX_SEED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_parallel(model: Any) -> bool:
    """Whether this process holds one of several parts of ``model``, whose layers are split.

    That it is in a group of processes does not say so: those that train a draft have the whole
    target each. vLLM's processes agree among themselves.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    if distributed.get_world_size() == 1:
        return False
    from transformers import PreTrainedModel  # only here: it takes seconds

    if not isinstance(model, PreTrainedModel):
        return False
    if (model.tp_size or 1) > 1:
        return True
    from torch.distributed.tensor import DTensor  # only here: it takes a second

    return any(isinstance(part, DTensor) for part in model.parameters())


def agree_on_least(number: int, model: PreTrainedModel) -> int:
    """The least number that any process with a part of ``model`` passes; else the number itself."""
    if not is_parallel(model):
        return number
    least = torch.tensor(number, device=model.device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


class SeedSource:
    """Draws random seeds for requests without one, the same in all parallel processes."""

    def __init__(self, model: Any) -> None:
        self._random = random.Random(0) if is_parallel(model) else random.SystemRandom()

    def draw(self) -> int:
        """An int in [0, 2**63)."""
        return self._random.randint(0, MAX_SEED)
