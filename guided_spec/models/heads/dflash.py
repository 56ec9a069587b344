"""The block head DFlash: one forward drafts a whole block, whose places see one another.

Chen, Liang and Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", 2026. With the
outputs of some of the target's layers at each position before the last token, and the embeddings of
the block [last token, mask, mask, ...]:

    c = hidden_norm(fc([outputs]))                                 ``features``
    k, v = k_proj(c), v_proj(c)                                    ``context``, of each layer
    n = input_layernorm(x)
    x = x + attention(q(n), [k of c ; k(n)], [v of c ; v(n)])      sees the context and the block
    x = x + mlp(post_attention_layernorm(x))                       ``forward``
    logits = the target's output head(norm(x))                     ``logits``

Queries and keys are normed and rotated as Qwen3's are. The output at a mask predicts the token of
that place. Checkpoints are those of z-lab: the keys of a Qwen3 configuration, ``block_size``, and
``target_layer_ids`` (layer i's output) and ``mask_token_id`` at the top level or in
``dflash_config``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.config import build_head_config, check_fit
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.weights import (
    check_quantization,
    fill_head,
    follow_biases,
    read_tensors,
)
from guided_spec.models.target import TargetEnds
from guided_spec.ops.slot_attention import KeyValues

__all__ = ["BlockContext", "DFlashHead", "DFlashLayout"]

SECTION = "dflash_config"
KNOWN = (
    "block_size",
    "final_logit_softcapping",
    "input_embedding_scale",
    "is_causal",
    "mask_token_id",
    "output_multiplier",
    "target_layer_ids",
)


class DFlashLayout(NamedTuple):
    """What the config.json of a DFlash head says.

    config: transformers configuration of its layers. aux_hidden_layers: see ``DraftHead``.
    block_size: places of a block, the last token's among them. mask_token_id: what stands in the
    others. is_causal: whether places of a block see only those before them; None: in layers with a
    window. embedding_scale, logit_scale, softcap: of embeddings and logits; softcap 0 is none.
    """

    config: Any
    aux_hidden_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    is_causal: bool | None
    embedding_scale: float
    logit_scale: float
    softcap: float

    @classmethod
    def read(cls, config: Mapping[str, Any], target: PreTrainedModel, source: str) -> DFlashLayout:
        """Raises ModelError, naming ``source``, for what is missing or unknown, or does not fit."""
        own: dict[str, Any] = config.get(SECTION) or {}
        unknown = sorted(own.keys() - set(KNOWN))
        if unknown:
            fix = f"expected {', '.join(KNOWN)}, found {', '.join(unknown)}"
            raise ModelError(f"checkpoint={source!r}: {SECTION}: {fix}; such heads are not read")
        found = {name: own.get(name, config.get(name)) for name in KNOWN}
        text_config: Any = target.config.get_text_config(decoder=True)
        depth, layers = text_config.num_hidden_layers, found["target_layer_ids"]
        if not layers or not all(0 <= index < depth for index in layers):
            raise ModelError(
                f"checkpoint={source!r}: target_layer_ids: expected layers 0 to {depth - 1} of the "
                f"target, found {layers}; pass a head for this target"
            )
        mask, size = found["mask_token_id"], found["block_size"] or 16
        embedding: Any = target.get_input_embeddings()
        if mask is None or not 0 <= mask < len(embedding.weight):
            raise ModelError(
                f"checkpoint={source!r}: mask_token_id: expected a row of the target's embedding, "
                f"found {mask}; pass a head for this target"
            )
        if size < 2:
            raise ModelError(f"checkpoint={source!r}: block_size: expected 2 or more, found {size}")
        head = build_head_config(config, "qwen3", target, source)
        expected = {name: getattr(text_config, name) for name in ("hidden_size", "vocab_size")}
        check_fit(source, expected, {name: getattr(head, name) for name in expected})
        is_causal = found["is_causal"]
        return cls(
            config=head,
            aux_hidden_layers=tuple(index + 1 for index in layers),
            block_size=int(size),
            mask_token_id=int(mask),
            is_causal=None if is_causal is None else bool(is_causal),
            embedding_scale=float(found["input_embedding_scale"] or 1.0),
            logit_scale=float(found["output_multiplier"] or 1.0),
            softcap=float(found["final_logit_softcapping"] or 0.0),
        )


class BlockContext(NamedTuple):
    """What the places of a block see of the text before it.

    layers: keys and values [R, Hkv, L, D] of each layer, rotated. lengths: int64 [R], how many of
    the L positions are the row's; the block begins behind them. Others hold zeros.
    """

    layers: Sequence[KeyValues]
    lengths: Tensor


class _Layer(nn.Module):
    """A decoder layer of Qwen3 over a block and its context."""

    def __init__(self, layout: DFlashLayout, index: int) -> None:
        super().__init__()
        config = layout.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = qwen3.Qwen3Attention(config, index)
        self.mlp = qwen3.Qwen3MLP(config)
        self.input_layernorm = qwen3.Qwen3RMSNorm(size, eps)
        self.post_attention_layernorm = qwen3.Qwen3RMSNorm(size, eps)
        is_sliding = config.layer_types[index] == "sliding_attention"
        self.window: int | None = config.sliding_window if is_sliding else None
        self.is_causal = is_sliding if layout.is_causal is None else layout.is_causal

    def keys_values(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> KeyValues:
        """[..., T, H] and rotations [..., T, D] to [..., T, Hkv, D] each."""
        attention = self.self_attn
        shape = (*states.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(states).view(shape))
        return KeyValues(_rotate(keys, rotation), attention.v_proj(states).view(shape))

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], context: KeyValues, visible: Tensor
    ) -> Tensor:
        """[R, T, H] to such; visible: bool [R, 1, T, L + T]."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        shape = (*normed.shape[:-1], -1, attention.head_dim)
        query = _rotate(attention.q_norm(attention.q_proj(normed).view(shape)), rotation)
        own = self.keys_values(normed, rotation)
        keys, values = (
            torch.cat([before, block.transpose(1, 2)], 2)
            for before, block in zip(context, own, strict=True)
        )
        found = functional.scaled_dot_product_attention(
            *(query.transpose(1, 2), keys, values, visible),
            scale=attention.scaling,
            enable_gqa=True,
        )
        x = x + attention.o_proj(found.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class DFlashHead(nn.Module):
    """See the module's docstring; made by ``from_checkpoint``.

    The embedding and the output head are the target's. vocabulary, num_modules: see ``DraftHead``.
    The parameters are on torch's current default device, with weights not yet set.
    """

    def __init__(
        self, layout: DFlashLayout, names: Collection[str], target: PreTrainedModel
    ) -> None:
        super().__init__()
        config = layout.config
        self.layout, self.config = layout, config
        self.hidden_size: int = config.hidden_size
        self.aux_hidden_layers = layout.aux_hidden_layers
        self.num_modules = 1
        self.vocabulary: DraftVocabulary | None = None
        self._target = TargetEnds(target)
        count = len(layout.aux_hidden_layers)
        self.fc = nn.Linear(count * self.hidden_size, self.hidden_size)
        self.hidden_norm = qwen3.Qwen3RMSNorm(self.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            _Layer(layout, index) for index in range(config.num_hidden_layers)
        )
        self.norm = qwen3.Qwen3RMSNorm(self.hidden_size, config.rms_norm_eps)
        follow_biases(self, names)
        with torch.device(target.device):
            self.rotary_emb = qwen3.Qwen3RotaryEmbedding(config)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target: PreTrainedModel) -> DFlashHead:
        """Load a head on the target's device and in its dtype, for inference.

        Raises ModelError, listing what was expected and what was found, for a checkpoint that is no
        DFlash head or was made for another target.
        """
        source = checkpoint.source
        check_quantization(checkpoint.config, source)
        layout = DFlashLayout.read(checkpoint.config, target, source)
        names = {name: name for name in sorted(checkpoint.names)}
        tensors = read_tensors(checkpoint, names, target.dtype)
        return fill_head(lambda: cls(layout, tensors, target), tensors, target, source)

    def features(self, hidden_states: Tensor) -> Tensor:
        """Target states [..., len(aux_hidden_layers) * H] fused to [..., H]."""
        fused: Tensor = self.hidden_norm(self.fc(hidden_states.to(self.norm.weight.dtype)))
        return fused

    def context(self, features: Tensor, position_ids: Tensor) -> list[KeyValues]:
        """Each layer's keys and values [N, Hkv, D] of features [N, H] at int64 [N] positions."""
        rotation = self._rotation(features.unsqueeze(0), position_ids.unsqueeze(0))
        rotation = rotation[0][0], rotation[1][0]
        layers: list[Any] = list(self.layers)
        return [layer.keys_values(features, rotation) for layer in layers]

    def forward(self, last: Tensor, width: int, context: BlockContext) -> Tensor:
        """The normed outputs [R, width, H] at the masks behind each row's last token, int64 [R].

        width: at most ``layout.block_size - 1``.
        """
        count, device = width + 1, last.device
        masks = last.new_full((len(last), width), self.layout.mask_token_id)
        x = self._target.embed(torch.cat([last.unsqueeze(1), masks], 1))
        x = x.to(self.norm.weight.dtype) * self.layout.embedding_scale
        steps = torch.arange(count, device=device)
        asking = context.lengths.unsqueeze(1) + steps  # [R, T]
        held = torch.arange(context.layers[0].keys.shape[2], device=device)
        stored = torch.cat([held.expand(len(last), -1), asking], 1)
        is_there = torch.cat(
            [held < context.lengths.unsqueeze(1), torch.ones_like(asking, dtype=torch.bool)], 1
        )
        distance = asking.unsqueeze(2) - stored.unsqueeze(1)
        rotation = self._rotation(x, asking)
        layers: list[Any] = list(self.layers)
        for layer, before in zip(layers, context.layers, strict=True):
            visible = is_there.unsqueeze(1).expand_as(distance)
            if layer.is_causal:
                visible = visible & (distance >= 0)
            if layer.window is not None:
                visible = visible & (distance.abs() < layer.window)
            x = layer(x, rotation, before, visible.unsqueeze(1))
        output: Tensor = self.norm(x[:, 1:])
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., H] to [..., V]."""
        scores = self._target.logits(hidden) * self.layout.logit_scale
        cap = self.layout.softcap
        return torch.tanh(scores / cap) * cap if cap > 0 else scores

    def _rotation(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary_emb(like, position_ids)
        return cos, sin


def _rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """[..., T, heads, D] by rotations [..., T, D]."""
    cos, sin = (part.unsqueeze(-2) for part in rotation)
    rotated: Tensor = states * cos + qwen3.rotate_half(states) * sin
    return rotated
