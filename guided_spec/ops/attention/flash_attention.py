"""FlashAttention 3 over blocks of keys and values, for prompts, where it is installed.

Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and low-precision"
(2024). Its own package has the module ``flash_attn_interface``, for Hopper devices. It takes the
tables of the blocks as they are. What it computes is what ``slot_attention`` says.
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.ops.attention.slot_attention import KeyValues, SlotPlaces

MODULE = "flash_attn_interface"
LEAST_TOKENS = 1025  # of a line: up to here forwards are graphs, which it is not captured in
HOPPER = 9  # compute capability
DTYPES = (torch.bfloat16, torch.float16)


class Pages(NamedTuple):
    """What its kernel asks about the rows of a line, on their device.

    starts: int32 [R + 1], where each row begins in the line, and where the last one ends. lengths:
    int32 [R], positions of each text with the row's tokens. tables: int32 [R, P], of each row.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor

    @classmethod
    def of(cls, places: SlotPlaces) -> Pages:
        """Of the rows of a forward; nothing waits for the device."""
        slots, first, ends = places.rows
        starts = torch.nn.functional.pad(ends, (1, 0)).int()
        counts = starts.diff()
        lengths, used = first + counts, (counts > 0) & (slots >= 0)
        tables = places.tables[slots.clamp_min(0)]
        return cls(starts, lengths.where(used, 0).int(), tables)


@lru_cache(maxsize=1)
def _pages(places: SlotPlaces) -> Pages:
    """The same for all layers of a forward."""
    return Pages.of(places)


@cache
def is_installed() -> bool:
    """Whether there is FlashAttention 3 for the device in use."""
    return find_spec(MODULE) is not None and torch.cuda.get_device_capability()[0] == HOPPER


def serves(query: Tensor, buffers: KeyValues, places: SlotPlaces) -> bool:
    """Whether it takes a line [N, Hq, D] of the keys and values in these buffers."""
    is_long = len(query) >= LEAST_TOKENS and query.shape[2] % 8 == 0
    is_chain = places.fits and places.tree is None and places.shared is None
    has_dtype = query.dtype == buffers.keys.dtype and query.dtype in DTYPES
    can_run = is_long and is_chain and has_dtype and query.is_cuda and is_installed()
    return can_run and not torch.cuda.is_current_stream_capturing()


def flash_attention(
    query: Tensor, buffers: KeyValues, places: SlotPlaces, *, scale: float
) -> Tensor:
    """[N, Hq, D]: ``slot_attention`` of tokens whose keys and values are in the blocks.

    Arguments as there; each token sees all before it, none is in a tree or behind ``max_length``.
    """
    pages = _pages(places)
    keys, values = (buffer.transpose(1, 2) for buffer in buffers)
    attended: Tensor = importlib.import_module(MODULE).flash_attn_with_kvcache(
        query,
        keys,
        values,
        cache_seqlens=pages.lengths,
        page_table=pages.tables,
        cu_seqlens_q=pages.starts,
        max_seqlen_q=len(query),
        softmax_scale=scale,
        causal=True,
    )
    return attended
