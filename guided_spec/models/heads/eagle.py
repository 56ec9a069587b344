"""The draft head of EAGLE and EAGLE-2: one decoder layer over fused embeddings and features.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024. With the
target's hidden state h of position p after its final norm, and the embedding e of token p + 1:

    x = fc([e ; h])        layers(x) = y        logits = target's output head(y)

and y is the h of the next position. Layer 0 has no input norm, and there is no norm at the end.
EAGLE-2 drafts trees from the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from guided_spec.models.heads.config import (
    HeadShape,
    build_head_config,
    check_fit,
    derive_head_config,
)
from guided_spec.models.heads.draft_head import LayoutHead
from guided_spec.models.transformers_version import cache_keyword

__all__ = ["EagleHead", "EagleLayout"]


class EagleLayout(NamedTuple):
    """An EAGLE head without its weights; config: LlamaConfig of its layers."""

    config: Any
    draft_vocab_size: int
    aux_hidden_layers: tuple[int, ...] = (-1,)

    @classmethod
    def fresh(cls, target: PreTrainedModel, shape: HeadShape) -> EagleLayout:
        """Of a new head for ``target``. Raises ConfigError for a shape that cannot be."""
        config = derive_head_config(target, "llama", shape)
        return cls(config, config.vocab_size)

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        target: PreTrainedModel,
        source: str,
    ) -> EagleLayout:
        """Raises ModelError, naming ``source``, for sizes that are not the target's."""
        del tensors
        head = build_head_config(config, "llama", target, source)
        found = {"hidden_size": head.hidden_size, "vocab_size": head.vocab_size}
        check_fit(source, target, found)
        return cls(head, head.vocab_size)


class EagleHead(LayoutHead):
    """See the module's docstring; upstream's key "bias" of config.json is not looked at.

    Upstream reads a missing one as true, files of LLaMA 3 heads have no bias, and heads for Qwen2
    have biases in their attention.
    """

    layout_class = EagleLayout
    # Some converted files carry a copy of the target's output head, which upstream ignores.
    ignored = ("lm_head.weight",)

    def _build(self) -> Any:
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(self.config, index) for index in range(self.config.num_hidden_layers)
        )
        first: Any = self.layers[0]
        first.input_layernorm = nn.Identity()
        return LlamaRotaryEmbedding

    def features(self, hidden_states: Tensor) -> Tensor:
        """The target's last hidden states [..., H], after its final norm, in the head's dtype."""
        return hidden_states.to(self.fc.weight.dtype)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        *,
        module: int,
        position_ids: Tensor,
        attention_mask: Any,
        cache: Any,
    ) -> Tensor:
        """See ``DraftHead.forward``."""
        del module
        states: Tensor = self.fc(torch.cat([self.embed(token_ids).to(hidden.dtype), hidden], -1))
        rotations = self.rotary_emb(states, position_ids)
        for layer in self.layers:
            states = layer(
                states,
                attention_mask=attention_mask,
                position_embeddings=rotations,
                **cache_keyword(layer, cache),
            )
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., V], by the target's output head."""
        return self.score(hidden)
