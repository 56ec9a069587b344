"""A gated delta layer of a stock model, as of Qwen3-Next and Qwen3.5, in few kernels.

What ``PackedLayer`` is where a layer attends, ``PackedDelta`` is where it keeps one state a text.
The layer's projections are joined as far as they are in one form, and the convolution, the rule and
the gated norm behind them are ``guided_spec.ops.delta_rule.gated_delta``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from guided_spec.models.packed.layer import feed_of
from guided_spec.models.packed.weights import can_be_joined, is_plain, pack
from guided_spec.ops.delta_rule import (
    DeltaColumns,
    DeltaLayer,
    DeltaShape,
    DeltaStates,
    gated_delta,
)
from guided_spec.ops.slot_attention import Rotation, SlotPlaces

__all__ = ["PackedDelta"]

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
        self, states: Tensor, rotation: Rotation, memory: DeltaStates, places: SlotPlaces
    ) -> Tensor:
        """Normed states [N, X] to the layer's output [N, H]; nothing is rotated.

        memory: the layer's states, which are moved on as ``gated_delta`` says.
        """
        del rotation
        parts = [projection.product(states) for projection in self._projections]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        output: Tensor = self._output(gated_delta(packed, self._layer, memory, places))
        return output


def _names(module: Any) -> tuple[str, ...] | None:
    """The projections of the module; None where it is of no known family."""
    families: tuple[tuple[str, ...], ...] = (WHOLE, SPLIT)
    found = (names for names in families if all(hasattr(module, name) for name in names))
    return next(found, None)


def _groups(linears: Sequence[Any]) -> list[list[Any]]:
    """The layers in turn, those together that are in one form."""
    groups = [[linears[0]]]
    for linear in linears[1:]:
        if can_be_joined([groups[-1][0], linear]):
            groups[-1].append(linear)
        else:
            groups.append([linear])
    return groups


def _columns(shape: DeltaShape, device: torch.device, *, is_whole: bool) -> DeltaColumns:
    """is_whole: each key head has its query, key, values and gates behind one another."""
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
