"""Where the tokens of a verify forward go, for the benchmarks of what such a forward costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from guided_spec.models.packed.blocks import BLOCK, SharedPrefix
from guided_spec.models.packed.packed_lm import Rows, split_index
from guided_spec.ops.attention.slot_attention import SharedPositions, SlotIndex


def num_blocks(batch: int, max_length: int) -> int:
    """Blocks of the memory: those of all texts, and block 0, which is in none."""
    return batch * (max_length // BLOCK + 1) + 1


def ragged_places(rows: Rows, size: int, max_length: int, device: torch.device) -> SlotIndex:
    """Rows in slots 0 to B - 1, in a line of ``size`` tokens of which the last may be unused.

    Their blocks are in any order, as they are once texts have come and gone.
    """
    batch = len(rows.slots)
    tables = torch.randperm(num_blocks(batch, max_length) - 1, device=device).int() + 1
    lines = split_index(torch.from_numpy(rows.packed_index(size, batch)).to(device), size)
    return SlotIndex(*lines, tables.view(batch, -1), max_length, size)


def places_of(
    starts: Sequence[int], width: int, max_length: int, device: torch.device, shared: int = 0
) -> SlotIndex:
    """Rows of ``width`` tokens each, from ``starts`` on, in texts of up to ``max_length``.

    Their blocks are in any order, as they are once texts have come and gone. shared: of their first
    positions, as far as they fill blocks, which all texts then have in common.
    """
    batch, whole = len(starts), shared // BLOCK
    rows, size = Rows(range(batch), starts, [width] * batch), batch * width
    places = replace(ragged_places(rows, size, max_length, device), width=width)
    if not whole:
        return places
    tables = places.tables
    tables[:, :whole] = tables[0, :whole].clone()
    groups = [SharedPrefix(tuple(range(batch)), whole * BLOCK)]
    alike = split_index(torch.from_numpy(rows.shared(size, groups)).to(device), size)
    return replace(places, shared=SharedPositions(*alike))
