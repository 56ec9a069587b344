"""Whole drafts of a head, as the body of their graph makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.packed.draft_forward import DraftForward


@torch.inference_mode()
def draft_greedily(
    head: DraftForward,
    vocabulary: DraftVocabulary | None,
    slots: Sequence[int],
    count: int,
    prefix: Tensor | None = None,
) -> Tensor:
    """int64 [R, count] target ids, each the best after the ones before.

    prefix: int64 [R, G]: tokens that each row begins with, then -1.
    """
    device, picked = head.graphs.device, list[Tensor]()
    index = torch.tensor([list(slots), list(head.begin_draft(slots, count)), [0] * len(slots)])

    def pick(depth: int, logits: Tensor) -> Tensor:
        best = logits.argmax(-1)
        picked.append(best if vocabulary is None else vocabulary.to_target(best))
        if prefix is not None and depth < prefix.shape[1]:
            given = prefix[:, depth].to(device)
            return torch.where(given < 0, picked[-1], given)
        return picked[-1]

    head.draft({"index": index.to(device)}, count, pick)
    head.end_draft(slots, count)
    return torch.stack(picked, 1)
