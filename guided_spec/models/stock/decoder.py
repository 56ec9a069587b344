"""The forward of any stock decoder over KV slots, with attention and experts alone replaced.

For models that ``packed.decoder`` does not know. The stock modules run as they are, without
a cache and without masks, so that a CUDA graph can hold them.

transformers asks a table for the attention function that a configuration names. The one that is
registered here writes the new keys and values into the buffers that ``attending`` names and attends
over them, by ``guided_spec.ops.attention.slot_attention``:

    with using_slot_attention(model.config), attending(buffers, index):
        model(input_ids=token_ids, position_ids=positions, use_cache=False)

transformers builds no mask for an attention function without an entry in its table of masks
(``AttentionMaskInterface``), so there must be none. Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.lora.low_rank import adapters_of
from guided_spec.models.lora.slot_adapters import reading_adapters
from guided_spec.models.packed.decoder import (
    LayerStates,
    PackedOutput,
    has_hooks,
)
from guided_spec.models.pictures.axes import counts_axes
from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.models.rope import has_static_rope
from guided_spec.models.stock.experts import using_few_experts
from guided_spec.models.stock.kv_cache import unscaled_length
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder, recording_experts
from guided_spec.models.stock.slot_trial import CheckedEmbeddings
from guided_spec.models.target import capture_hidden, find_decoder, implementing
from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex, Window, slot_attention
from guided_spec.ops.delta_rule import DeltaStates

SLOT_ATTENTION = "guided_spec_slots"

# Arguments of an attention function that change its result, and what to call them.
REFUSED = {
    "softcap": "a cap on the scores (softcap)",
    "position_bias": "a position bias",
    "attention_mask": "a mask of its own",
}


class Attended(NamedTuple):
    """What the current forward attends to: one pair of buffers for each layer."""

    buffers: Sequence[KeyValues]
    slot_index: SlotIndex


class _Current(threading.local):
    attended: Attended | None = None


_current = _Current()


@contextmanager
def attending(buffers: Sequence[KeyValues], index: SlotIndex) -> Iterator[None]:
    """Say what forwards with slot attention attend to, in this thread, while it is open.

    buffers: of layer i at index i, [num_blocks, Hkv, block, D] each; the forward writes to them.
    index: where its tokens belong. They are one flat sequence: the model gets a batch of one.
    """
    before = _current.attended
    _current.attended = Attended(buffers, index)
    try:
        yield
    finally:
        _current.attended = before


@contextmanager
def using_slot_attention(config: Any) -> Iterator[None]:
    """Make the decoder of ``config`` attend over slots while it is open; then as before.

    config: a model's own configuration object, which its layers share. Only the text part of a
    multimodal one changes. Not to be entered for one configuration by two threads at a time.
    """
    with implementing(config, "attn", SLOT_ATTENTION):
        yield


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [1, Hq, N, D], key and value [1, Hkv, N, D] of new tokens.

    Raises ModelError for what slots do not support, and outside ``attending``.
    """
    attended = _current.attended
    if attended is None:
        raise ModelError(f"attn_implementation={SLOT_ATTENTION!r} works inside attending() only")
    _refuse(module, {**options, "attention_mask": attention_mask})
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        widths = f"{query.shape[3]}, {key.shape[3]} and {value.shape[3]}"
        raise ModelError(f"queries, keys and values of different sizes ({widths}) need another way")
    layer: Any = module.layer_idx
    if not 0 <= layer < len(attended.buffers):
        raise ModelError(f"layer {layer} attends, but there are {len(attended.buffers)} buffers")
    scaling = options.get("scaling")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    found = slot_attention(
        query,
        KeyValues(key, value),
        attended.buffers[layer],
        attended.slot_index,
        scale=query.shape[2] ** -0.5 if scaling is None else scaling,
        window=_window(module, options.get("sliding_window")),
        sinks=options.get("s_aux"),
    )
    return found.unsqueeze(0), None


def _refuse(module: nn.Module, options: dict[str, Any]) -> None:
    kind = _model_type(module)
    for name, feature in REFUSED.items():
        if options.get(name) is not None:
            raise ModelError(
                f"model_type={kind!r}: attention over slots does not support {feature}"
            )
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise ModelError(f"model_type={kind!r}: attention over slots does not look ahead")


