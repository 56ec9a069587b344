"""FlashAttention 3 over blocks of keys and values, for prompts, where it is installed.

Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and low-precision"
(2024). Its own package has the module ``flash_attn_interface``, for Hopper devices. It takes the
tables of the blocks as they are. What it computes is what ``slot_attention`` says.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex

MODULE = "flash_attn_interface"
# Of ``SlotIndex.width``: prompt rows, and rows that decode in the same step. No faster at others.
LEAST_WIDTH = 512
HOPPER = 9  # compute capability
DTYPES = (torch.bfloat16, torch.float16)


@cache
def is_installed() -> bool:
    """Whether there is FlashAttention 3 for the device in use."""
    return find_spec(MODULE) is not None and torch.cuda.get_device_capability()[0] == HOPPER


def serves(query: Tensor, buffers: KeyValues, index: SlotIndex) -> bool:
    """Whether it takes a line [N, Hq, D] of the keys and values in these buffers."""
    width = len(query) if index.width is None else index.width
    is_long = width >= LEAST_WIDTH and query.shape[2] % 8 == 0
    is_plain = index.fits and index.shared is None
    has_dtype = query.dtype == buffers.keys.dtype and query.dtype in DTYPES
    return is_long and is_plain and has_dtype and query.is_cuda and is_installed()


def flash_attention(query: Tensor, buffers: KeyValues, index: SlotIndex, *, scale: float) -> Tensor:
    """[N, Hq, D]: ``slot_attention`` of tokens whose keys and values are in the blocks.

    Arguments as there; each token sees all before it, none is beyond ``max_length``.
    """
    pages = index.pages
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
