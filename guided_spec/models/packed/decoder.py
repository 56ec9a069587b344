"""The forward of a llama-like target over KV slots, in few kernels and without host work.

The stock module makes some sixty small launches a layer; this one makes a dozen, over the same
weights. It computes what the stock one does up to rounding, for a single CUDA device and plain
weights. Everything in it depends on shapes and on tensors at fixed addresses, so that a CUDA graph
can hold it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.models.linear_layer import product
from guided_spec.models.lora.low_rank import adapters_of
from guided_spec.models.lora.slot_adapters import reading_adapters
from guided_spec.models.packed.feed import Feed
from guided_spec.models.packed.latent import PackedLatentLayer
from guided_spec.models.packed.layer import Norm, PackedDelta, PackedLayer, rotation_table
from guided_spec.models.pictures.embedding import deep_changes
from guided_spec.models.rope import has_static_rope, has_whole_rope
from guided_spec.models.stock.experts import using_few_experts
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder, recording_experts
from guided_spec.models.target import find_decoder, kind_of
from guided_spec.ops.attention.slot_attention import KeyValues, Rotation, SlotIndex, Window
from guided_spec.ops.delta_rule import DeltaStates
from guided_spec.ops.pointwise import add_branch, rms_norm

FAMILY = {
    *("llama", "mistral", "mixtral", "ministral", "cwm", "seed_oss", "smollm3", "arcee", "gpt_oss"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "mellum"),
    *("gemma", "gemma3", "olmo2", "olmo3", "olmoe", "flex_olmo", "phi3", "granite", "solar_open"),
    *("glm", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "dots1", "youtu"),
    *("ernie4_5", "exaone4", "exaone_moe", "helium", "hunyuan_v1_dense", "minimax_m2", "hy_v3"),
}
"""Kinds of transformers: those whose equations over long texts are the ones of short ones."""
# What a kind like Granite multiplies by: embeddings, what layers add; logits are divided.
EMBEDDING, RESIDUAL, LOGITS = "embedding_multiplier", "residual_multiplier", "logits_scaling"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")


LayerStates = KeyValues | DeltaStates  # what a layer keeps of the texts


class PackedOutput(NamedTuple):
    """One forward.

    states: [N, H] after the final norm, what the output head takes.
    hidden_states: [N, len(layers) * H] as asked for; None if nothing was.
    """

    states: Tensor
    hidden_states: Tensor | None


class Layer(Protocol):
    """What a layer computes between its norms: see ``PackedLayer``, and its kinds.

    memory: blocks of keys and values, or states, as the layer keeps one or the other.
    """

    feed: Feed

    def attend(
        self, states: Tensor, rotation: Rotation, memory: Any, index: SlotIndex
    ) -> Tensor: ...


BEFORE, INNER = "input_layernorm", "post_attention_layernorm"
# The names of a layer's norms, as of ``LayerNorms``; the first of these that are all there.
NORMS = (
    (BEFORE, "post_self_attn_layernorm", INNER, "post_mlp_layernorm"),
    (BEFORE, INNER, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, INNER, None, "post_feedforward_layernorm"),
    (BEFORE, None, INNER, None),
)


class LayerNorms(NamedTuple):
    """before, inner: of the states before attention and MLP; None where they take them as they are.

    attended, fed: of what attention and MLP give, before it is added.
    """

    before: Norm | None
    attended: Norm | None
    inner: Norm | None
    fed: Norm | None

    @classmethod
    def of(cls, layer: Any) -> LayerNorms:
        """The norms of a stock layer; Gemma has all four, Olmo those of what is added."""
        names = next(names for names in NORMS if all(hasattr(layer, n) for n in names if n))
        return cls(*(Norm.of(getattr(layer, name)) if name else None for name in names))


class _Block(NamedTuple):
    """A layer and its norms. outer: the norm after it. factor: of what attention and MLP add."""

    layer: Layer
    rotation: Rotation
    norms: LayerNorms
    outer: Norm | None
    factor: float


class PackedDecoder:
    """A llama-like target's forward over blocks, in few kernels; made by ``of``.

    model: of the family. max_length: tokens of a text. windows: [L] of the layers' attention.
    """

    runs_as = "packed forwards"

    def __init__(
        self, model: PreTrainedModel, max_length: int, windows: Sequence[Window | None]
    ) -> None:
        stock: Any = model
        decoder: Any = find_decoder(model)
        self._config = model.config
        self.device: torch.device = model.device
        self._head: nn.Linear = stock.get_output_embeddings()
        self._embed: nn.Embedding = decoder.embed_tokens
        self._scale = _multiplier(decoder, EMBEDDING)
        self._divisor = _multiplier(self._config.get_text_config(decoder=True), LOGITS)
        layers, rotations = decoder.layers, _rotations(model, decoder, max_length)
        norms = [LayerNorms.of(layer) for layer in layers]
        self._first, *outer = (one.before for one in norms)
        self._blocks = [
            _Block(_packed(layer, window), rotation, own, norm, _multiplier(layer, RESIDUAL))
            for layer, window, rotation, own, norm in zip(
                *(layers, windows, rotations, norms, [*outer, Norm.of(decoder.norm)]), strict=True
            )
        ]
        kinds = {
            _kind(layer, window, rotation): at
            for at, (layer, window, rotation) in enumerate(
                zip(layers, windows, rotations, strict=True)
            )
        }
        self._one_of_each = sorted(kinds.values())
        self.expert_layers, self.adapters = ExpertLayers.of(model), adapters_of(model)

    @classmethod
    def of(
        cls, model: PreTrainedModel, max_length: int, windows: Sequence[Window | None]
    ) -> PackedDecoder | None:
        """The packed form of ``model``; None where the model is not of the kind it serves."""
        return cls(model, max_length, windows) if _is_served(model, max_length) else None

    def forward(
        self,
        token_ids: Tensor,
        index: SlotIndex,
        memory: Sequence[LayerStates],
        hidden_layers: Sequence[int] = (),
        *,
        deepens: bool = False,
        recorder: ExpertRecorder | None = None,
    ) -> PackedOutput:
        """Feed N tokens and keep what layers keep of them; nothing waits for the host.

        token_ids: int64 [N] on the device. memory: [L] the layers' blocks, or their states.
        hidden_layers: as of ``CausalLM.forward``. deepens: whether layers add what they take of
            pictures, see ``PictureEmbedding``, which are among the tokens. recorder: of the experts
            that the layers choose.
        """
        with self._running(index, recorder):
            deep = deep_changes(self._embed, token_ids) if deepens else []
            given = (self._blocks, token_ids, index, memory, deep)
            states, inputs = self._through(*given, recorder)
        captured = [states if layer < 0 else inputs[layer] for layer in hidden_layers]
        return PackedOutput(states, torch.cat(captured, -1) if captured else None)

    def launch_kinds(
        self,
        token_ids: Tensor,
        index: SlotIndex,
        memory: Sequence[LayerStates],
        hidden_layers: Sequence[int] = (),
        *,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        """Launch each kernel of such a ``forward`` once: one layer of each kind has them all."""
        blocks = [self._blocks[at] for at in self._one_of_each]
        kept = [memory[at] for at in self._one_of_each]
        with self._running(index, recorder):
            states, _ = self._through(blocks, token_ids, index, kept, (), recorder)
            if recorder is not None:
                recorder.fill()
        if hidden_layers:
            torch.cat([states] * len(hidden_layers), -1)

    @contextmanager
    def _running(self, index: SlotIndex, recorder: ExpertRecorder | None) -> Iterator[None]:
        """What a forward of the tokens of ``index`` runs in."""
        with (
            using_few_experts(self._config),
            recording_experts(recorder),
            reading_adapters(self.adapters, index.tokens[0]),
        ):
            yield

    def _through(
        self,
        blocks: Sequence[_Block],
        token_ids: Tensor,
        index: SlotIndex,
        memory: Sequence[LayerStates],
        deep: Sequence[Tensor] = (),
        recorder: ExpertRecorder | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The states after the last norm; and those before each block, and after the last one.

        deep: [N, H] each, what is added to the first blocks' states.
        """
        residual: Tensor = self._embed(token_ids)
        residual = residual if self._scale == 1.0 else residual * self._scale
        normed = residual if self._first is None else rms_norm(residual, *self._first)
        inputs = []
        for at, (block, kept) in enumerate(zip(blocks, memory, strict=True)):
            layer, rotation, norms, outer, factor = block
            inputs.append(residual)
            change, attended = layer.attend(normed, rotation, kept, index), norms.attended
            residual, normed = add_branch(change, residual, attended, norms.inner, factor)
            change, then = layer.feed(normed, recorder), outer if at >= len(deep) else None
            residual, normed = add_branch(change, residual, norms.fed, then, factor)
            if at < len(deep):
                residual, normed = add_branch(deep[at], residual, None, outer)
        return normed, [*inputs, residual]

    @property
    def reads_groups(self) -> bool:
        """Whether some layers read what ``SharedPositions`` says once for all of a group."""
        return any(isinstance(block.layer, PackedLayer) for block in self._blocks)

    def states(self, num_slots: int, longest_draft: int) -> list[DeltaStates]:
        """Empty states of the layers that keep one a slot, in their order.

        longest_draft: see ``DeltaStates``.
        """
        like = self._embed.weight.detach().new_empty(0)
        return [
            DeltaStates.empty(block.layer.shape, num_slots, longest_draft, like)
            for block in self._blocks
            if isinstance(block.layer, PackedDelta)
        ]

    def logits(self, states: Tensor) -> Tensor:
        """``PackedOutput.states`` [..., H] to logits [..., V]."""
        scores = product(self._head, states)
        return scores if self._divisor == 1.0 else scores / self._divisor


