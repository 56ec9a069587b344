"""The forward of an EAGLE-3 head over KV slots, in few kernels; see ``models.packed_decoder``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guided_spec.models.draft_head import DraftHead
from guided_spec.models.eagle3 import Eagle3Head
from guided_spec.models.packed_decoder import has_whole_static_rope, rotation_table
from guided_spec.models.packed_layer import PackedLayer
from guided_spec.ops.pointwise import add_rms_norm, rms_norm
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces

__all__ = ["PackedEagle3"]


class PackedEagle3:
    """What ``Eagle3Head`` computes, up to rounding; made by ``of``.

    head: on one device, with plain weights, which become views of packed ones.
    max_length: tokens of a text.
    """

    def __init__(self, head: Eagle3Head, max_length: int) -> None:
        self.head = head
        stock: list[Any] = list(head.layers)
        self._layers = [PackedLayer(layer.self_attn, layer.mlp) for layer in stock]
        self._stock = stock
        self._eps: float = head.norm.variance_epsilon
        weight: Tensor = head.norm.weight
        self._rotation = rotation_table(head.rotary_emb, weight.view(1, 1, -1), max_length)

    @classmethod
    def of(cls, head: DraftHead, max_length: int) -> PackedEagle3 | None:
        """The packed form of ``head``; None where it is not of the kind that this serves."""
        is_served = isinstance(head, Eagle3Head) and _is_served(head)
        return cls(head, max_length) if is_served else None  # type: ignore[arg-type]

    @property
    def kv_shape(self) -> tuple[int, int]:
        """(heads, size) of the keys and values of a layer."""
        return self._layers[0].shape.keys, self._layers[0].shape.size

    def forward(
        self, token_ids: Tensor, hidden: Tensor, places: SlotPlaces, memory: Sequence[KeyValues]
    ) -> Tensor:
        """As of ``DraftHead.forward``: int64 [B, T] and [B, T, H] to the recycled [B, T, H].

        memory: the slots of the layers. Tokens go to the positions from ``places.starts`` on.
        """
        first, layers = self._stock[0], zip(self._layers, self._stock, memory, strict=True)
        embedded = self.head.embed(token_ids).to(hidden.dtype)
        embedded = rms_norm(embedded, first.input_layernorm.weight, self._eps)
        normed = rms_norm(hidden, first.hidden_norm.weight, self._eps)
        residual = normed if first.norm_before_residual else hidden
        normed = torch.cat([embedded, normed], -1)
        for index, (layer, stock, kept) in enumerate(layers):
            if index > 0:
                normed = rms_norm(residual, stock.input_layernorm.weight, self._eps)
            change = layer.attend(normed, self._rotation, kept, places)
            inner = stock.post_attention_layernorm.weight
            residual, normed = add_rms_norm(change, residual, inner, self._eps)
            residual = residual + layer.feed(normed)
        if self.head.norm_output:
            return rms_norm(residual, self.head.norm.weight, self._eps)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., D]."""
        head = self.head
        normed = hidden if head.norm_output else rms_norm(hidden, head.norm.weight, self._eps)
        return head.score(normed)


def _is_served(head: Eagle3Head) -> bool:
    if not has_whole_static_rope(head.config):
        return False
    layers: list[Any] = list(head.layers)
    if any(getattr(layer.self_attn, "sliding_window", None) for layer in layers):
        return False
    return all(PackedLayer.fits(layer.self_attn, layer.mlp) for layer in layers)
