"""Batches filled up to the size that a graph has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.ops.host_integers import host_integers

__all__ = ["pack_places", "pad_ids", "pad_rows", "pad_states", "pad_to"]


def pad_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor`` with zeros behind it in every dimension, up to ``shape``."""
    if tensor.shape == torch.Size(shape):
        return tensor
    room = [(0, wanted - size) for size, wanted in zip(tensor.shape, shape, strict=True)]
    return functional.pad(tensor, [side for pair in reversed(room) for side in pair])


def pad_ids(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """int64 [B, width] on the host, zeros behind each row."""
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return host_integers(padded).view(len(padded), width)


def pad_rows(tensor: Tensor, size: int) -> Tensor:
    """``tensor`` with zeros behind its last row, up to ``size`` rows."""
    return pad_to(tensor, (size, *tensor.shape[1:]))


def pack_places(rows: Sequence[Sequence[int]], size: int) -> Tensor:
    """int64 [len(rows), size] on the host; unused places behind the rows' own.

    rows: of B integers each, the slots before all others: -1 is what marks an unused place.

    Not pinned: so few bytes are staged by the driver, which costs less than pinned memory does.
    """
    missing = size - len(rows[0])
    first, *others = rows
    return host_integers([[*first, *[-1] * missing], *([*row, *[0] * missing] for row in others)])


def pad_states(states: Sequence[Tensor], width: int) -> Tensor:
    """[R, width, X] of R tensors [n, X], n at most ``width``; what is behind a row's end is any.

    As many launches for many rows as for one.
    """
    if len(states) == 1:
        return states[0].unsqueeze(0)
    counts = [len(state) for state in states]
    ends = itertools.accumulate(counts)
    rows = [
        [end - count + min(column, count - 1) for column in range(width)]
        for end, count in zip(ends, counts, strict=True)
    ]
    flat = torch.cat(list(states))
    return flat[host_integers(rows).to(flat.device, non_blocking=True)]
