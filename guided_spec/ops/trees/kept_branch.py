"""The accepted branch of a tree of tokens moves to where a text's next tokens belong.

A forward over a tree keeps the keys and values of all its tokens behind the text, in the order of
its row. Behind the verification those of one branch are the text's, and the others are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.ops.attention.slot_attention import KeyValues
from guided_spec.ops.kernels import has_triton, kernels_of


class LayerMemory(NamedTuple):
    """Layers whose buffers are alike.

    layers: keys and values [num_blocks, Hkv, block, D] each, contiguous. addresses: int64 [2 L] on
    their device, where each buffer begins.
    """

    layers: tuple[KeyValues, ...]
    addresses: Tensor

    @classmethod
    def group(cls, layers: Sequence[KeyValues]) -> tuple[LayerMemory, ...]:
        """All layers, in as few groups as their shapes and dtypes allow."""
        alike: dict[tuple[torch.Size, torch.dtype], list[KeyValues]] = {}
        for layer in layers:
            alike.setdefault((layer.keys.shape, layer.keys.dtype), []).append(layer)
        return tuple(cls.of(group) for group in alike.values())

    @classmethod
    def of(cls, layers: Sequence[KeyValues]) -> LayerMemory:
        """Of layers that are alike; the buffers must stay where they are."""
        found = [buffer.data_ptr() for layer in layers for buffer in layer]
        return cls(tuple(layers), torch.tensor(found, device=layers[0].keys.device))


def keep_branch(memory: LayerMemory, tables: Tensor, rows: Tensor, path: Tensor) -> None:
    """Move the keys and values of a branch of every row's tree behind one another.

    memory: changed in place. tables: see ``SlotPlaces``. rows: int64 [2, B], the slot of each row
        and the position of its first token, which stays.
    path: int64 [B, D], which token of its row comes to lie d + 1 places behind the first one,
        ascending in each row and never before that place; -1 where the branch has ended.

    All on one device; nothing waits for it.
    """
    if path.is_cuda and has_triton():
        like = memory.layers[0].keys
        kernels_of(__name__).keep_branch(memory.addresses, like, tables, rows, path)
    else:
        _keep(memory, tables, rows, path)


def _keep(memory: LayerMemory, tables: Tensor, rows: Tensor, path: Tensor) -> None:
    block = memory.layers[0].keys.shape[2]
    slots, starts = rows.unsqueeze(-1)
    steps = torch.arange(1, path.shape[1] + 1, device=path.device)
    # Where a branch has ended, the place is copied onto itself.
    to = starts + torch.where(path < 0, 0, steps)
    source = starts + path.clamp_min(0)
    found = [(tables[slots, at // block].long(), at % block) for at in (source, to)]
    for layer in memory.layers:
        for buffer in layer:
            (blocks, within), (to_blocks, to_within) = found
            buffer[to_blocks, :, to_within] = buffer[blocks, :, within]
