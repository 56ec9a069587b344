"""Latents of tokens in one line over slots of blocks, drawn as ``slot_lines`` draws keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.ops.attention.latent_attention import LatentKeys, LatentQueries
from guided_spec.ops.attention.slot_attention import KeyValues, Rotation, SlotIndex
from tests.slot_lines import Case, cases, make


class Widths(NamedTuple):
    """Numbers of a latent, and of a rotary key: even."""

    latent: int
    rotary: int


class LatentData(NamedTuple):
    """The tensors of a call, as a model's projections have them."""

    query: LatentQueries
    packed: Tensor
    buffers: KeyValues
    places: SlotIndex
    keys: LatentKeys
    rotation: Rotation

    def clone(self) -> LatentData:
        """One with buffers of its own."""
        return self._replace(buffers=KeyValues(*(buffer.clone() for buffer in self.buffers)))

    def kept_in(self, dtype: torch.dtype) -> LatentData:
        """One with buffers of this dtype, what they hold rounded."""
        return self._replace(buffers=KeyValues(*(buffer.to(dtype) for buffer in self.buffers)))


@st.composite
def latent_cases(
    draw: st.DrawFn, widths: Sequence[Widths], longest: int = 20
) -> tuple[Case, Widths]:
    """One head of keys, whose group is all heads."""
    chosen = draw(st.sampled_from(widths))
    case = draw(cases(longest, [sum(chosen)]))
    group = draw(st.sampled_from([1, 3, 4, 5, 16]))
    return case._replace(num_kv_heads=1, group=group, window=None, has_sinks=False), chosen


def make_latents(
    case: Case,
    widths: Widths,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    *,
    pairs: tuple[bool, bool] = (True, False),
) -> LatentData:
    """The tensors of a case. pairs: what the rotation reads and writes, see ``LatentKeys``."""
    data = make(case, num_slots=max(4, 1 + max(span.slot for span in case.spans)))
    data = data.to(dtype)
    data = data if device is None else data.to(device)
    sizes, place = [*widths], data.query.device
    turned = torch.randn(case.max_length, widths.rotary // 2).repeat(1, 2)
    rotation = Rotation(turned.cos().to(place, dtype), turned.sin().to(place, dtype))
    keys = LatentKeys(torch.rand(widths.latent).to(place, dtype), 1e-6, *pairs)
    buffers = KeyValues(
        *(buffer[..., :size].contiguous() for buffer, size in zip(data.buffers, sizes, strict=True))
    )
    query = LatentQueries(*data.query.split(sizes, 2))
    return LatentData(query, data.new.keys[:, 0], buffers, data.places, keys, rotation)
