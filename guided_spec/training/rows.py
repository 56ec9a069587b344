"""Rows of a tensor, each picked once at most: their gradient is a copy, and needs no sums.

Which rows, a mask says. To count those of one the host waits for the device, so that it is done
once a mask, and where possible before there is work to wait for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.training.compiled import compiled_on_cuda


class Positions(NamedTuple):
    """Some of the B * T positions of texts. mask: bool [B, T]. at: int64 [n] indices, ascending."""

    mask: Tensor
    at: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Positions:
        """Those where ``mask`` is true; waits for its device."""
        return cls(mask, mask.flatten().nonzero().squeeze(1))

    def read(self, values: Tensor) -> Tensor:
        """[n, ...] of [B, T, ...]."""
        return values.flatten(0, 1)[self.at]

    def spread(self, values: Tensor, *, fill: float) -> Tensor:
        """[B, T] with ``values`` [n] at the positions, and ``fill`` elsewhere."""
        spread = torch.full(self.mask.shape, fill, dtype=values.dtype, device=values.device)
        spread.view(-1)[self.at] = values
        return spread


def pick_rows(states: Tensor, at: Tensor) -> Tensor:
    """[m, H] of [n, H] at int64 [m] different rows, with gradient.

    That of ``index_select`` is summed by atomic operations, as a row may have been read twice.
    """
    picked: Tensor = _Picked.apply(states, at)  # type: ignore[no-untyped-call]
    return picked


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.count = len(states)
        return states.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _put_back(upstream[0], *ctx.saved_tensors, ctx.count), None


@compiled_on_cuda
def _put_back(rows: Tensor, at: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, rows.shape[-1]).index_copy(0, at, rows)
