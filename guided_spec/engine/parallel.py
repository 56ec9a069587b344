"""Several processes that run one model between them must all take the same decisions."""

from __future__ import annotations

import random

import torch
import torch.distributed

from guided_spec.types import MAX_SEED


def is_parallel() -> bool:
    """Whether this process is one of several in a torch.distributed group."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def agree_on_least(number: int, device: torch.device) -> int:
    """The least number that any process of the group passes; the number itself without a group.

    device: where the processes' tensors are.
    """
    if not is_parallel():
        return number
    least = torch.tensor(number, device=device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


class SeedSource:
    """Draws a seed for requests that bring none: at random, but alike in parallel processes."""

    def __init__(self) -> None:
        self._random = random.Random(0) if is_parallel() else random.SystemRandom()

    def draw(self) -> int:
        """An int in [0, 2**63)."""
        return self._random.randint(0, MAX_SEED)
