"""What a stock decoder layer computes between its norms, in few kernels over the same weights.

Queries, keys and values come from one matrix product, gate and up from another: fewer and larger
products read the weights faster when there are few tokens. Nothing is stored twice, and the stock
layer computes what it did: see ``weights``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from guided_spec.models.packed.experts import PackedExperts
from guided_spec.models.packed.weights import can_be_joined, is_plain, pack
from guided_spec.ops.pointwise import rotate_and_store, silu_mul_packed
from guided_spec.ops.slot_attention import (
    HeadNorms,
    HeadShape,
    KeyValues,
    Rotation,
    SlotPlaces,
    slot_attention,
)

__all__ = [
    "Norm",
    "PackedLayer",
    "feed_of",
    "rotation_table",
]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Whose weights lie around 0.
SHIFTED_NORMS = (Gemma3RMSNorm, Qwen3NextRMSNorm, Qwen3_5RMSNorm, Qwen3_5MoeRMSNorm)


class Norm(NamedTuple):
    """The arguments of ``rms_norm`` behind the states: weight [H], and what it takes besides."""

    weight: Tensor
    eps: float
    shift: float = 0.0

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Of a stock RMS norm."""
        if isinstance(module, SHIFTED_NORMS):
            return cls(module.weight, module.eps, 1.0)
        return cls(module.weight, module.variance_epsilon)


class PackedLayer:
    """The attention and the MLP of a stock layer.

    attention: as of the llama family of transformers: projections q, k, v, o, rotary embedding over
        heads or how they begin; norms and gates of heads, and sinks, where it has them. mlp: with
        gate, up and down, or experts that ``PackedExperts`` knows; any other runs as it is.
    window: of sliding attention, None for all keys.
    """

    def __init__(self, attention: Any, mlp: Any, window: int | None = None) -> None:
        size: int = attention.head_dim
        queries, keys = (
            linear.out_features // size for linear in (attention.q_proj, attention.k_proj)
        )
        has_gates = queries * size == 2 * attention.o_proj.in_features
        self.shape = HeadShape(queries // 2 if has_gates else queries, keys, size, has_gates)
        self._qkv = pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = attention.o_proj
        self._scale: float = attention.scaling
        self._window = window
        self._sinks: Tensor | None = attention.sinks if hasattr(attention, "sinks") else None
        self._norms = None
        if hasattr(attention, "q_norm"):
            query, key = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
            self._norms = HeadNorms(_whole(query), _whole(key), query.eps)
        self.feed = feed_of(mlp)

    @staticmethod
    def fits(attention: Any) -> bool:
        """Whether the attention is of the kind described above, with plain weights."""
        linears = [getattr(attention, name, None) for name in PROJECTIONS]
        has_size = getattr(attention, "head_dim", 1) % 2 == 0 and hasattr(attention, "scaling")
        return has_size and all(map(is_plain, linears)) and can_be_joined(linears[:3])

    def attend(
        self,
        states: Tensor,
        rotation: Rotation,
        memory: KeyValues,
        places: SlotPlaces,
        seen: SlotPlaces | None = None,
    ) -> Tensor:
        """Normed states [N, X] to the attention's output [N, H].

        rotation: of all positions. memory: the layer's blocks, where the tokens' keys and values
            are kept. seen: R rows of one token each, for states of R rows of equally many tokens:
            all tokens of a row see what this one sees, one another too. None: each sees what is
            before it. Not for a layer with sinks or a window.
        """
        packed = self._qkv.product(states)
        query = rotate_and_store(packed, rotation, self.shape, self._norms, memory, places)
        if seen is None:
            mixed = slot_attention(
                *(query, None, memory, places),
                scale=self._scale,
                window=self._window,
                sinks=self._sinks,
            )
        else:
            mixed = self._attend_alike(query, memory, seen)
        if self.shape.has_gates:
            heads = packed.unflatten(1, (-1, self.shape.size))
            mixed = mixed * heads[:, 1 : 2 * self.shape.queries : 2].sigmoid()
        output: Tensor = self._output(mixed.flatten(1))
        return output

    def store(
        self, packed: Tensor, rotation: Rotation, memory: KeyValues, places: SlotPlaces
    ) -> None:
        """Keep what the layer's key and value projections made of tokens.

        packed: [N, 2 * Hkv * D], keys before values, contiguous, changed in place.
        """
        shape = self.shape._replace(queries=0)
        rotate_and_store(packed, rotation, shape, self._norms, memory, places)

    def _attend_alike(self, query: Tensor, memory: KeyValues, seen: SlotPlaces) -> Tensor:
        """Queries [N, Hq, D] that see the same as the others of their row: they are more heads of
        one token, so that each key is read once for all of them."""
        rows, count, size = seen.tokens.shape[1], self.shape.keys, self.shape.size
        heads = query.view(rows, -1, count, self.shape.queries // count, size).transpose(1, 2)
        folded = heads.reshape(rows, -1, size)
        mixed = slot_attention(folded, None, memory, seen, scale=self._scale)
        spread = mixed.view(heads.shape).transpose(1, 2)
        return spread.reshape(query.shape)


def rotation_table(rotary: Any, like: Tensor, length: int, kind: str | None = None) -> Rotation:
    """The rotary embeddings of positions 0 to ``length`` - 1.

    rotary: transformers' module. like: any tensor of the model's dtype and device.
    kind: of layer, for modules that turn each kind in a way of its own.
    """
    positions = torch.arange(length, device=like.device).unsqueeze(0)
    if hasattr(rotary, "mrope_section"):  # time, height and width: the same for text
        positions = positions.expand(3, *positions.shape)
    cos, sin = rotary(like, positions) if kind is None else rotary(like, positions, kind)
    return Rotation(cos[0].contiguous(), sin[0].contiguous())


def feed_of(mlp: Any) -> Callable[[Tensor], Tensor]:
    """What computes a stock MLP, or experts: normed states [N, H] to their output [N, H]."""
    if _has_plain_projections(mlp):
        return _packed_mlp(mlp)
    return PackedExperts(mlp).feed if PackedExperts.fits(mlp) else _stock_mlp(mlp)


def _packed_mlp(mlp: Any) -> Callable[[Tensor], Tensor]:
    gate_up, down, activation = pack([mlp.gate_proj, mlp.up_proj]), mlp.down_proj, mlp.act_fn
    is_silu = isinstance(activation, type(ACT2FN["silu"]))

    def feed(states: Tensor) -> Tensor:
        """Normed states [N, H] to the MLP's output [N, H]."""
        both = gate_up.product(states)
        if is_silu:
            opened = silu_mul_packed(both)
        else:
            gate, up = both.chunk(2, -1)
            opened = activation(gate) * up
        output: Tensor = down(opened)
        return output

    return feed


def _stock_mlp(mlp: Any) -> Callable[[Tensor], Tensor]:
    def feed(states: Tensor) -> Tensor:
        """As above; some give the weights of their experts besides."""
        found = mlp(states.unsqueeze(0))
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output.view(states.shape)

    return feed


def _whole(norm: Norm) -> Tensor:
    return norm.weight.float() + norm.shift if norm.shift else norm.weight


def _has_plain_projections(mlp: Any) -> bool:
    linears = [getattr(mlp, name, None) for name in MLP_PROJECTIONS]
    return hasattr(mlp, "act_fn") and all(map(is_plain, linears)) and can_be_joined(linears[:2])
