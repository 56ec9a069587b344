"""The attention and the MLP of a stock decoder layer, with their projections side by side.

Queries, keys and values come from one matrix product, gate and up from another: fewer and larger
products read the weights faster when there are few tokens. The packed weights take the place of the
stock ones, whose parameters become views of them; so nothing is stored twice, and the stock layer
computes what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from guided_spec.ops.pointwise import silu_mul_packed
from guided_spec.ops.rotary import rotate_and_store
from guided_spec.ops.slot_attention import (
    HeadNorms,
    HeadShape,
    KeyValues,
    Rotation,
    SlotPlaces,
    slot_attention,
)

__all__ = ["PackedLayer"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class PackedLayer:
    """What a stock layer computes between its norms.

    attention, mlp: of the llama family of transformers: projections q, k, v, o and gate, up, down,
        SiLU, rotary embedding over whole heads. window: of sliding attention, None for all keys.
    """

    def __init__(self, attention: Any, mlp: Any, window: int | None = None) -> None:
        size: int = attention.head_dim
        self.shape = HeadShape(
            attention.q_proj.out_features // size, attention.k_proj.out_features // size, size
        )
        self._qkv = _pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = _pack([mlp.gate_proj, mlp.up_proj])
        self._output, self._down = attention.o_proj, mlp.down_proj
        self._scale: float = attention.scaling
        self._window = window
        self._norms = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm, attention.k_norm
            self._norms = HeadNorms(query.weight, key.weight, query.variance_epsilon)

    @staticmethod
    def fits(attention: Any, mlp: Any) -> bool:
        """Whether the two are of the kind described above, with plain weights."""
        linears = [getattr(attention, name, None) for name in PROJECTIONS]
        linears += [getattr(mlp, name, None) for name in MLP_PROJECTIONS]
        is_silu = isinstance(getattr(mlp, "act_fn", None), type(ACT2FN["silu"]))
        has_size = getattr(attention, "head_dim", 1) % 2 == 0 and hasattr(attention, "scaling")
        return is_silu and has_size and all(map(_is_plain, linears))

    def attend(
        self, states: Tensor, rotation: Rotation, memory: KeyValues, places: SlotPlaces
    ) -> Tensor:
        """Normed states [B, T, X] to the attention's output [B, T, H].

        rotation: of all positions. memory: the layer's slots, where the tokens' keys and values are
            kept.
        """
        packed = functional.linear(states, *self._qkv)
        query = rotate_and_store(packed, rotation, self.shape, self._norms, memory, places)
        mixed = slot_attention(query, None, memory, places, scale=self._scale, window=self._window)
        output: Tensor = self._output(mixed.flatten(2))
        return output

    def feed(self, states: Tensor) -> Tensor:
        """Normed states [B, T, H] to the MLP's output [B, T, H]."""
        output: Tensor = self._down(silu_mul_packed(functional.linear(states, *self._gate_up)))
        return output


class PackedWeights(NamedTuple):
    """Of several linear maps of one input: [sum of outputs, inputs], and [sum of outputs]."""

    weight: Tensor
    bias: Tensor | None


def _is_plain(linear: Any) -> bool:
    """A quantized weight may stand in a plain linear layer, as a tensor of its own kind."""
    return type(linear) is nn.Linear and type(linear.weight.data) is Tensor


def _pack(linears: Sequence[nn.Linear]) -> PackedWeights:
    parts = [linear.weight.data for linear in linears]
    weight = _joined(parts)
    if weight is None:
        weight = torch.cat(parts)
        split = weight.split([len(part) for part in parts])
        for linear, view in zip(linears, split, strict=True):
            linear.weight.data = view
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return PackedWeights(weight, None)
    filled = [
        weight.new_zeros(len(part)) if bias is None else bias.data
        for part, bias in zip(parts, biases, strict=True)
    ]
    return PackedWeights(weight, torch.cat(filled))


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parts that lie behind one another already, as another user left them."""
    first, width = parts[0], parts[0].shape[1]
    end = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, width), (width, 1))
