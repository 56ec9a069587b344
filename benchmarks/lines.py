"""Where the tokens of a verify forward go, for the benchmarks of what such a forward costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.packed_lm import Rows
from guided_spec.ops.slot_attention import SlotPlaces

__all__ = ["num_blocks", "places_of"]


def num_blocks(batch: int, max_length: int) -> int:
    """Blocks of the memory: those of all texts, and block 0, which is in none."""
    return batch * (max_length // BLOCK + 1) + 1


def places_of(
    starts: Sequence[int], width: int, max_length: int, device: torch.device
) -> SlotPlaces:
    """Rows of ``width`` tokens each, from ``starts`` on, in texts of up to ``max_length``.

    Their blocks are in any order, as they are once texts have come and gone.
    """
    batch = len(starts)
    tables = torch.randperm(num_blocks(batch, max_length) - 1, device=device).int() + 1
    rows = Rows(range(batch), starts, [width] * batch)
    line = torch.from_numpy(rows.places(batch * width, batch)).to(device)
    of_tokens, of_rows = line.split([2 * batch * width, 3 * batch])
    where = of_tokens.view(2, -1), of_rows.view(3, -1), tables.view(batch, -1)
    return SlotPlaces(*where, max_length, width)
