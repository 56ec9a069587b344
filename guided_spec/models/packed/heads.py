"""The forwards of draft heads in few kernels, see ``packed.decoder``: EAGLE-3, MTP, and blocks.

A block's own keys and values are stored after the text in its slot, as those of any draft: the
text keeps its length, and the next read overwrites them. One attention sees the text and the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.mtp import MtpHead, QwenMtpHead
from guided_spec.models.linear_layer import product
from guided_spec.models.packed.blocks import Tables, index_over
from guided_spec.models.packed.decoder import (
    FAMILY,
    RESIDUAL,
    LayerNorms,
    attending_layer,
    fits_packed,
    is_rotated,
)
from guided_spec.models.packed.layer import Norm, PackedLayer, as_rotation, rotation_table
from guided_spec.models.packed.weights import PackedWeights, pack
from guided_spec.models.pictures.axes import split_by, split_of
from guided_spec.models.pictures.vision import SERVED
from guided_spec.models.rope import has_static_rope, has_whole_rope
from guided_spec.models.stock.experts import using_few_experts
from guided_spec.models.target import kind_of
from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex
from guided_spec.ops.pointwise import add_rms_norm, rms_norm

KINDS = FAMILY | {*SERVED}
"""Of transformers, with layers that have a packed form."""


class PackedEagle3:
    """What ``Eagle3Head`` computes, up to rounding; made by ``of``.

    head: on one device, with plain weights, which become views of packed ones.
    max_length: tokens of a text.
    """

    def __init__(self, head: Eagle3Head, max_length: int) -> None:
        self.head = head
        stock: list[Any] = list(head.layers)
        self._layers = [PackedLayer(layer.self_attn, layer.mlp) for layer in stock]
        self._stock, self.kept = stock, [layer.kept for layer in self._layers]
        self._eps: float = head.norm.variance_epsilon
        weight: Tensor = head.norm.weight
        rotation = rotation_table(head.rotary_emb, weight.view(1, 1, -1), max_length)
        split = split_by(head.config.rope_parameters, weight.device)
        self._rotation = rotation._replace(axis_of=split)

    @classmethod
    def of(cls, head: Any, max_length: int) -> PackedEagle3 | None:
        """The packed form of ``head``; None where its layers are not of a kind that this serves."""
        return cls(head, max_length) if cls._is_served(head) else None

    @property
    def width(self) -> int:
        """Size of the last dimension of the states that it reads."""
        return self.head.hidden_size if self.head.fc is None else self.head.fc.in_features

    def forward(
        self, token_ids: Tensor, hidden: Tensor, index: SlotIndex, memory: Sequence[KeyValues]
    ) -> Tensor:
        """int64 [N] and [N, H] to the recycled [N, H]; see ``PackedHead``."""
        first, layers = self._stock[0], zip(self._layers, self._stock, memory, strict=True)
        embedded = self.head.embed(token_ids).to(hidden.dtype)
        embedded = rms_norm(embedded, first.input_layernorm.weight, self._eps)
        normed = rms_norm(hidden, first.hidden_norm.weight, self._eps)
        residual = normed if first.norm_before_residual else hidden
        normed = torch.cat([embedded, normed], -1)
        for number, (layer, stock, kept) in enumerate(layers):
            if number > 0:
                normed = rms_norm(residual, stock.input_layernorm.weight, self._eps)
            change = layer.attend(normed, self._rotation, kept, index)
            inner = stock.post_attention_layernorm.weight
            residual, normed = add_rms_norm(change, residual, inner, self._eps)
            residual = residual + layer.feed(normed)
        if self.head.norm_output:
            return rms_norm(residual, self.head.norm.weight, self._eps)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to logits [..., D]; see ``PackedHead``."""
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


class _MtpModule(NamedTuple):
    """The parts of an MTP head of one module, by the names of either kind: norms of the embedding
    and of the given state, the projection of both, a decoder layer, and the norm after it."""

    embedded: Any
    given: Any
    projection: Any
    layer: Any
    last: Any

    @classmethod
    def of(cls, head: Any) -> _MtpModule | None:
        """None where the head is of another kind, or has several modules."""
        if not isinstance(head, QwenMtpHead | MtpHead) or head.num_modules > 1:
            return None
        module: Any = head.layers[0]
        if isinstance(head, QwenMtpHead):
            norms = (head.pre_fc_norm_embedding, head.pre_fc_norm_hidden)
            return cls(*norms, head.fc, module, head.norm)
        if getattr(head.config, "mtp_hidden_states_first", False) or not module.use_post_norm:
            return None
        return cls(module.enorm, module.hnorm, module.eh_proj, module.mtp_block, module.post_norm)


