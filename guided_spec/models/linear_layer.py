"""What a stock linear layer computes, by the fastest kernel there is."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from guided_spec.ops.linear.linear import linear


def product(layer: Any, states: Tensor) -> Tensor:
    """[..., I] to [..., O]: what the module ``layer`` computes, any that is called so.

    A plain one without hooks runs by ``guided_spec.ops.linear.linear``.
    """
    if type(layer) is nn.Linear and has_plain_weight(layer) and not _is_watched(layer):
        return linear(states, layer.weight, layer.bias)
    found: Tensor = layer(states)
    return found


def has_plain_weight(layer: nn.Linear) -> bool:
    """Whether the weight is an ordinary tensor: a quantized one may be of its own kind."""
    return type(layer.weight.data) is Tensor


def _is_watched(layer: nn.Module) -> bool:
    """Whether it has hooks, or a ``forward`` of its own, as accelerate gives it."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
