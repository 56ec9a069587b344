"""Which slots and positions the tokens of one forward go to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["StepPlan"]

VIEW_BUCKET = 64


class StepPlan:
    """Made once a forward from host integers; shared by all layers, so that each does little.

    slots: [B] distinct slots. starts: [B] tokens already in each. counts: [B] real tokens of the
    ``num_tokens`` fed. Nothing here waits for the device.

    view: how many positions are read of every slot; None is as many as are needed, and few more.

    Buffers are [num_slots, heads, max_length + 1, head_dim]; position max_length takes the padding.
    """

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        num_tokens: int,
        max_length: int,
        view: int | None = None,
    ) -> None:
        self.slots = list(slots)
        self.num_tokens = num_tokens
        self.fresh = [slot for slot, start in zip(slots, starts, strict=True) if start == 0]
        end = max(start + count for start, count in zip(starts, counts, strict=True))
        buckets = -(-max(end, 1) // VIEW_BUCKET)
        self.view = min(max_length, buckets * VIEW_BUCKET) if view is None else view
        first = self.slots[0]
        self._range = first if self.slots == list(range(first, first + len(slots))) else None
        self._positions, self._columns = _place(starts, counts, num_tokens, max_length)
        self._on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._targets: dict[tuple[torch.device, int, int], Tensor] = {}

    def positions(self, device: torch.device) -> Tensor:
        """[B, T] int64: each token's position; 0 for padding, which any model can embed."""
        return self._upload(device)[1]

    def write(self, buffer: Tensor, states: Tensor) -> None:
        """Put states [B, heads, T, head_dim] where the tokens belong."""
        heads, length, width = buffer.shape[1:]
        rows = self._rows(buffer.device, heads, length)
        # One index for slot, head and position: much faster than index_put_ with one for each.
        buffer.view(-1, width).index_copy_(0, rows, states.reshape(-1, width))

    def read(self, buffer: Tensor) -> Tensor:
        """[B, heads, view, head_dim]: the batch's slots; a view where they are neighbours."""
        return self.gather(buffer.narrow(2, 0, self.view))

    def gather(self, buffer: Tensor) -> Tensor:
        """[B, ...]: the batch's slots of [num_slots, ...]; a view where they are neighbours."""
        if self._range is not None:
            return buffer.narrow(0, self._range, len(self.slots))
        return buffer.index_select(0, self._upload(buffer.device)[0])

    def scatter(self, buffer: Tensor, rows: Tensor) -> None:
        """Put rows [B, ...] into the batch's slots of [num_slots, ...]."""
        buffer.index_copy_(0, self._upload(buffer.device)[0], rows)

    def _upload(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(slots [B], positions [B, T], columns [B, T]) on ``device``, by one copy."""
        if device not in self._on_device:
            slots = torch.tensor(self.slots).unsqueeze(1)
            packed = torch.cat([slots, self._positions, self._columns], 1)
            if device.type == "cuda":
                packed = packed.pin_memory().to(device, non_blocking=True)
            elif device.type != "cpu":
                packed = packed.to(device)
            first, last = packed[:, 1 : 1 + self.num_tokens], packed[:, 1 + self.num_tokens :]
            self._on_device[device] = (packed[:, 0], first.contiguous(), last)
        return self._on_device[device]

    def _rows(self, device: torch.device, heads: int, length: int) -> Tensor:
        """[B * heads * T]: where each vector of [B, heads, T] goes in the flattened buffer."""
        key = (device, heads, length)
        if key not in self._targets:
            slots, _, columns = self._upload(device)
            head = torch.arange(heads, device=device) + slots.unsqueeze(1) * heads  # [B, heads]
            rows = head.unsqueeze(2) * length + columns.unsqueeze(1)
            self._targets[key] = rows.flatten()
        return self._targets[key]


def _place(
    starts: Sequence[int], counts: Sequence[int], num_tokens: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """([B, T] positions, [B, T] buffer columns), int64 on the CPU."""
    steps = torch.arange(num_tokens)
    positions = torch.tensor(starts).unsqueeze(1) + steps
    if all(count == num_tokens for count in counts):
        return positions, positions
    padding = steps >= torch.tensor(counts).unsqueeze(1)
    return positions.masked_fill(padding, 0), positions.masked_fill(padding, max_length)
