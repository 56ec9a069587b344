"""The matrices of a layer's experts, how gate and up become one, and which experts were chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Gating", "Projection", "Routes"]


class Routes(NamedTuple):
    """experts: int64 [N, K], the largest first. shares: float32 [N, K], the weights of them."""

    experts: Tensor
    shares: Tensor


class Projection(NamedTuple):
    """weight: [E, O, I], contiguous. bias: [E, O], or None.

    scales: of weights in fp8, float32 [E, ceil(O / block[0]), ceil(I / block[1])], the factors of
    blocks as ``Fp8Weight`` says; None for other weights.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None
    block: tuple[int, int] = (1, 1)

    def of(self, experts: Tensor) -> Tensor:
        """float32 [..., O, I]: the matrices of these experts, integers [...]."""
        if self.scales is None:
            return self.weight[experts].float()
        bytes_ = self.weight.view(torch.uint8)[experts]  # not every torch picks among fp8
        (rows, columns), (outputs, inputs) = self.block, self.weight.shape[1:]
        spread = self.scales[experts].repeat_interleave(rows, -2)[..., :outputs, :]
        spread = spread.repeat_interleave(columns, -1)[..., :inputs]
        return bytes_.view(self.weight.dtype).float() * spread


class Gating(NamedTuple):
    """How gate and up become one.

    is_interleaved: outputs 2i and 2i + 1 are gate and up i; else up is the second half.
    limit: None is silu(gate) * up. Else gate is at most ``limit``, up within it on both sides, and
        the result is gate * sigmoid(alpha * gate) * (up + 1), as of gpt-oss.
    """

    is_interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
