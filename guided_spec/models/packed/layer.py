"""What a stock decoder layer computes between its norms, in few kernels over the same weights.

Queries, keys and values come from one matrix product, gate and up from another: fewer and larger
products read the weights faster when there are few tokens. Nothing is stored twice, and the stock
layer computes what it did: see ``weights``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.models.linear_layer import product
from guided_spec.models.packed.blocks import KeptShape
from guided_spec.models.packed.feed import feed_of
from guided_spec.models.packed.kinds import is_a_kind
from guided_spec.models.packed.weights import can_be_joined, is_plain, pack
from guided_spec.models.pictures.axes import NUM_AXES, split_of
from guided_spec.ops.attention.slot_attention import (
    HeadNorms,
    KeyValues,
    QkvShape,
    Rotation,
    SlotIndex,
    Window,
    slot_attention,
)
from guided_spec.ops.delta_rule import (
    DeltaColumns,
    DeltaLayer,
    DeltaShape,
    DeltaStates,
    gated_delta,
)
from guided_spec.ops.pointwise import rotate_and_store

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Whose weights are around 0.
SHIFTED_NORMS = ("Gemma3RMSNorm", "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")


class Norm(NamedTuple):
    """The arguments of ``rms_norm`` after the states: weight [H], and what else it takes."""

    weight: Tensor
    eps: float
    shift: float = 0.0

    @classmethod
    def of(cls, module: Any) -> Norm:
        """The weight and epsilon of a stock RMS norm."""
        if is_a_kind(module, SHIFTED_NORMS):
            return cls(module.weight, module.eps, 1.0)
        return cls(module.weight, module.variance_epsilon)


class PackedLayer:
    """The attention and the MLP of a stock layer.

    attention: as of the llama family of transformers: projections q, k, v, o, rotary embedding over
        heads or how they begin; norms and gates of heads, and sinks, where it has them. mlp: with
        gate, up and down, or experts that ``PackedExperts`` knows; any other runs as it is.
    window: of sliding attention, None for all keys.
    """

    def __init__(self, attention: Any, mlp: Any, window: Window | None = None) -> None:
        size: int = attention.head_dim
        queries, keys = (
            linear.out_features // size for linear in (attention.q_proj, attention.k_proj)
        )
        has_gates = queries * size == 2 * attention.o_proj.in_features
        self.shape = QkvShape(queries // 2 if has_gates else queries, keys, size, has_gates)
        self._qkv = pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = attention.o_proj
        self._scale: float = attention.scaling
        self._window = window
        self._sinks: Tensor | None = attention.sinks if hasattr(attention, "sinks") else None
        self._norms = None
        if hasattr(attention, "q_norm"):
            query, key = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
            self._norms = HeadNorms(_whole(query), _whole(key), query.eps)
        self.kept = KeptShape(self.shape.keys, size, size)
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
        index: SlotIndex,
        seen: SlotIndex | None = None,
    ) -> Tensor:
        """Normed states [N, X] to the attention's output [N, H].

        rotation: of all positions. memory: the layer's blocks, where the tokens' keys and values
            are kept. seen: R rows of one token each, for states of R rows of equally many tokens:
            all tokens of a row see what this one sees, one another too. None: each sees what is
            before it. Not for a layer with sinks or a window.
        """
        packed = self._qkv.product(states)
        query = rotate_and_store(packed, rotation, self.shape, self._norms, memory, index)
        if seen is None:
            mixed = slot_attention(
                *(query, None, memory, index),
                scale=self._scale,
                window=self._window,
                sinks=self._sinks,
            )
        else:
            mixed = self._attend_grouped(query, memory, seen)
        if self.shape.has_gates:
            heads = packed.unflatten(1, (-1, self.shape.size))
            mixed = mixed * heads[:, 1 : 2 * self.shape.queries : 2].sigmoid()
        return product(self._output, mixed.flatten(1))

    def store(
        self, packed: Tensor, rotation: Rotation, memory: KeyValues, index: SlotIndex
    ) -> None:
        """Keep what the layer's key and value projections made of tokens.

        packed: [N, 2 * Hkv * D], keys before values, contiguous, modified.
        """
        shape = self.shape._replace(queries=0)
        rotate_and_store(packed, rotation, shape, self._norms, memory, index)

    def _attend_grouped(self, query: Tensor, memory: KeyValues, seen: SlotIndex) -> Tensor:
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
    kind: of layer, for modules with a rotation of its own for each kind.
    """
    positions = torch.arange(length, device=like.device).unsqueeze(0)
    if hasattr(rotary, "mrope_section"):
        found = as_rotation(rotary(like, positions.expand(NUM_AXES, *positions.shape)))
        split = split_of(lambda places: rotary(like.float(), places), like.device)
        return found._replace(axis_of=split)
    return as_rotation(rotary(like, positions) if kind is None else rotary(like, positions, kind))


