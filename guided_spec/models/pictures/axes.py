"""Positions of three axes: those of a picture's tokens, and of the text after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.models.target import find_decoder
from guided_spec.ops.side_stream import SideStream

NUM_AXES = 3  # time, height, width


class SlotAxes:
    """The positions of the texts in slots, on each axis: without pictures, those of the tokens.

    Keys, values and masks go by a token's index as ever. What comes after a prompt with pictures
    goes on from its last position, so that drafts, and what is taken back of them, need nothing.
    A video may have larger ones, and the ``generate`` of transformers goes on likewise.

    table: of the model. side: on which they are written, as ``Blocks.tables`` are.

    positions: int32 [num_slots, 3, max_length + 1], at one address, so that graphs read them; see
        ``SlotIndex.axes``.
    """

    def __init__(
        self, num_slots: int, max_length: int, table: PictureEmbedding, side: SideStream
    ) -> None:
        self._table, self._side = table, side
        device = table.weight.device
        self._ends = [0] * num_slots  # of the last pictures of prompts
        self._is_plain = [True] * num_slots
        self._plain = torch.arange(max_length + 1, dtype=torch.int32, device=device)
        self.positions = self._plain.repeat(num_slots, NUM_AXES, 1)

    @classmethod
    def of(
        cls, model: PreTrainedModel, num_slots: int, max_length: int, side: SideStream | None = None
    ) -> SlotAxes | None:
        """For a model that reads pictures so; None for others. side: None is the current stream."""
        table: Any = model.get_input_embeddings()
        if not (isinstance(table, PictureEmbedding) and counts_axes(model)):
            return None
        return cls(num_slots, max_length, table, side or SideStream.none())

    @torch.inference_mode()
    def put(self, slot: int, prompt: Tensor | None, end: int | None = None) -> None:
        """A text begins in the slot. prompt: int64 [3, P], of one that ends with text; None without
        pictures.

        end: where the last picture ends in it; None: with it.
        """
        self._ends[slot] = 0
        if prompt is None and self._is_plain[slot]:
            return
        self._is_plain[slot] = prompt is None
        row = self.positions[slot]
        self._side.after_current()  # work on the current stream reads them as they are
        with self._side.use():
            if prompt is None:
                row.copy_(self._plain.expand_as(row))
            else:
                self._ends[slot] = prompt.shape[1] if end is None else end
                own = prompt[:, : row.shape[1]].int()
                own = own.pin_memory() if row.is_cuda and not own.is_cuda else own
                row[:, : own.shape[1]].copy_(own, non_blocking=True)
                shift = int(prompt[0, -1]) + 1 - prompt.shape[1]
                row[:, own.shape[1] :] = self._plain[own.shape[1] :] + shift
        self._side.join()

    def deepens(self, slots: Sequence[int], starts: Sequence[int]) -> bool:
        """Whether layers take more of pictures in rows that start there.

        slots: [R], -1 for an unused row. starts: [R] the first index of each.
        """
        if self._table.deep is None:
            return False
        return any(at >= 0 and n < self._ends[at] for at, n in zip(slots, starts, strict=True))

    def arguments(
        self, slots: Sequence[int], starts: Sequence[int], token_ids: Tensor, indices: Tensor
    ) -> dict[str, Any]:
        """What the stock modules are told of tokens [B, T] at these indices of their texts.

        starts: [B] the first index of each.
        """
        found: dict[str, Any] = {"position_ids": self.at(slots, indices)}
        if self.deepens(slots, starts):  # else it waits for nothing
            found |= self._table.deep_arguments(token_ids)
        return found

    def at(self, slots: Sequence[int], indices: Tensor) -> Tensor:
        """int64 [3, B, T]: of the tokens ``indices`` [B, T] of each text."""
        rows = self.positions[torch.tensor(slots, device=indices.device)]
        found = rows.gather(2, indices.unsqueeze(1).expand(-1, NUM_AXES, -1))
        return found.transpose(0, 1).long()


def counts_axes(model: PreTrainedModel) -> bool:
    """Whether a model's positions may differ from axis to axis."""
    return hasattr(getattr(find_decoder(model), "rotary_emb", None), "mrope_section")


def split_of(rotate: Callable[[Tensor], Any], device: torch.device) -> Tensor:
    """``Rotation.axis_of`` of what gives the cosines and sines [B, T, R] of int64 [3, B, T].

    It may split the numbers of a head in any way: each turns with one of the axes alone.
    """
    alone = torch.eye(NUM_AXES, dtype=torch.int64, device=device).unsqueeze(2)
    sin: Tensor
    _, sin = rotate(alone)
    return sin[:, 0, : sin.shape[2] // 2].abs().argmax(0).int()


def split_by(rope: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """``Rotation.axis_of`` by the sections that ``rope_parameters`` may hold; None without any."""
    sections = rope.get("mrope_section")
    if sections is None:
        return None
    if not rope.get("mrope_interleaved"):
        split = torch.arange(NUM_AXES).repeat_interleave(torch.tensor(sections))
    else:
        split = torch.zeros(sum(sections), dtype=torch.int64)
        for axis in range(1, NUM_AXES):
            split[axis : sections[axis] * NUM_AXES : NUM_AXES] = axis
    return split.int().to(device)
