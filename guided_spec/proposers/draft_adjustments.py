"""The adjustments of a batch, applied to a drafter's own logits as its draft grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.ops.adjust import Adjustments

__all__ = ["DraftAdjustments"]

NO_TOKEN = -1


class DraftAdjustments:
    """Biases, bans and penalties behind each request's draft so far. Costs nothing without any.

    drafted: [B] tokens that the requests' drafts hold already.
    vocabulary: what the drafter's logits score; None: the target's own V tokens.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        self._adjustments = batch.adjustments
        self._vocabulary = vocabulary
        if self._adjustments is None:
            return
        lengths = [len(row) for row in drafted]
        width = max(lengths) + batch.num_draft_tokens
        padded = [[*row, *[NO_TOKEN] * (width - len(row))] for row in drafted]
        tokens = torch.tensor(padded, dtype=torch.int64).view(len(batch), width)
        self._tokens = tokens.to(batch.device, non_blocking=True)
        self._lengths = torch.tensor(lengths).to(batch.device, non_blocking=True)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [B, D] of the next token to such logits, in float32 where anything is adjusted."""
        if self._adjustments is None:
            return logits
        if self._vocabulary is None:
            return self._apply(self._adjustments, logits)
        # In target ids there and back: the rules name target tokens.
        target_ids = self._vocabulary.target_ids
        full = logits.new_full((len(logits), self._vocabulary.target_size), float("-inf"))
        full = full.index_copy(1, target_ids, logits)
        return self._apply(self._adjustments, full)[:, target_ids]

    def append(self, token_ids: Tensor) -> None:
        """One more drafted token for each request, int64 [B] target ids; -1 for none."""
        if self._adjustments is None:
            return
        self._tokens.scatter_(1, self._lengths.unsqueeze(1), token_ids.unsqueeze(1))
        self._lengths = self._lengths + 1

    def _apply(self, adjustments: Adjustments, logits: Tensor) -> Tensor:
        return adjustments.apply(logits.unsqueeze(1), self._tokens, self._lengths).squeeze(1)
