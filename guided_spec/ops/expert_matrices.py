"""The matrices of a layer's experts, how gate and up become one, and which experts were chosen."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Gating", "Projection", "Routes"]


class Routes(NamedTuple):
    """experts: int64 [N, K], the largest first. shares: float32 [N, K], the weights of them."""

    experts: Tensor
    shares: Tensor


class Projection(NamedTuple):
    """weight: [E, O, I], contiguous. bias: [E, O], or None."""

    weight: Tensor
    bias: Tensor | None


class Gating(NamedTuple):
    """How gate and up become one.

    is_interleaved: outputs 2i and 2i + 1 are gate and up i; else up is the second half.
    limit: None is silu(gate) * up. Else gate is at most ``limit``, up within it on both sides, and
        the result is gate * sigmoid(alpha * gate) * (up + 1), as of gpt-oss.
    """

    is_interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
