"""What ranks of one model agree on: each has its own drafter, and all must draft the same tokens.

A rank makes its tables in its own time. So each says what it could do, as one number, and all do
what all can do.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import distributed

from guided_spec.integrations.patches import Patch

_logger = logging.getLogger("vllm.guided_spec")

LATER = 0
"""Not yet: where any rank says so, and none says ``NEVER``, that is what all do."""
NEVER = -1
"""Not at all: where any rank says so, that is what all do."""


class Ranks(Protocol):
    """All ranks call it equally often, with as many numbers of the same things."""

    def agree(self, marks: Sequence[int]) -> list[int]:
        """[n] what all ranks do of n things that each says something of.

        marks: [n], ``NEVER``, ``LATER``, or a positive number that identifies what the rank has.
        ``NEVER`` too where ranks have different things.
        """
        ...


class OneRank:
    """A single rank, which agrees with itself."""

    def agree(self, marks: Sequence[int]) -> list[int]:
        """The marks as they are, see ``Ranks.agree``."""
        return [*marks]


class RankGroup:
    """Ranks of one process group of torch's, of CPU tensors. ``agree`` waits for the slowest."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def agree(self, marks: Sequence[int]) -> list[int]:
        """[n] what all ranks of the group do, see ``Ranks.agree``."""
        both = torch.tensor([*marks, *(-mark for mark in marks)])
        distributed.all_reduce(both, distributed.ReduceOp.MIN, self._group)
        least, most = both[: len(marks)], -both[len(marks) :]
        differs = (least > LATER) & (least != most)
        if differs.any():
            _logger.warning("guided_spec: ranks have different tables of a grammar")
        agreed: list[int] = least.masked_fill(differs, NEVER).tolist()
        return agreed


def ranks_of(config: Any) -> Ranks:
    """The tensor-parallel ranks of this worker; config: vLLM's VllmConfig."""
    if config.parallel_config.tensor_parallel_size == 1:
        return OneRank()
    return RankGroup(importlib.import_module(_STATE).get_tp_group().cpu_group)


_STATE = "vllm.distributed.parallel_state"
RANKS = (
    Patch(_STATE, "get_tp_group"),
    Patch(_STATE, "GroupCoordinator", attributes="cpu_group"),
)
