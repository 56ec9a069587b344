"""Positions of three axes: those of a picture's tokens, and of the text after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guided_spec.models.pictures.embedding import PictureEmbedding

NUM_AXES = 3  # time, height, width


class SlotAxes:
    """The positions of the texts in slots, on each axis: without pictures, those of the tokens.

    Keys, values and masks go by a token's index as ever. What comes after a prompt with pictures
    goes on from its largest position, so that drafts, and what is taken back of them, need nothing.
    """

    def __init__(
        self, num_slots: int, max_length: int, device: torch.device, table: PictureEmbedding
    ) -> None:
        self._table = table
        self._ends = [0] * num_slots  # of the prompts with pictures
        self._plain = torch.arange(max_length + 1, device=device)
        self._positions = self._plain.repeat(num_slots, NUM_AXES, 1)

    def put(self, slot: int, prompt: Tensor | None) -> None:
        """A text begins in the slot. prompt: int64 [3, P], of its prompt; None without pictures."""
        row = self._positions[slot]
        row.copy_(self._plain.expand_as(row))
        self._ends[slot] = 0 if prompt is None else prompt.shape[1]
        if prompt is not None:
            length = min(prompt.shape[1], row.shape[1])
            row[:, :length] = prompt[:, :length].to(row.device)
            row[:, length:] += int(prompt.max()) + 1 - prompt.shape[1]

    def arguments(
        self, slots: Sequence[int], starts: Sequence[int], token_ids: Tensor, indices: Tensor
    ) -> dict[str, Any]:
        """What the stock modules are told of tokens [B, T] at these indices of their texts.

        starts: [B] the first index of each.
        """
        found: dict[str, Any] = {"position_ids": self.at(slots, indices)}
        pairs = zip(slots, starts, strict=True)
        if any(start < self._ends[slot] for slot, start in pairs):  # else it waits for nothing
            found |= self._table.deep_arguments(token_ids)
        return found

    def at(self, slots: Sequence[int], indices: Tensor) -> Tensor:
        """int64 [3, B, T]: of the tokens ``indices`` [B, T] of each text."""
        rows = self._positions[torch.tensor(slots, device=indices.device)]
        found = rows.gather(2, indices.unsqueeze(1).expand(-1, NUM_AXES, -1))
        return found.transpose(0, 1)
