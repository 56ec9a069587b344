"""The forward of a llama-like target over KV slots, in few kernels and without host work.

The stock module makes some sixty small launches a layer; this one makes a dozen, over the same
weights. It computes what the stock one does up to rounding, and serves where that one is not in the
way: a single CUDA device and plain weights. Everything in it depends on shapes and on tensors that
stay where they are, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from guided_spec.models.packed_layer import PackedLayer
from guided_spec.ops.pointwise import add_rms_norm, rms_norm
from guided_spec.ops.slot_attention import KeyValues, Rotation, SlotPlaces

__all__ = [
    "STATIC_ROPE",
    "PackedDecoder",
    "PackedOutput",
    "has_hooks",
    "has_whole_static_rope",
    "rotation_table",
]

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the same for texts of any length


class PackedOutput(NamedTuple):
    """One forward.

    states: [B, T, H] behind the final norm, what the output head takes.
    hidden_states: [B, T, len(layers) * H] as asked for; None if nothing was.
    """

    states: Tensor
    hidden_states: Tensor | None


def rotation_table(rotary: Any, states: Tensor, length: int) -> Rotation:
    """The rotary embeddings of positions 0 to ``length`` - 1.

    rotary: transformers' module. states: any tensor of the model's dtype and device.
    """
    positions = torch.arange(length, device=states.device).unsqueeze(0)
    cos, sin = rotary(states, positions)
    return Rotation(cos[0].contiguous(), sin[0].contiguous())


class PackedDecoder:
    """See the module's docstring; made by ``of``.

    model: of the family. max_length: tokens of a text. windows: [L] of the layers' attention.
    """

    def __init__(
        self, model: PreTrainedModel, max_length: int, windows: Sequence[int | None]
    ) -> None:
        stock: Any = model
        decoder, self._head = stock.get_decoder(), stock.get_output_embeddings()
        self._embed: nn.Embedding = decoder.embed_tokens
        self._layers = [
            PackedLayer(layer.self_attn, layer.mlp, window)
            for layer, window in zip(decoder.layers, windows, strict=True)
        ]
        self._eps: float = decoder.norm.variance_epsilon
        # Norm i stands before layer i, the last one behind all layers.
        self._norms = [layer.input_layernorm.weight for layer in decoder.layers]
        self._norms.append(decoder.norm.weight)
        self._inner_norms = [layer.post_attention_layernorm.weight for layer in decoder.layers]
        probe = self._embed.weight[:1].unsqueeze(0)
        self._rotation = rotation_table(decoder.rotary_emb, probe, max_length)

    @classmethod
    def of(
        cls, model: PreTrainedModel, max_length: int, windows: Sequence[int | None]
    ) -> PackedDecoder | None:
        """The packed form of ``model``; None where the model is not of the kind it serves."""
        return cls(model, max_length, windows) if _is_served(model) else None

    def forward(
        self,
        token_ids: Tensor,
        places: SlotPlaces,
        memory: Sequence[KeyValues],
        hidden_layers: Sequence[int] = (),
    ) -> PackedOutput:
        """Feed T tokens a row and keep their keys and values; nothing waits for the host.

        token_ids: int64 [B, T] on the device. memory: [L] the layers' slots.
        hidden_layers: as of ``CausalLM.forward``.
        """
        residual: Tensor = self._embed(token_ids)
        normed = rms_norm(residual, self._norms[0], self._eps)
        inputs = []
        for layer, kept, inner, outer in zip(
            self._layers, memory, self._inner_norms, self._norms[1:], strict=True
        ):
            inputs.append(residual)
            change = layer.attend(normed, self._rotation, kept, places)
            residual, normed = add_rms_norm(change, residual, inner, self._eps)
            residual, normed = add_rms_norm(layer.feed(normed), residual, outer, self._eps)
        inputs.append(residual)
        captured = [normed if index < 0 else inputs[index] for index in hidden_layers]
        return PackedOutput(normed, torch.cat(captured, -1) if captured else None)

    def logits(self, states: Tensor) -> Tensor:
        """``PackedOutput.states`` [..., H] to logits [..., V]."""
        scores: Tensor = self._head(states)
        return scores


def has_hooks(model: nn.Module) -> bool:
    """Whether hooks are registered on any module: a graph would pass them over.

    accelerate moves weights with them, and users look at states.
    """
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def has_whole_static_rope(config: Any) -> bool:
    """Whether whole heads are rotated, and alike in texts of any length."""
    rope = getattr(config, "rope_parameters", None) or {}
    is_static = rope.get("rope_type", "default") in STATIC_ROPE
    return is_static and rope.get("partial_rotary_factor", 1.0) == 1.0


def _is_served(model: PreTrainedModel) -> bool:
    stock: Any = model
    if type(model) not in FAMILY or len({p.device for p in model.parameters()}) != 1:
        return False
    if not has_whole_static_rope(model.config) or has_hooks(model):
        return False
    layers = stock.get_decoder().layers
    head = stock.get_output_embeddings()
    return type(head) is nn.Linear and all(PackedLayer.fits(x.self_attn, x.mlp) for x in layers)
