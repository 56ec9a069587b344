"""The forwards of EAGLE-3 heads and MTP modules in few kernels, see ``packed.decoder``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.mtp import QwenMtpHead
from guided_spec.models.packed.decoder import FAMILY, has_static_rope, has_whole_rope
from guided_spec.models.packed.layer import Norm, PackedLayer, rotation_table
from guided_spec.models.stock.experts import using_few_experts
from guided_spec.ops.pointwise import add_rms_norm, rms_norm
from guided_spec.ops.slot_attention import KeyValues, Rotation, SlotPlaces


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
    def of(cls, head: Any, max_length: int) -> PackedEagle3 | None:
        """The packed form of ``head``; None where its layers are not of a kind that this serves."""
        return cls(head, max_length) if cls._is_served(head) else None

    @property
    def width(self) -> int:
        """Of the states that it reads."""
        return self.head.hidden_size if self.head.fc is None else self.head.fc.in_features

    def forward(
        self, token_ids: Tensor, hidden: Tensor, places: SlotPlaces, memory: Sequence[KeyValues]
    ) -> Tensor:
        """See ``PackedHead``."""
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
        """See ``PackedHead``."""
        head = self.head
        normed = hidden if head.norm_output else rms_norm(hidden, head.norm.weight, self._eps)
        return head.score(normed)

    @staticmethod
    def _is_served(head: Eagle3Head) -> bool:
        if not (has_static_rope(head.config) and has_whole_rope(head.config)):
            return False
        layers: list[Any] = list(head.layers)
        if any(getattr(layer.self_attn, "sliding_window", None) for layer in layers):
            return False
        return all(PackedLayer.fits(layer.self_attn) for layer in layers)


class PackedMtp:
    """What a ``QwenMtpHead`` of one module computes, up to rounding; made by ``of``.

    head: on one device, with plain weights, which become views of packed ones.
    max_length: tokens of a text.
    """

    def __init__(self, head: QwenMtpHead, max_length: int) -> None:
        layer: Any = head.layers[0]
        self.head, self.width = head, head.hidden_size
        self._layer = PackedLayer(layer.self_attn, layer.mlp)
        self._embedded = Norm.of(head.pre_fc_norm_embedding)
        self._given = Norm.of(head.pre_fc_norm_hidden)
        self._before = Norm.of(layer.input_layernorm)
        self._inner = Norm.of(layer.post_attention_layernorm)
        self._last = Norm.of(head.norm)
        positions = torch.arange(max_length, device=head.fc.weight.device).unsqueeze(0)
        cos, sin = head.rotate(head.fc.weight[:1].unsqueeze(0), positions, 0)
        self._rotation = Rotation(cos[0].contiguous(), sin[0].contiguous())

    @classmethod
    def of(cls, head: Any, max_length: int) -> PackedMtp | None:
        """The packed form of ``head``; None where it is not of the kind that this serves."""
        return cls(head, max_length) if cls._is_served(head) else None

    @staticmethod
    def _is_served(head: Any) -> bool:
        if not isinstance(head, QwenMtpHead) or head.num_modules > 1:
            return False
        layer: Any = head.layers[0]
        is_known = type(layer).__module__ in {kind.__module__ for kind in FAMILY}
        if not is_known or hasattr(layer, "pre_feedforward_layernorm"):
            return False
        attention = layer.self_attn
        is_whole = not (getattr(attention, "sliding_window", None) or hasattr(attention, "sinks"))
        return is_whole and has_static_rope(head.config) and PackedLayer.fits(attention)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, places: SlotPlaces, memory: Sequence[KeyValues]
    ) -> Tensor:
        """See ``PackedHead``."""
        embedded = rms_norm(self.head.embed(token_ids).to(hidden.dtype), *self._embedded)
        states: Tensor = self.head.fc(torch.cat([embedded, rms_norm(hidden, *self._given)], -1))
        change = self._layer.attend(
            rms_norm(states, *self._before), self._rotation, memory[0], places
        )
        states, normed = add_rms_norm(change, states, *self._inner)
        with using_few_experts(self.head.config):
            change = self._layer.feed(normed)
        return add_rms_norm(change, states, *self._last)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``PackedHead``."""
        return self.head.logits(hidden)