@contextmanager
def refusing_waits() -> Iterator[None]:
    """RuntimeErrors for whatever waits for a CUDA device while it is open: no graph can hold it.

    Some experts are chosen by the host, and so are some steps of quantized weights.
    """
    before = torch.cuda.get_sync_debug_mode()
    with catch_warnings(action="ignore", category=UserWarning):  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def has_hooks(model: nn.Module) -> bool:
    """Whether hooks are registered on any module: a graph would pass them over.

    accelerate moves weights with them, and users look at states.
    """
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _packed(layer: Any, window: Window | None) -> Layer:
    if hasattr(layer, "linear_attn"):
        return PackedDelta(layer.linear_attn, layer.mlp)
    return attending_layer(layer, window)


def attending_layer(layer: Any, window: Window | None = None) -> PackedLayer | PackedLatentLayer:
    """The packed form of a stock layer that attends, for which ``fits_packed``."""
    if _is_latent(layer.self_attn):
        return PackedLatentLayer(layer.self_attn, layer.mlp)
    return PackedLayer(layer.self_attn, layer.mlp, window)


def _kind(layer: Any, window: Window | None, rotation: Rotation) -> Hashable:
    """A key that is equal for layers whose forwards launch the same kernels."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    tensors = tuple(
        (name, tensor.dtype, tensor.shape, tensor.stride())
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
    )
    return window, rotation.cos.shape, modules, tensors


def fits_packed(layer: Any) -> bool:
    """Whether a stock layer has a packed form."""
    if hasattr(layer, "linear_attn"):
        return PackedDelta.fits(layer.linear_attn)
    form: Any = PackedLatentLayer if _is_latent(layer.self_attn) else PackedLayer
    fits: bool = form.fits(layer.self_attn)
    return fits


def _is_latent(attention: Any) -> bool:
    return hasattr(attention, "kv_a_proj_with_mqa")


def _rotated_size(attention: Any) -> int:
    """Numbers of what is rotated: a head, or the rotary part of a latent key."""
    size: int = attention.qk_rope_head_dim if _is_latent(attention) else attention.head_dim
    return size


def _rotations(model: PreTrainedModel, decoder: Any, length: int) -> list[Rotation]:
    """[L] the rotary embedding of each layer, for positions up to ``length``."""
    attention = next(layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn"))
    size = _rotated_size(attention)
    config: Any = model.config.get_text_config(decoder=True)
    like, kinds = decoder.embed_tokens.weight[:1].unsqueeze(0), [None] * len(decoder.layers)
    if any(isinstance(one, dict) for one in config.rope_parameters.values()):
        kinds = config.layer_types
    tables = {kind: rotation_table(decoder.rotary_emb, like, length, kind) for kind in set(kinds)}
    for kind, table in tables.items():
        if table.cos.shape[1] * 2 == size and has_whole_rope(
            config
        ):  # some modules give one half, which is like the other
            tables[kind] = Rotation(*(torch.cat([part, part], 1) for part in table[:2]))
    return [
        tables[kind] if is_rotated(layer) else _unmoved(tables[kind])
        for layer, kind in zip(decoder.layers, kinds, strict=True)
    ]


def is_rotated(layer: Any) -> bool:
    """Whether a stock layer rotates anything: in SmolLM3 some do not, in Exaone whole ones."""
    attention: Any = layer.self_attn if hasattr(layer, "self_attn") else None
    if hasattr(attention, "use_rope"):
        return bool(attention.use_rope)
    is_whole = hasattr(attention, "is_sliding") and not attention.is_sliding
    return not (is_whole and attention.sliding_window is not None)


def _unmoved(rotation: Rotation) -> Rotation:
    """One that leaves all positions as they are: those beyond the first are rotated like it."""
    return Rotation(torch.ones_like(rotation.cos[:1]), torch.zeros_like(rotation.sin[:1]))


def _multiplier(owner: Any, name: str) -> float:
    return float(getattr(owner, name, 1.0))


def _is_served(model: PreTrainedModel, max_length: int) -> bool:
    stock: Any = model
    config: Any = model.config.get_text_config(decoder=True)
    if kind_of(model) not in FAMILY or len({p.device for p in model.parameters()}) != 1:
        return False
    if not has_static_rope(config, max_length) or has_hooks(model):
        return False
    is_capped = any(getattr(config, name, None) is not None for name in CAPS)
    if is_capped or getattr(config, "use_bidirectional_attention", False):
        return False
    decoder: Any = find_decoder(model)
    head = stock.get_output_embeddings()
    return type(head) is nn.Linear and all(map(fits_packed, decoder.layers))
