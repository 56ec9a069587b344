"""The draft heads of EAGLE, EAGLE-2 and EAGLE-3: decoder layers over embeddings and features.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024. With the
target's hidden state h of position p after its final norm, and the embedding e of token p + 1:

    x = fc([e ; h])        layers(x) = y        logits = target's output head(y)

and y is the h of the next position. Layer 0 has no input norm, and there is no norm at the end.
EAGLE-2 drafts trees from the same weights.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", 2025. With hidden states l, m, h of a low, a middle and a high layer of the target at
position p, and the embedding e of token p + 1:

    g = fc([l ; m ; h])                                           ``features``, target states only
    n = hidden_norm(g)
    x = g + attention([input_layernorm(e) ; n])                   n + ..., if norm_before_residual
    y = x + mlp(post_attention_layernorm(x))                      ``forward``
    logits = lm_head(norm(y))                                     ``logits``

and y is the g of the next position; with norm_output (EAGLE 3.1) norm(y) is. Further layers are
ordinary ones over y. Checkpoints of SafeAILab and SpecForge call the layer ``midlayer``, those of
speculators ``layers.0``.

P-EAGLE recycles nothing: the last position of a text is followed by K - 1 more whose token is
``mask_token_id`` and whose g is fc(mask_hidden). They go through the layers together, causally, and
each predicts the token after the one that the position before it predicts.

The config.json of an EAGLE-3 head describes its layer at the top level, with an optional
``eagle_config`` (SafeAILab, SpecForge), or in ``transformer_layer_config``, with its flags at the
top level (speculators).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.heads.config import (
    CLASSES,
    HeadShape,
    build_head_config,
    check_fit,
    derive_head_config,
)
from guided_spec.models.heads.draft_head import (
    MASK,
    DraftVocabulary,
    HeadArguments,
    LayoutHead,
    layer_run,
    product_input,
)
from guided_spec.models.linear_layer import product
from guided_spec.models.transformers_version import cache_keyword
from guided_spec.types import require_int


class EagleLayout(NamedTuple):
    """An EAGLE head without its weights; config: LlamaConfig of its layers."""

    config: Any
    draft_vocab_size: int
    aux_hidden_layers: tuple[int, ...] = (-1,)

    @classmethod
    def fresh(cls, target: PreTrainedModel, shape: HeadShape) -> EagleLayout:
        """The layout of a new head for ``target``. Raises ConfigError for an invalid shape."""
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
    """An EAGLE head. The key "bias" of config.json is ignored.

    Upstream reads a missing one as true, files of LLaMA 3 heads have no bias, and heads for Qwen2
    have biases in their attention.
    """

    layout_class = EagleLayout
    # Some converted files hold a copy of the target's output head, which upstream ignores.
    ignored = ("lm_head.weight",)

    def _build(self) -> Any:
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size)
        self.layers = nn.ModuleList(
            llama.LlamaDecoderLayer(self.config, index)
            for index in range(self.config.num_hidden_layers)
        )
        first: Any = self.layers[0]
        first.input_layernorm = nn.Identity()
        return llama.LlamaRotaryEmbedding

    def features(self, hidden_states: Tensor) -> Tensor:
        """The target's last hidden states [..., H], after its final norm, in the head's dtype."""
        return hidden_states.to(self.fc.weight.dtype)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, **arguments: Unpack[HeadArguments]
    ) -> Tensor:
        """The recycled states [B, T, H], see ``DraftHead.forward``."""
        states: Tensor = self.fc(torch.cat([self.embed(token_ids).to(hidden.dtype), hidden], -1))
        rotations = self.rotary_emb(states, arguments["position_ids"])
        for layer in self.layers:
            states = layer(
                states,
                attention_mask=arguments["attention_mask"],
                position_embeddings=rotations,
                **cache_keyword(layer, arguments["cache"]),
            )
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., V], by the target's output head."""
        return self.score(hidden)


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLAGS = ("use_aux_hidden_state", *NORM_FLAGS)
MASK_NAMES = ("mask_token_id", "pard_token", "ptd_token_id")


