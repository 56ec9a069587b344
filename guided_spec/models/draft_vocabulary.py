"""A draft head's own, smaller vocabulary.

EAGLE-3 heads score only the D most frequent of the target's V tokens. Their checkpoints hold
``d2t`` int64 [D], offsets: draft id i is target id ``i + d2t[i]`` (SafeAILab/EAGLE, SpecForge and
speculators all store it so).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import ModelError

__all__ = ["DraftVocabulary", "VocabularyTensors"]


class VocabularyTensors(NamedTuple):
    """A draft vocabulary as checkpoints hold it.

    d2t: int64 [D], offsets: draft id i is target id ``i + d2t[i]``.
    t2d: bool [V], which target tokens the draft scores.
    """

    d2t: Tensor
    t2d: Tensor


class DraftVocabulary:
    """Which target token each draft token is.

    target_ids: int64 [D], on the device of the head; distinct ids below ``target_size``.
    columns: int32 [V] beside them: which draft token each target token is, -1 for none.
    """

    def __init__(self, target_ids: Tensor, target_size: int) -> None:
        self.target_ids = target_ids
        self.target_size = target_size
        order = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
        self.columns = torch.full((target_size,), -1, dtype=torch.int32, device=order.device)
        self.columns[target_ids] = order

    @classmethod
    def from_offsets(cls, offsets: Tensor, target_size: int, source: str) -> DraftVocabulary:
        """From the ``d2t`` tensor of a checkpoint, int64 [D].

        source: what to name in the error. Raises ModelError for offsets that are no integers, that
        leave the target's vocabulary, or that name a target token twice.
        """
        if offsets.dim() != 1 or offsets.is_floating_point() or not len(offsets):
            found = f"{offsets.dtype} {list(offsets.shape)}"
            raise ModelError(f"{source}: d2t: expected int64 [D], found {found}")
        target_ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
        low, high = int(target_ids.min()), int(target_ids.max())
        if low < 0 or high >= target_size:
            raise ModelError(
                f"{source}: d2t: expected offsets to target ids in [0, {target_size}), "
                f"found {low} to {high}; the head belongs to another target"
            )
        if len(target_ids.unique()) < len(target_ids):
            raise ModelError(
                f"{source}: d2t: expected {len(target_ids)} different target tokens, found some "
                "twice; d2t has to hold offsets (target id minus draft id), not target ids"
            )
        return cls(target_ids, target_size)

    def tensors(self) -> VocabularyTensors:
        """The tensors that ``from_offsets`` and other runtimes read, on the vocabulary's device."""
        target_ids = self.target_ids
        scored = torch.zeros(self.target_size, dtype=torch.bool, device=target_ids.device)
        scored[target_ids] = True
        offsets = target_ids - torch.arange(len(self), device=target_ids.device)
        return VocabularyTensors(offsets, scored)

    def __len__(self) -> int:
        return len(self.target_ids)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids int64 [...] to target ids."""
        return self.target_ids[draft_ids]