def as_rotation(found: Any) -> Rotation:
    """What a rotary module of transformers gives for one text: cosines and sines, or complex."""
    if isinstance(found, Tensor):  # one of each pair
        found = [torch.cat([part, part], 2) for part in (found.real, found.imag)]
    cos, sin = found
    return Rotation(cos[0].contiguous(), sin[0].contiguous())


def _whole(norm: Norm) -> Tensor:
    return norm.weight.float() + norm.shift if norm.shift else norm.weight


# Of each family: what gives queries, keys, values and output gates, then steps and decays.
WHOLE = ("in_proj_qkvz", "in_proj_ba")
SPLIT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class PackedDelta:
    """The delta rule and the MLP of a stock layer; module: for which ``fits``."""

    def __init__(self, module: Any, mlp: Any) -> None:
        self.shape = DeltaShape(
            *(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim),
            module.conv_kernel_size,
        )
        names = _names(module)
        assert names is not None, "fits() comes before"
        linears = [getattr(module, name) for name in names]
        self._projections = [pack(group) for group in _groups(linears)]
        weight = module.conv1d.weight.data
        self._layer = DeltaLayer(
            self.shape,
            _columns(self.shape, weight.device, is_whole=names == WHOLE),
            weight.squeeze(1),
            module.A_log.data,
            module.dt_bias.data,
            1.0,
            module.norm.weight.data,
            module.norm.variance_epsilon,
        )
        self._output = module.out_proj
        self.feed = feed_of(mlp)

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether the layer is of a family described above, with plain weights."""
        names = _names(module)
        if names is None or not hasattr(module.norm, "variance_epsilon"):
            return False
        linears = [getattr(module, name) for name in (*names, "out_proj")]
        is_silu = module.activation == "silu" and type(module.conv1d) is nn.Conv1d
        return is_silu and module.conv1d.bias is None and all(map(is_plain, linears))

    def attend(
        self, states: Tensor, rotation: Rotation, memory: DeltaStates, index: SlotIndex
    ) -> Tensor:
        """Normed states [N, X] to the layer's output [N, H]; nothing is rotated.

        memory: the layer's states, which are moved on as ``gated_delta`` says.
        """
        del rotation
        parts = [projection.product(states) for projection in self._projections]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return product(self._output, gated_delta(packed, self._layer, memory, index))


def _names(module: Any) -> tuple[str, ...] | None:
    """The projections of the module; None where it is of no known family."""
    families: tuple[tuple[str, ...], ...] = (WHOLE, SPLIT)
    found = (names for names in families if all(hasattr(module, name) for name in names))
    return next(found, None)


def _groups(linears: Sequence[Any]) -> list[list[Any]]:
    """The layers in turn, those together that are in one form."""
    groups = [[linears[0]]]
    for one in linears[1:]:
        if can_be_joined([groups[-1][0], one]):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _columns(shape: DeltaShape, device: torch.device, *, is_whole: bool) -> DeltaColumns:
    """is_whole: each key head has its query, key, values and gates next to one another."""
    each = shape.values // shape.keys
    width, value_width = shape.keys * shape.key_size, shape.values * shape.value_size
    total = 2 * (width + value_width)
    states = torch.arange(total, dtype=torch.int32, device=device)
    gates = total + torch.arange(2 * shape.values, dtype=torch.int32, device=device)
    if is_whole:
        sizes = [shape.key_size] * 2 + [each * shape.value_size] * 2
        query, key, value, gate = states.view(shape.keys, -1).split(sizes, 1)
        step, decay = gates.view(shape.keys, -1).split(each, 1)
    else:
        query, key, value, gate = states.split([width, width, value_width, value_width])
        step, decay = gates.split(shape.values)
    kept = [part.flatten() for part in (query, key, value, step, decay)]
    return DeltaColumns(torch.cat(kept), gate.flatten())