class Eagle3Layout(NamedTuple):
    """An EAGLE-3 head without its weights.

    config: transformers configuration of its layers. aux_hidden_layers: see ``DraftHead``.
    target_hidden_size: width of one of these hidden states. draft_vocab_size: D.
    use_aux_hidden_state: whether there is an ``fc``; else the head is fed as EAGLE is.
    norm_before_fc: one norm over all that ``fc`` reads. fc_norm: one for each hidden state.
    norm_before_residual: whether the residual stream starts after ``hidden_norm``.
    norm_output: whether the output of the final norm is what is recycled.
    mask_token_id: the token at the positions that P-EAGLE drafts at once; None: it drafts none so.
    """

    config: Any
    aux_hidden_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    use_aux_hidden_state: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    mask_token_id: int | None = None

    @classmethod
    def fresh(
        cls,
        target: PreTrainedModel,
        shape: HeadShape = HeadShape(),  # noqa: B008 - a tuple, never changed
        model_type: str = "llama",
        aux_hidden_layers: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        **flags: bool,
    ) -> Eagle3Layout:
        """The layout of a new head for ``target``, as wide as it.

        model_type: of its layers, "llama" or "qwen3". aux_hidden_layers: by default
        (2, n // 2, n - 3) of the target's n, as all runtimes have it, or what a shallow target has
        of these. draft_vocab_size: D; by default all of the target's tokens. flags: as of the
        layout, of its norms; False by default.

        Raises ConfigError, naming the option, for what cannot be made.
        """
        text_config: Any = target.config.get_text_config(decoder=True)
        if model_type not in CLASSES:
            fix = f"must be one of {', '.join(sorted(CLASSES))}"
            raise ConfigError("model_type", model_type, fix)
        chosen = dict.fromkeys(NORM_FLAGS, False) | flags
        if chosen["norm_before_fc"] and chosen["fc_norm"]:
            fix = "excludes norm_before_fc: choose one of the two"
            raise ConfigError("fc_norm", chosen["fc_norm"], fix)
        largest = text_config.vocab_size
        if draft_vocab_size is not None and not 1 <= draft_vocab_size <= largest:
            fix = f"must be 1 to {largest}, the size of the target's vocabulary"
            raise ConfigError("draft_vocab_size", draft_vocab_size, fix)
        return cls(
            config=derive_head_config(target, model_type, shape),
            aux_hidden_layers=_choose_layers(aux_hidden_layers, text_config.num_hidden_layers),
            target_hidden_size=text_config.hidden_size,
            draft_vocab_size=draft_vocab_size or largest,
            use_aux_hidden_state=True,
            **chosen,
        )

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        target: PreTrainedModel,
        source: str,
    ) -> Eagle3Layout:
        """Read config.json; ``tensors`` say how many hidden states ``fc`` takes.

        Raises ModelError, naming ``source``, for layers of another kind and for another target.
        """
        eagle = config.get("eagle_config") or {}
        layer = config.get("transformer_layer_config")
        if layer is None:
            # Much of such a config.json is often copied from the target: the layer is Llama's
            # whatever model_type says, and attends to everything whatever layer_types says.
            values, model_type = {"num_hidden_layers": 1, **config, "layer_types": None}, "llama"
        else:
            values, model_type = layer, layer.get("model_type", "qwen3")
        head = build_head_config(values, model_type, target, source)
        target_hidden_size = config.get("target_hidden_size") or head.hidden_size
        found = {"target_hidden_size": target_hidden_size, "vocab_size": head.vocab_size}
        check_fit(source, target, found)
        flags = {
            name: bool(eagle.get(name, config.get(name, name == "use_aux_hidden_state")))
            for name in FLAGS
        }
        width = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else 3 * target_hidden_size
        count = width // target_hidden_size if flags["use_aux_hidden_state"] else 0
        return cls(
            config=head,
            aux_hidden_layers=_read_layer_ids(config, count, target, source),
            target_hidden_size=target_hidden_size,
            draft_vocab_size=config.get("draft_vocab_size") or head.vocab_size,
            **flags,
            mask_token_id=_read_mask(config, head.vocab_size, source) if MASK in tensors else None,
        )

    def with_masks(self, mask_token_id: int | None) -> Eagle3Layout:
        """The layout as a P-EAGLE head. mask_token_id: by default the last token of the vocabulary.

        Raises ConfigError for one that is no token.
        """
        last: int = self.config.vocab_size - 1
        chosen = last if mask_token_id is None else mask_token_id
        require_int("mask_token_id", chosen, low=0, high=last)
        return self._replace(mask_token_id=chosen)