class PackedMtp:
    """What an MTP head of one module computes, up to rounding; made by ``of``.

    head: on one device, with plain weights, which become views of packed ones.
    max_length: tokens of a text.
    """

    def __init__(self, head: QwenMtpHead | MtpHead, max_length: int) -> None:
        module = _MtpModule.of(head)
        assert module is not None, "of() comes before"
        layer = module.layer
        self.head, self.width = head, head.hidden_size
        self._layer = attending_layer(layer)
        self.kept = [self._layer.kept]
        self._embedded, self._given = Norm.of(module.embedded), Norm.of(module.given)
        self._projection = module.projection
        self._before = Norm.of(layer.input_layernorm)
        self._inner = Norm.of(layer.post_attention_layernorm)
        self._last = Norm.of(module.last)
        weight = module.projection.weight
        positions = torch.arange(max_length, device=weight.device).unsqueeze(0)
        like = weight[:1].unsqueeze(0)
        self._rotation = as_rotation(head.rotate(like, positions, 0))
        if head.counts_axes:
            split = split_of(lambda places: head.rotate(like, places, 0), like.device)
            self._rotation = self._rotation._replace(axis_of=split)

    @classmethod
    def of(cls, head: Any, max_length: int) -> PackedMtp | None:
        """The packed form of ``head``; None where it is not of the kind that this serves."""
        return cls(head, max_length) if cls._is_served(head) else None

    @staticmethod
    def _is_served(head: Any) -> bool:
        module = _MtpModule.of(head)
        if module is None:
            return False
        layer = module.layer
        if kind_of(layer) not in KINDS or not is_rotated(layer) or hasattr(layer, RESIDUAL):
            return False
        before, attended, inner, fed = LayerNorms.of(layer)
        if before is None or inner is None or attended is not None or fed is not None:
            return False
        attention = layer.self_attn
        is_whole = not (getattr(attention, "sliding_window", None) or hasattr(attention, "sinks"))
        return is_whole and has_static_rope(head.config) and fits_packed(layer)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, index: SlotIndex, memory: Sequence[KeyValues]
    ) -> Tensor:
        """int64 [N] and [N, H] to the recycled [N, H]; see ``PackedHead``."""
        embedded = rms_norm(self.head.embed(token_ids).to(hidden.dtype), *self._embedded)
        both = torch.cat([embedded, rms_norm(hidden, *self._given)], -1)
        states = product(self._projection, both)
        change = self._layer.attend(
            rms_norm(states, *self._before), self._rotation, memory[0], index
        )
        states, normed = add_rms_norm(change, states, *self._inner)
        with using_few_experts(self.head.config):
            change = self._layer.feed(normed)
        return add_rms_norm(change, states, *self._last)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to logits [..., D]; see ``PackedHead``."""
        return self.head.logits(hidden)


class PackedBlock:
    """What ``BlockHead`` computes, up to rounding; made by ``of``.

    head: on one device, with plain weights, which become views of packed ones.
    max_length: tokens of a text.
    """

    def __init__(self, head: BlockHead, max_length: int) -> None:
        self.head = head
        stock: list[Any] = list(head.layers)
        self._sights = [layer.sight for layer in stock]
        packed = pack(_projections(stock))  # the layers' own parts of it become theirs
        self._layers = [
            PackedLayer(layer.self_attn, layer.mlp, layer.sight.window) for layer in stock
        ]
        self._keys_values = _keys_values(packed, self._layers)
        self.kept = [layer.kept for layer in self._layers]
        # Norm i comes before layer i, the last one after all layers.
        self._norms = [*(Norm.of(layer.input_layernorm) for layer in stock), Norm.of(head.norm)]
        self._inner_norms = [Norm.of(layer.post_attention_layernorm) for layer in stock]
        self._hidden_norm = Norm.of(head.hidden_norm)
        like: Tensor = head.norm.weight
        self._rotation = rotation_table(head.rotary_emb, like.view(1, 1, -1), max_length)

    @classmethod
    def of(cls, head: BlockHead, max_length: int) -> PackedBlock | None:
        """The packed form of ``head``; None where its layers are not of a kind that this serves."""
        return cls(head, max_length) if _is_served(head) else None

    def read(self, states: Tensor, index: SlotIndex, memory: Sequence[KeyValues]) -> None:
        """Keep what layers see of verified positions.

        states: [N, len(aux_hidden_layers) * H] of the target, in the head's dtype. index: of the
            N positions; its rows are not read. memory: the layers' blocks.
        """
        features = rms_norm(product(self.head.fc, states), *self._hidden_norm)
        weight, bias = self._keys_values
        every = features.expand(len(self._layers), -1, -1)
        made = torch.bmm(every, weight.transpose(1, 2))
        if bias is not None:
            made = made + bias.unsqueeze(1)
        for layer, own, kept in zip(self._layers, made.unbind(0), memory, strict=True):
            layer.store(own, self._rotation, kept, index)

    def draft(
        self, last: Tensor, width: int, index: SlotIndex, memory: Sequence[KeyValues]
    ) -> Tensor:
        """Last tokens int64 [R] to the normed outputs [R, width, H] of a block.

        index: by ``index_of_blocks``, of ``positions_for(width)`` tokens a row.
        """
        head, layout, rows = self.head, self.head.layout, len(last)
        count = self.positions_for(width)
        masks = last.new_full((rows, count - 1), layout.mask_token_id)
        residual = head.embed(torch.cat([last.unsqueeze(1), masks], 1).flatten())
        residual = residual.to(self._norms[0].weight.dtype)
        if layout.embedding_scale != 1.0:
            residual = residual * layout.embedding_scale
        whole = _seen_from_the_end(index, count)
        normed = rms_norm(residual, *self._norms[0])
        for layer, sight, kept, inner, outer in zip(
            *(self._layers, self._sights, memory, self._inner_norms, self._norms[1:]), strict=True
        ):
            seen = None if sight.is_causal else whole
            change = layer.attend(normed, self._rotation, kept, index, seen)
            residual, normed = add_rms_norm(change, residual, *inner)
            residual, normed = add_rms_norm(layer.feed(normed), residual, *outer)
        return normed.view(rows, count, -1)[:, count - width :]

    def positions_for(self, width: int) -> int:
        """Positions of a block that drafts ``width`` tokens."""
        return width + (not self.head.layout.from_anchor)


def index_of_blocks(slots: Tensor, starts: Tensor, count: int, tables: Tables) -> SlotIndex:
    """``count`` positions of each of R slots from ``starts`` on; int64 [R] each, on the device.

    slots: -1 for an unused row. tables: that the slots go by.
    """
    rows = len(slots)
    steps = torch.arange(count, device=slots.device)
    positions = (starts.unsqueeze(1) + steps).flatten()
    tokens = torch.stack([slots.unsqueeze(1).expand(-1, count).flatten(), positions])
    ends = torch.arange(1, rows + 1, device=slots.device) * count
    lines = torch.stack([slots, starts, ends])
    return index_over(tables, tokens, lines, count)


def _seen_from_the_end(index: SlotIndex, count: int) -> SlotIndex:
    """One token a row, at the last of its ``count`` positions: it sees the text and the block."""
    slots, starts, _ = index.rows.unbind(0)
    ends = torch.arange(1, len(slots) + 1, device=slots.device)
    rows = torch.stack([slots, starts + (count - 1), ends])
    return replace(index, tokens=rows[:2], rows=rows, width=1)


class _KeysValues(NamedTuple):
    """Key and value projections of all layers: weight [L, 2 * Hkv * D, H], bias without H."""

    weight: Tensor
    bias: Tensor | None


def _projections(layers: Sequence[Any]) -> list[Any]:
    attentions = [layer.self_attn for layer in layers]
    return [part for one in attentions for part in (one.q_proj, one.k_proj, one.v_proj)]


def _keys_values(packed: PackedWeights, layers: Sequence[PackedLayer]) -> _KeysValues:
    """The part of ``packed``, of ``_projections``, that makes keys and values."""
    queries = layers[0].shape.queries * layers[0].shape.size
    weight, bias = packed.weight, packed.bias
    assert isinstance(weight, Tensor)
    return _KeysValues(
        weight.unflatten(0, (len(layers), -1))[:, queries:],
        None if bias is None else bias.unflatten(0, (len(layers), -1))[:, queries:],
    )


def _is_served(head: BlockHead) -> bool:
    if head.layout.conv is not None:
        return False
    if not (has_static_rope(head.config) and has_whole_rope(head.config)):
        return False
    layers: list[Any] = list(head.layers)
    # A position that sees those after it would have a window to both sides.
    if any(layer.sight.window and not layer.sight.is_causal for layer in layers):
        return False
    # Layers read a text by one product of them all, which has no form in fp8.
    are_plain = all(type(part) is nn.Linear for part in _projections(layers))
    return are_plain and all(PackedLayer.fits(layer.self_attn) for layer in layers)
