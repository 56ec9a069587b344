"""Attention masks by position for rows of any length, in the form each model takes them.

Which attention kernels serve batches whose shape changes from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guided_spec.errors import ModelError
from guided_spec.models.pictures.spans import last_seen
from guided_spec.ops.attention.slot_attention import Ahead, Window

UNMASKED = ("linear_attention", "conv")  # layers that keep a state


class MaskBuilder:
    """Builds what a model takes as ``attention_mask``: 4-D, or a mapping of them by layer type.

    config: the model's configuration. layer_types, windows: what ``SlotCache`` read from it.
    Raises ModelError for an attention implementation that takes no 4-D mask.
    """

    def __init__(self, config: Any, layer_types: list[str], windows: Mapping[str, Window]) -> None:
        implementation = config.get_text_config(decoder=True)._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ModelError(
                f"attn_implementation={implementation!r}: rows of different lengths need 'sdpa' or "
                "'eager'; load the model with one of these"
            )
        self._is_additive = implementation == "eager"
        kinds = set(layer_types) - {"dummy"}
        if "hybrid" in kinds:  # a state and keys in one layer, which takes a mask for each
            kinds = kinds - {"hybrid"} | {"full_attention", "linear_attention"}
        self._types = sorted(kinds)
        self._windows = windows

    def build(
        self, positions: Tensor, view: int, dtype: torch.dtype, ahead: Ahead | None = None
    ) -> Any:
        """The mask of queries at ``positions`` [B, T] over keys 0 to ``view`` - 1.

        Each [B, 1, T, view] on the device of ``positions``: bool for sdpa, ``dtype`` for eager.
        ahead: of rows of T tokens each; None where no token sees what comes later.
        """
        keys = torch.arange(view, device=positions.device)
        queries = positions[:, None, :, None]
        plain = reaching = keys <= queries
        if ahead is not None and ahead.spans:
            reaching = keys <= last_seen(positions, ahead)[:, None, :, None]
            plain = plain if ahead.windowed_only else reaching
        masks = {
            kind: self._mask(
                kind, reaching if kind in self._windows else plain, keys, queries, dtype
            )
            for kind in self._types
        }
        return next(iter(masks.values())) if len(masks) == 1 else masks

    def _mask(
        self, kind: str, visible: Tensor, keys: Tensor, queries: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        if kind in UNMASKED:
            return None
        window = self._windows.get(kind)
        if window is not None:
            visible = visible & (keys >= window.first(queries))
        if not self._is_additive:
            return visible
        hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return hidden.masked_fill_(~visible, torch.finfo(dtype).min)


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def shape_free_kernels() -> AbstractContextManager[None]:
    """Without cuDNN's attention, which builds a plan for every new shape.

    That takes some 25 ms for each forward and backward call on one H200 (torch 2.11), a hundred
    times what the attention itself takes, and here nearly every shape is new.
    """
    context: AbstractContextManager[None] = sdpa_kernel(KERNELS)
    return context
