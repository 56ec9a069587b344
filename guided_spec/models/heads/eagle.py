"""The draft head of EAGLE and EAGLE-2: one decoder layer over fused embeddings and features.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024. With the
target's hidden state h of position p after its final norm, and the embedding e of token p + 1:

    x = fc([e ; h])        layers(x) = y        logits = target's output head(y)

and y is the h of the next position. Layer 0 has no input norm, and there is no norm at the end.
EAGLE-2 drafts trees from the same weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.config import (
    HeadShape,
    build_head_config,
    check_fit,
    derive_head_config,
    initialize,
)
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.weights import (
    check_quantization,
    fill_head,
    follow_biases,
    read_tensors,
)
from guided_spec.models.target import TargetEnds
from guided_spec.models.transformers_version import cache_keyword

__all__ = ["EagleHead"]


class EagleHead(nn.Module):
    """See ``DraftHead``; made by ``from_checkpoint`` or ``fresh``.

    config: LlamaConfig of the layers. names: the tensors of the checkpoint. Biases exist where
    there are tensors for them: the key "bias" of config.json cannot be relied on (upstream reads a
    missing one as true, files of LLaMA 3 heads have no bias), and heads for Qwen2 have biases in
    their attention. An embedding that is not among the names is the target's, and no parameter.

    The parameters are on torch's current default device, with weights not yet set.
    """

    def __init__(self, config: Any, names: Collection[str], target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.aux_hidden_layers: tuple[int, ...] = (-1,)
        self.num_modules = 1
        self.vocabulary: DraftVocabulary | None = None
        self._target = TargetEnds(target)
        self.embed_tokens: nn.Embedding | None = None
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(config.vocab_size, self.hidden_size)
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        first: Any = self.layers[0]
        first.input_layernorm = nn.Identity()
        follow_biases(self, names)
        with torch.device(target.device):
            self.rotary_emb = LlamaRotaryEmbedding(config)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target: PreTrainedModel) -> EagleHead:
        """Load a head on the target's device and in its dtype, for inference.

        The target is not changed; its output head, and its embedding where the checkpoint has
        no other, are used as they are. Raises ModelError, listing what was expected and what was
        found, for a checkpoint that is no EAGLE head or was made for another target.
        """
        source = checkpoint.source
        check_quantization(checkpoint.config, source)
        config = build_head_config(checkpoint.config, "llama", target, source)
        text_config: Any = target.config.get_text_config(decoder=True)
        fields = ("hidden_size", "vocab_size")
        check_fit(
            source,
            {field: getattr(text_config, field) for field in fields},
            {field: getattr(config, field) for field in fields},
        )
        # Some converted files carry a copy of the target's output head, which upstream ignores.
        names = {name: name for name in sorted(checkpoint.names - {"lm_head.weight"})}
        read = read_tensors(checkpoint, names, target.dtype)
        tensors = TargetEnds(target).without_copy(read)
        return fill_head(lambda: cls(config, tensors, target), tensors, target, source)

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, shape: HeadShape | None = None) -> EagleHead:
        """A new head to be trained, on the target's device, in float32 and in train mode.

        shape: of its layers; None is one layer of the target's sizes. The embedding and the output
        head are the target's, and no parameters. There are no biases.

        The weights come from torch's generator as transformers draws them. Raises ConfigError for
        a shape that cannot be.
        """
        config = derive_head_config(target, "llama", shape or HeadShape())
        with torch.device(target.device):
            head = cls(config, (), target).float()
        initialize(head, config.initializer_range)
        return head

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
        embed = self._target.embed if self.embed_tokens is None else self.embed_tokens
        states: Tensor = self.fc(torch.cat([embed(token_ids).to(hidden.dtype), hidden], -1))
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
        return self._target.logits(hidden)
