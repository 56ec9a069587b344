"""The forward of a llama-like target over KV slots, in few kernels and without host work.

The stock module makes some sixty small launches a layer; this one makes a dozen, over the same
weights. It computes what the stock one does up to rounding, and serves where that one is not in the
way: a single CUDA device and plain weights. Everything in it depends on shapes and on tensors that
stay where they are, so that a CUDA graph can hold it.

The attention and the MLP of a stock decoder layer, with their projections side by side.

Queries, keys and values come from one matrix product, gate and up from another: fewer and larger
products read the weights faster when there are few tokens. The packed weights take the place of the
stock ones, whose parameters become views of them; so nothing is stored twice, and the stock layer
computes what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from guided_spec.ops.pointwise import add_rms_norm, rms_norm, rotate_and_store, silu_mul_packed
from guided_spec.ops.slot_attention import (
    HeadNorms,
    HeadShape,
    KeyValues,
    Rotation,
    SlotPlaces,
    slot_attention,
)

__all__ = [
    "STATIC_ROPE",
    "PackedDecoder",
    "PackedLayer",
    "PackedOutput",
    "has_hooks",
    "has_whole_static_rope",
    "rotation_table",
]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class PackedLayer:
    """What a stock layer computes between its norms.

    attention, mlp: of the llama family of transformers: projections q, k, v, o and gate, up, down,
        SiLU, rotary embedding over whole heads. window: of sliding attention, None for all keys.
    """

    def __init__(self, attention: Any, mlp: Any, window: int | None = None) -> None:
        size: int = attention.head_dim
        self.shape = HeadShape(
            attention.q_proj.out_features // size, attention.k_proj.out_features // size, size
        )
        self._qkv = _pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = _pack([mlp.gate_proj, mlp.up_proj])
        self._output, self._down = attention.o_proj, mlp.down_proj
        self._scale: float = attention.scaling
        self._window = window
        self._norms = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm, attention.k_norm
            self._norms = HeadNorms(query.weight, key.weight, query.variance_epsilon)

    @staticmethod
    def fits(attention: Any, mlp: Any) -> bool:
        """Whether the two are of the kind described above, with plain weights."""
        linears = [getattr(attention, name, None) for name in PROJECTIONS]
        linears += [getattr(mlp, name, None) for name in MLP_PROJECTIONS]
        is_silu = isinstance(getattr(mlp, "act_fn", None), type(ACT2FN["silu"]))
        has_size = getattr(attention, "head_dim", 1) % 2 == 0 and hasattr(attention, "scaling")
        return is_silu and has_size and all(map(_is_plain, linears))

    def attend(
        self, states: Tensor, rotation: Rotation, memory: KeyValues, places: SlotPlaces
    ) -> Tensor:
        """Normed states [N, X] to the attention's output [N, H].

        rotation: of all positions. memory: the layer's blocks, where the tokens' keys and values
            are kept.
        """
        packed = functional.linear(states, *self._qkv)
        query = rotate_and_store(packed, rotation, self.shape, self._norms, memory, places)
        mixed = slot_attention(query, None, memory, places, scale=self._scale, window=self._window)
        output: Tensor = self._output(mixed.flatten(1))
        return output

    def feed(self, states: Tensor) -> Tensor:
        """Normed states [N, H] to the MLP's output [N, H]."""
        output: Tensor = self._down(silu_mul_packed(functional.linear(states, *self._gate_up)))
        return output


class PackedWeights(NamedTuple):
    """Of several linear maps of one input: [sum of outputs, inputs], and [sum of outputs]."""

    weight: Tensor
    bias: Tensor | None


def _is_plain(linear: Any) -> bool:
    """A quantized weight may stand in a plain linear layer, as a tensor of its own kind."""
    return type(linear) is nn.Linear and type(linear.weight.data) is Tensor


def _pack(linears: Sequence[nn.Linear]) -> PackedWeights:
    parts = [linear.weight.data for linear in linears]
    weight = _joined(parts)
    if weight is None:
        weight = torch.cat(parts)
        split = weight.split([len(part) for part in parts])
        for linear, view in zip(linears, split, strict=True):
            linear.weight.data = view
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return PackedWeights(weight, None)
    filled = [
        weight.new_zeros(len(part)) if bias is None else bias.data
        for part, bias in zip(parts, biases, strict=True)
    ]
    return PackedWeights(weight, torch.cat(filled))


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parts that lie behind one another already, as another user left them."""
    first, width = parts[0], parts[0].shape[1]
    end = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, width), (width, 1))


FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the same for texts of any length


class PackedOutput(NamedTuple):
    """One forward.

    states: [N, H] behind the final norm, what the output head takes.
    hidden_states: [N, len(layers) * H] as asked for; None if nothing was.
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
        """Feed N tokens and keep their keys and values; nothing waits for the host.

        token_ids: int64 [N] on the device. memory: [L] the layers' blocks.
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
