"""What quantized weights of all kinds have in common."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class QuantizedWeight(Protocol):
    """A matrix [O, I] of numbers with few bits, and what they are multiplied with."""

    @property
    def values(self) -> Tensor:
        """The numbers, [O, any]: maps of the same inputs are joined along the first dimension."""

    @property
    def form(self) -> Hashable:
        """What is equal of weights that can be joined."""

    @classmethod
    def joined(cls, parts: Sequence[Any], values: Tensor, /) -> QuantizedWeight:
        """Several maps of the same inputs, of one form, concatenated; values: theirs."""

    def product(self, x: Tensor, bias: Tensor | None, /) -> Tensor:
        """[..., I] to [..., O], plus the bias [O]."""

    def whole(self, dtype: torch.dtype, /) -> Tensor:
        """[O, I]: all of it multiplied out."""
