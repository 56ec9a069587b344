"""What a training step works on: documents, and what the target makes of each of their tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["TargetStates", "TrainingBatch"]


class TrainingBatch(NamedTuple):
    """B documents, padded on the right to T tokens; all on one device.

    token_ids: int64 [B, T]; any valid id at the padding.
    loss_mask: bool [B, T]: whether a token belongs to an answer, so that predicting *it* is what
        the draft is trained for. False at the padding and at each document's first token.
    lengths: int64 [B], tokens of each document.
    bitmask: int32 [N, W], rows of legal tokens; row 0 is all ones and forbids nothing.
    mask_rows: int64 [B, T], the row of ``bitmask`` that says which tokens the grammar let stand at
        a place; 0 at free text.
    indices: int64 [B], which documents of the dataset these are.
    """

    token_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    bitmask: Tensor
    mask_rows: Tensor
    indices: Tensor

    def to(self, device: object) -> TrainingBatch:
        """The batch on ``device``; from pinned memory the copy does not wait."""
        return TrainingBatch(*(part.to(device, non_blocking=True) for part in self))  # type: ignore[call-overload]


class TargetStates(NamedTuple):
    """Hidden states of the target over one batch, without gradient.

    aux: [B, T, A, H_target], the inputs of the layers that the draft asked for, in its order.
    last: [B, T, H_target], the output of the last layer *before* the final norm.

    Both are arbitrary at the padding. The target's distribution of token p + 1 is made from
    ``last[:, p]``.
    """

    aux: Tensor
    last: Tensor