def _window(module: nn.Module, passed: int | None) -> Window | None:
    """The window of a layer; ``passed`` by the model to its attention function.

    A model may pass its window in layers that do not slide, where its mask would not cut.
    """
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return None if passed is None else Window(passed)
    layer: Any = module.layer_idx
    if types[layer] == "full_attention":
        return None
    if types[layer] == "sliding_attention" and passed is not None:
        return Window(passed)
    chunk = getattr(config, "attention_chunk_size", None)
    if types[layer] == "chunked_attention" and chunk is not None:
        return Window(chunk, is_chunk=True)
    raise ModelError(
        f"model_type={_model_type(module)!r}: layer {layer} is of type {types[layer]!r} and passes "
        "no window to its attention function, so attention over slots cannot apply it"
    )


def _model_type(module: nn.Module) -> str | None:
    config: Any = getattr(module, "config", None)
    return getattr(config, "model_type", None)


AttentionInterface.register(SLOT_ATTENTION, _attend)


PROBE = (1, 2, 3, 5)  # token ids


class StockDecoder:
    """A stock decoder's forward over blocks; made by ``of``, with ``PackedDecoder``'s methods."""

    runs_as = "stock modules over blocks"
    reads_groups = True  # see ``PackedDecoder.reads_groups``

    def __init__(self, model: PreTrainedModel) -> None:
        stock: Any = model
        self._config = model.config
        self._decoder = find_decoder(model)
        self.device: torch.device = model.device
        self._head: nn.Module = stock.get_output_embeddings()
        self._embed: nn.Module = stock.get_input_embeddings()
        self._has_axes = counts_axes(model)
        self._most = unscaled_length(model.config)
        self.expert_layers, self.adapters = ExpertLayers.of(model), adapters_of(model)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, max_length: int) -> StockDecoder | None:
        """For ``model`` and texts of so many tokens; None where it has no such form.

        That is by its kind, or because it computes more after its output head. ``SlotTrial`` then
        tests whether the form is right. Raises IndexError where the model has no position for so
        long a text.
        """
        if not _may_be_served(model):
            return None
        decoder, stock = cls(model), cast(Any, model)
        ids = torch.tensor([PROBE], device=model.device)
        expected: Tensor = stock(input_ids=ids, use_cache=False).logits
        states = decoder._decoder(input_ids=ids, use_cache=False).last_hidden_state
        last = torch.full_like(ids, max_length - 1)
        with CheckedEmbeddings():
            decoder._decoder(input_ids=ids, position_ids=last, use_cache=False)
        # By itself, and exactly: half precision would hide what a model does after its head.
        return decoder if torch.equal(decoder.logits(states), expected) else None

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
        """The states and hidden states of N tokens, see ``PackedDecoder.forward``."""
        if self._most is not None and len(token_ids) > self._most:
            # Their rows in the forward count as positions.
            raise ModelError(f"{len(token_ids)} tokens in a forward: lower prefill_tokens")
        positions = index.positions.clamp_max(index.max_length - 1).unsqueeze(0)
        if self._has_axes and index.on_axes is not None:
            positions = index.on_axes.T.unsqueeze(1)
        more = {}
        if deepens and isinstance(self._embed, PictureEmbedding):
            more = self._embed.deep_arguments(token_ids.unsqueeze(0))
        kept = [one for one in memory if isinstance(one, KeyValues)]
        with (
            using_slot_attention(self._config),
            using_few_experts(self._config),
            attending(kept, index),
            capture_hidden(self._decoder, hidden_layers) as captured,
            recording_experts(recorder),
            reading_adapters(self.adapters, index.tokens[0]),
        ):
            output: Any = self._decoder(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions,
                use_cache=False,
                **more,
            )
        hidden = torch.cat(captured, -1)[0] if captured else None
        return PackedOutput(output.last_hidden_state[0], hidden)

    launch_kinds = forward  # which of its layers launch the same kernels is not known

    def states(self, num_slots: int, longest_draft: int) -> list[DeltaStates]:
        """None: all of its layers attend."""
        del num_slots, longest_draft
        return []

    def logits(self, states: Tensor) -> Tensor:
        """States [..., H] to the logits [..., V]; see ``PackedDecoder.logits``."""
        scores: Tensor = self._head(states)
        return scores


def _may_be_served(model: PreTrainedModel) -> bool:
    stock: Any = model
    if not has_static_rope(model.config.get_text_config(decoder=True)) or has_hooks(model):
        return False
    is_on_one_device = len({p.device for p in model.parameters()}) == 1
    return is_on_one_device and isinstance(stock.get_output_embeddings(), nn.Module)
