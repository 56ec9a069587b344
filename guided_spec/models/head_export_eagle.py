"""EAGLE and EAGLE-3 heads in the layouts that are published.

SafeAILab's describes the layer at the top level of config.json; speculators' in
``transformer_layer_config``. Which loaders were run on them: see ``head_export``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.eagle import EagleHead
from guided_spec.models.eagle3 import Eagle3Head
from guided_spec.models.eagle3_layout import LAYER_IDS
from guided_spec.models.head_files import (
    HeadFiles,
    SaveOptions,
    dtype_name,
    rope_fields,
    speculators_config,
)
from guided_spec.models.target_ends import TargetEnds

__all__ = ["eagle3_safeailab", "eagle3_speculators", "eagle_safeailab"]

Tensors = Mapping[str, Tensor]

SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "vocab_size",
)
WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
SLIDING = "sliding_attention"


def eagle_safeailab(
    head: EagleHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``fc``, ``layers.{i}`` and perhaps ``embed_tokens``; config.json of a Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        **_layer_fields(head.config, tensors),
        "bias": "fc.bias" in tensors,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(options.dtype),
    }
    return HeadFiles(config, _with_embedding(tensors, target, options, head.hidden_size))


def eagle3_safeailab(
    head: Eagle3Head, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``midlayer``, ``d2t`` as offsets, ``t2d``; the hidden states under the keys of both dialects.

    Raises ModelError for layers that engines would read as plain Llama's.
    """
    layout, kind = head.layout, head.config.model_type
    if kind != "llama":
        raise _refusal("safeailab", f"layers of Llama, found {kind}", "speculators")
    if SLIDING in (getattr(head.config, "layer_types", None) or ()):
        raise _refusal("safeailab", "layers without windows, found sliding ones", "speculators")
    flags = {name: getattr(layout, name) for name in ("norm_before_fc", "norm_before_residual")}
    # SpecForge takes norm_output for something else, which it does by default: only where it is on.
    flags |= {name: True for name in ("fc_norm", "norm_output") if getattr(layout, name)}
    eagle: dict[str, Any] = {
        "use_aux_hidden_state": layout.use_aux_hidden_state,
        "norm_before_fc": layout.norm_before_fc,
    }
    if layout.use_aux_hidden_state:
        # Here SGLang and SpecForge count the outputs of layers; at the top level vLLM their inputs.
        eagle[LAYER_IDS] = [index - 1 for index in layout.aux_hidden_layers]
        flags[LAYER_IDS] = [*layout.aux_hidden_layers]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_fields(head.config, tensors),
        "draft_vocab_size": layout.draft_vocab_size,
        "target_hidden_size": layout.target_hidden_size,
        **flags,
        "eagle_config": eagle,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(options.dtype),
    }
    complete = _complete_eagle3(head, tensors, target, options)
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in complete.items()}
    return HeadFiles(config, renamed)


def eagle3_speculators(
    head: Eagle3Head, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """What ``Eagle3DraftModel.from_pretrained`` of speculators 0.9 reads.

    Embedding and output head are always there. speculators takes those that are missing from the
    verifier only if the memory it finds in their place happens to hold a NaN. Raises ModelError
    for a head that speculators has no words for, and for embedding="omit".
    """
    layout = head.layout
    if options.embedding == "omit":
        raise ModelError(
            "embedding='omit': speculators does not reliably take them from the verifier; pass "
            "'auto', or layout='safeailab'"
        )
    if not layout.use_aux_hidden_state:
        raise _refusal("speculators", "a head with an fc, found none", "safeailab")
    if layout.target_hidden_size != head.hidden_size:
        found = f"{head.hidden_size} of {layout.target_hidden_size}"
        raise _refusal("speculators", f"a head as wide as its target, found {found}", "safeailab")
    if any(name.endswith(".bias") for name in tensors):
        raise _refusal("speculators", "a head without biases, found some", "safeailab")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        **speculators_config(target, options),
        "draft_vocab_size": layout.draft_vocab_size,
        "target_hidden_size": None,
        LAYER_IDS: [*layout.aux_hidden_layers],
        **{name: getattr(layout, name) for name in flags},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype_name(options.dtype),
        "transformer_layer_config": {
            **_layer_fields(head.config, tensors),
            "tie_word_embeddings": False,
        },
    }
    complete = replace(options, embedding="copy")
    return HeadFiles(config, _complete_eagle3(head, tensors, target, complete))


def _layer_fields(config: Any, tensors: Tensors) -> dict[str, Any]:
    """What ``head_config.build_head_config`` reads, and what engines ask about biases."""
    fields = {name: getattr(config, name) for name in SIZES}
    if SLIDING in (getattr(config, "layer_types", None) or ()):
        fields |= {name: getattr(config, name) for name in WINDOWS if hasattr(config, name)}
    has_bias = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    rope = rope_fields(config.rope_parameters)
    return {**fields, **rope, "attention_bias": has_bias, "mlp_bias": False}


def _complete_eagle3(
    head: Eagle3Head, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> dict[str, Tensor]:
    complete = _with_embedding(tensors, target, options, head.hidden_size)
    if options.embedding == "copy" and "lm_head.weight" not in complete:
        complete["lm_head.weight"] = _borrowed(
            TargetEnds(target).output_rows(None, head.hidden_size), "output head"
        )
    if head.vocabulary is not None:
        complete |= head.vocabulary.tensors()._asdict()
    return complete


def _with_embedding(
    tensors: Tensors, target: PreTrainedModel, options: SaveOptions, width: int
) -> dict[str, Tensor]:
    complete = dict(tensors)
    if options.embedding == "copy" and "embed_tokens.weight" not in complete:
        rows = TargetEnds(target).embedding_rows(width)
        complete["embed_tokens.weight"] = _borrowed(rows, "embedding")
    return complete


def _borrowed(rows: Tensor | None, what: str) -> Tensor:
    if rows is None:
        raise ModelError(
            f"embedding='copy': expected plain weights of the target's {what}, found others; save "
            "it as 'safeailab', with embedding='omit'"
        )
    return rows


def _refusal(layout: str, problem: str, other: str) -> ModelError:
    return ModelError(f"layout={layout!r}: it needs {problem}; save it as {other!r}")