def _choose_layers(asked: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    """Ascending, as checkpoints are read: index i is the input of layer i."""
    if asked is None:
        wanted = (2, depth // 2, depth - 3)
        return tuple(sorted({min(max(index, 1), depth) for index in wanted}))
    chosen = tuple(sorted(set(asked)))
    if not chosen or len(chosen) != len(asked) or chosen[0] < 0 or chosen[-1] > depth:
        fix = f"must be different hidden states, 0 to {depth}: i is the input of layer i"
        raise ConfigError("aux_hidden_layers", asked, fix)
    return chosen


def _read_mask(config: Mapping[str, Any], vocab_size: int, source: str) -> int:
    """Under the names that speculators, PARD and vLLM have for it."""
    found = next((config[name] for name in MASK_NAMES if config.get(name) is not None), None)
    if found is None or not 0 <= found < vocab_size:
        raise ModelError(
            f"{source}: mask_token_id: expected a token below {vocab_size} in a head "
            f"with a {MASK}, found {found}; pass a head for this target"
        )
    return int(found)


def _read_layer_ids(
    config: Mapping[str, Any], count: int, target: PreTrainedModel, source: str
) -> tuple[int, ...]:
    """The ``count`` layers whose inputs ``fc`` takes, ascending, as all runtimes collect them.

    At the top level (speculators, vLLM) id i is the input of layer i; in ``eagle_config``
    (SpecForge, SGLang, ModelOpt) it is the output of layer i, one further. Without an ``fc`` the
    head is fed with the last state.
    """
    if not count:
        return (-1,)
    depth: int = target.config.get_text_config(decoder=True).num_hidden_layers
    ids = config.get(LAYER_IDS)
    if not ids:
        ids = [index + 1 for index in (config.get("eagle_config") or {}).get(LAYER_IDS) or ()]
    ids = sorted(ids or (2, depth // 2, depth - 3))
    if len(ids) == count + 1 and ids[-1] == depth:
        ids.pop()  # the verifier's last layer: speculators trained against it, fc never sees it
    if len(ids) != count or ids[0] < 0 or ids[-1] > depth:
        raise ModelError(
            f"{source}: {LAYER_IDS}: expected the {count} hidden states that "
            f"fc.weight takes, from 0 to {depth}, found {ids}; pass a head for this target"
        )
    return tuple(ids)


class Parts(NamedTuple):
    """What the layers of one model type are made of."""

    attention: Any
    layer: Any
    mlp: Any
    norm: Any
    rotary: Any


PARTS = {
    "llama": Parts(
        llama.LlamaAttention,
        llama.LlamaDecoderLayer,
        llama.LlamaMLP,
        llama.LlamaRMSNorm,
        llama.LlamaRotaryEmbedding,
    ),
    "qwen3": Parts(
        qwen3.Qwen3Attention,
        qwen3.Qwen3DecoderLayer,
        qwen3.Qwen3MLP,
        qwen3.Qwen3RMSNorm,
        qwen3.Qwen3RotaryEmbedding,
    ),
}


class FirstLayer(nn.Module):
    """The layer whose attention reads [embedding ; hidden], twice as wide as what it returns."""

    def __init__(self, layout: Eagle3Layout) -> None:
        super().__init__()
        config, size = layout.config, layout.config.hidden_size
        parts = PARTS[config.model_type]
        self.norm_before_residual = layout.norm_before_residual
        self.self_attn = parts.attention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, outputs))
        self.mlp = parts.mlp(config)
        self.input_layernorm = parts.norm(size, config.rms_norm_eps)
        self.hidden_norm = parts.norm(size, config.rms_norm_eps)
        self.post_attention_layernorm = parts.norm(size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, hidden: Tensor, **attention: Any) -> Tensor:
        """embedding, hidden and the result: [B, T, H]; attention: what ``self_attn`` takes."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        wide = torch.cat([self.input_layernorm(embedding), normed], -1)
        states: Tensor = residual + self.self_attn(wide, **attention)[0]
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Masks(NamedTuple):
    """What P-EAGLE feeds at the positions after a text. hidden: [H], of the head's forward."""

    token_id: int
    hidden: Tensor


class Eagle3Head(LayoutHead):
    """An EAGLE-3 or P-EAGLE head: aux states of the target and embeddings to states [B, T, H]."""

    layout: Eagle3Layout
    layout_class = Eagle3Layout
    trains_output = True

    @classmethod
    def fresh(
        cls, target: PreTrainedModel, *, vocabulary: DraftVocabulary | None = None, layout: Any
    ) -> Self:
        """A new head to train. Raises ConfigError when vocabulary and layout do not match."""
        size = layout.config.vocab_size if vocabulary is None else vocabulary.target_size
        kept = size if vocabulary is None else len(vocabulary)
        if (kept, size) != (layout.draft_vocab_size, layout.config.vocab_size):
            fix = f"must have {layout.draft_vocab_size} of {layout.config.vocab_size} tokens"
            raise ConfigError("vocabulary", f"{kept} of {size} tokens", fix)
        head = super().fresh(target, vocabulary=vocabulary, layout=layout)
        if head.mask_hidden is not None:
            nn.init.normal_(head.mask_hidden)
        return head

    @classmethod
    def _own_name(cls, name: str) -> str:
        return name.replace("midlayer.", "layers.0.")

    def _build(self) -> Any:
        layout, config = self.layout, self.config
        parts = PARTS[config.model_type]
        self.norm_output = layout.norm_output
        self._build_fusion(layout)
        self.mask_hidden: nn.Parameter | None = None
        if layout.mask_token_id is not None:
            width = len(layout.aux_hidden_layers) * layout.target_hidden_size
            self.mask_hidden = nn.Parameter(torch.empty(width))
        further = (parts.layer(config, index) for index in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(layout), *further])
        self.norm = parts.norm(self.hidden_size, config.rms_norm_eps)
        return parts.rotary

    def features(self, hidden_states: Tensor) -> Tensor:
        """Target states [..., len(aux_hidden_layers) * H_target] fused to [..., H]."""
        wanted: torch.dtype = self.norm.weight.dtype
        if self.fc is None:
            return hidden_states.to(wanted)
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states.to(wanted))
        if self.fc_norm is not None:
            chunks = hidden_states.to(wanted).chunk(len(self.fc_norm), -1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            hidden_states = torch.cat(normed, -1)
        return product(self.fc, product_input(hidden_states, self.fc.weight))

    @torch.inference_mode()
    def masks(self) -> Masks:
        """What is fed at the positions after a text.

        Raises ModelError for a head that has nothing to feed there.
        """
        if self.mask_hidden is None or self.layout.mask_token_id is None:
            raise ModelError(f"proposer='p_eagle': expected a head with a {MASK}, found none")
        return Masks(self.layout.mask_token_id, self.features(self.mask_hidden))

    def forward(
        self, token_ids: Tensor, hidden: Tensor, **arguments: Unpack[HeadArguments]
    ) -> Tensor:
        """The recycled states [B, T, H], see ``DraftHead.forward``."""
        position_ids, mask = arguments["position_ids"], arguments["attention_mask"]
        return self.run_layers(token_ids, hidden, position_ids, mask, cache=arguments["cache"])

    def run_layers(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        *,
        cache: Any = None,
        recompute: bool = False,
    ) -> Tensor:
        """``forward``. recompute: see ``layer_run``; for a pass without a cache."""
        arguments = {
            "position_embeddings": self.rotary_emb(hidden, position_ids),
            **cache_keyword(self.layers[0], cache),
        }
        masks = [self._mask(attention_mask, index) for index in range(len(self.layers))]
        first, *further = (layer_run(layer, recompute=recompute) for layer in self.layers)
        states = first(
            self.embed(token_ids).to(hidden.dtype), hidden, attention_mask=masks[0], **arguments
        )
        for run, mask in zip(further, masks[1:], strict=True):
            states = run(states, attention_mask=mask, **arguments)
        if self.norm_output:
            states = self.norm(states)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., D]."""
        normed = hidden if self.norm_output else self.norm(hidden)
        return self.score(normed)

    def _build_fusion(self, layout: Eagle3Layout) -> None:
        norm, eps = PARTS[self.config.model_type].norm, self.config.rms_norm_eps
        size, count = layout.target_hidden_size, len(layout.aux_hidden_layers)
        self.fc = self.input_norm = self.fc_norm = None
        if layout.use_aux_hidden_state:
            self.fc = nn.Linear(count * size, self.hidden_size)
            if layout.norm_before_fc:
                self.input_norm = norm(count * size, eps)
            if layout.fc_norm:
                self.fc_norm = nn.ModuleList(norm(size, eps) for _ in range(count))

    def _mask(self, attention_mask: Any, index: int) -> Any:
        if isinstance(attention_mask, Mapping):
            return attention_mask[self.config.layer_types[index]]
        return attention_mask
