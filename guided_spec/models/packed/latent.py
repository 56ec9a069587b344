"""Multi-head latent attention of a stock layer, in few kernels over the same weights.

DeepSeek-V2 and V3, and families with the same modules. A token's latent and rotary key alone are
kept, as transformers caches them; the matrices that would expand a latent are folded into query
and output, see ``guided_spec.ops.attention.latent_attention``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from guided_spec.models.linear_layer import product
from guided_spec.models.lora.low_rank import LoraLinear
from guided_spec.models.packed.blocks import KeptShape
from guided_spec.models.packed.feed import feed_of
from guided_spec.models.packed.layer import Norm
from guided_spec.models.packed.weights import can_be_joined, is_plain, pack
from guided_spec.models.quantized.linears import QUANTIZED
from guided_spec.models.target import kind_of
from guided_spec.ops.attention.latent_attention import (
    LatentKeys,
    LatentQueries,
    keep_latents,
    latent_attention,
)
from guided_spec.ops.attention.slot_attention import KeyValues, Rotation, SlotIndex
from guided_spec.ops.pointwise import rms_norm

COMPLEX = "deepseek_v2"
KINDS = (COMPLEX, "deepseek_v3", "glm4_moe_lite", "youtu")


class PackedLatentLayer:
    """The latent attention and the MLP of a stock layer; attention: for which ``fits``."""

    def __init__(self, attention: Any, mlp: Any) -> None:
        first, self._second = _query_projections(attention)
        down = attention.kv_a_proj_with_mqa
        parts = [[first, down]] if can_be_joined([first, down]) else [[first], [down]]
        self._down = [pack(part) for part in parts]
        self._split = [first.out_features, down.out_features]
        self._query_norm = None if self._second is None else Norm.of(attention.q_a_layernorm)
        self._sizes = [attention.qk_nope_head_dim, attention.qk_rope_head_dim]
        # DeepSeek-V2 rotates complex numbers, which stay next to their imaginary parts.
        is_complex = kind_of(attention) == COMPLEX
        norm = Norm.of(attention.kv_a_layernorm)
        self._keys = LatentKeys(
            norm.weight,
            norm.eps,
            reads_pairs=is_complex or attention.config.rope_interleave,
            writes_pairs=is_complex,
        )
        expand = _whole(attention.kv_b_proj, norm.weight.dtype)
        # [Hq, D, C] each: what makes keys, and values, of a latent.
        sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
        self._expand = expand.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
        self._output = attention.o_proj
        self._scale: float = attention.scaling
        self.kept = KeptShape(1, attention.kv_lora_rank, attention.qk_rope_head_dim)
        self.feed = feed_of(mlp)

    @staticmethod
    def fits(attention: Any) -> bool:
        """Whether the attention is of a known kind, with plain weights."""
        if kind_of(attention) not in KINDS or attention.qk_rope_head_dim % 2:
            return False
        if isinstance(attention.kv_b_proj, LoraLinear):  # its matrix is folded into others
            return False
        linears = [*_query_projections(attention), attention.kv_a_proj_with_mqa]
        linears += [attention.kv_b_proj, attention.o_proj]
        return all(map(is_plain, (one for one in linears if one is not None)))

    def attend(
        self, states: Tensor, rotation: Rotation, memory: KeyValues, index: SlotIndex
    ) -> Tensor:
        """Normed states [N, X] to the attention's output [N, H].

        rotation: of all positions. memory: the layer's latents and rotary keys, where the tokens'
            own are kept.
        """
        found = [one.product(states) for one in self._down]
        asked, packed = found if len(found) == 2 else found[0].split(self._split, 1)
        if self._second is not None:
            assert self._query_norm is not None
            asked = product(self._second, rms_norm(asked, *self._query_norm))
        plain, rotary = asked.unflatten(1, (-1, sum(self._sizes))).split(self._sizes, 2)
        rotary = keep_latents(rotary, packed, self._keys, rotation, memory, index)
        for_keys, for_values = self._expand
        latent = torch.bmm(plain.transpose(0, 1), for_keys).transpose(0, 1)
        seen = latent_attention(LatentQueries(latent, rotary), memory, index, scale=self._scale)
        mixed = seen.new_empty(len(seen), *for_values.shape[:2])
        torch.bmm(seen.transpose(0, 1), for_values.mT, out=mixed.transpose(0, 1))
        return product(self._output, mixed.flatten(1))


def _query_projections(attention: Any) -> tuple[Any, Any]:
    """What makes queries of states: one map and None, or two with a norm between."""
    if attention.q_lora_rank is None:
        return attention.q_proj, None
    return attention.q_a_proj, attention.q_b_proj


def _whole(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] of a linear layer; a quantized one is multiplied out."""
    if isinstance(layer, QUANTIZED):
        return layer.numbers.whole(dtype)
    weight: Tensor = layer.weight.data
    return weight
