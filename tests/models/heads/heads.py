"""Tiny EAGLE and EAGLE-3 heads, written under the names and in the layouts that are published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

Files = Literal["safetensors", "sharded", "bin", "sharded_bin", "legacy_bin"]
Layout = Literal["safeailab", "specforge", "speculators"]

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 48
NORM_EPS = 1e-5
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SPECULATORS_CONFIG: dict[str, Any] = {
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
}


def save(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], files: Files
) -> Path:
    """Write a checkpoint; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    suffix = ".safetensors" if files in ("safetensors", "sharded") else ".bin"
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    if not files.startswith("sharded"):
        _write(folder / f"{stem}{suffix}", tensors, files)
        return folder
    names = sorted(tensors)
    shards = {
        f"{stem}-00001-of-00002{suffix}": names[::2],
        f"{stem}-00002-of-00002{suffix}": names[1::2],
    }
    for file, held in shards.items():
        _write(folder / file, {name: tensors[name] for name in held}, files)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return folder


@dataclass(frozen=True)
class EagleForm:
    """How an EAGLE head is written. changes: fields of config.json that differ."""

    files: Files = "safetensors"
    fc_bias: bool = True
    qkv_bias: bool = False
    own_embedding: bool = True
    num_layers: int = 1
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Eagle3Form:
    """How an EAGLE-3 head is written.

    draft_vocab_size: None is the target's. hidden_size: None is the target's. layer_ids: indices of
    transformers' hidden states, which each layout writes its own way; None leaves them out.
    flags: norm_before_residual and the like. changes: fields of config.json that differ.
    """

    layout: Layout = "safeailab"
    files: Files = "safetensors"
    draft_vocab_size: int | None = 24
    hidden_size: int | None = None
    layer_ids: tuple[int, ...] | None = (1, 2, 3)
    model_type: str = "llama"
    num_layers: int = 1
    own_embedding: bool = False
    own_lm_head: bool = True
    flags: Mapping[str, bool] = field(default_factory=dict)
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)


def write_eagle(folder: Path, target: PreTrainedModel, **options: Any) -> dict[str, Tensor]:
    """Write an EAGLE head for ``target``; returns its tensors.

    options: fields of ``EagleForm``. The key "bias" is left out of config.json, as it often is.
    """
    form, sizes = EagleForm(**options), _sizes(target)
    hidden, random = sizes["hidden_size"], torch.Generator().manual_seed(form.seed)
    tensors = {"fc.weight": _matrix(hidden, 2 * hidden, random)}
    if form.fc_bias:
        tensors["fc.bias"] = _matrix(hidden, 1, random)[:, 0]
    if form.own_embedding:
        tensors["embed_tokens.weight"] = _matrix(sizes["vocab_size"], hidden, random)
    for index in range(form.num_layers):
        layer = _layer(hidden, hidden, random, has_bias=form.qkv_bias)
        if index == 0:
            del layer["input_layernorm.weight"]
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    config = {
        **_layer_config(sizes, hidden, "llama"),
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": form.num_layers,
        **form.changes,
    }
    save(folder, config, tensors, form.files)
    return tensors


def write_eagle3(folder: Path, target: PreTrainedModel, **options: Any) -> dict[str, Tensor]:
    """Write an EAGLE-3 head for ``target``; returns its tensors, under the names of speculators.

    options: fields of ``Eagle3Form``.
    """
    form, sizes = Eagle3Form(**options), _sizes(target)
    hidden, random = form.hidden_size or sizes["hidden_size"], torch.Generator()
    random.manual_seed(form.seed)
    tensors = _fusion(form, sizes["hidden_size"], hidden, random)
    for index in range(form.num_layers):
        inputs = hidden if index else 2 * hidden
        layer = _layer(inputs, hidden, random, has_qk_norm=form.model_type == "qwen3")
        if index == 0:
            layer["hidden_norm.weight"] = _norm(hidden, random)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    tensors["norm.weight"] = _norm(hidden, random)
    if form.own_embedding:
        tensors["embed_tokens.weight"] = _matrix(sizes["vocab_size"], hidden, random)
    if form.own_lm_head:
        rows = form.draft_vocab_size or sizes["vocab_size"]
        tensors["lm_head.weight"] = _matrix(rows, hidden, random)
    if form.draft_vocab_size is not None:
        tensors |= _vocabulary(form.draft_vocab_size, sizes["vocab_size"], random)
    named = tensors
    if form.layout != "speculators":
        named = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    save(folder, _config(form, sizes, hidden), named, form.files)
    return tensors


def _config(form: Eagle3Form, sizes: Mapping[str, int], hidden: int) -> dict[str, Any]:
    layer = _layer_config(sizes, hidden, form.model_type) | {"num_hidden_layers": form.num_layers}
    config: dict[str, Any] = {"draft_vocab_size": form.draft_vocab_size or sizes["vocab_size"]}
    if hidden != sizes["hidden_size"]:
        config["target_hidden_size"] = sizes["hidden_size"]
    if form.layout == "speculators":
        return {
            **config,
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": SPECULATORS_CONFIG,
            "transformer_layer_config": layer,
            LAYER_IDS: None if form.layer_ids is None else [*form.layer_ids],
            **dict.fromkeys(FLAGS, False),
            **form.flags,
            **form.changes,
        }
    eagle: dict[str, Any] = dict(form.flags)
    config |= {name: eagle.pop(name) for name in FLAGS if name in eagle}
    if form.layer_ids is not None:
        # SpecForge and SGLang count outputs of layers.
        eagle[LAYER_IDS] = [index - 1 for index in form.layer_ids]
    if eagle:
        config["eagle_config"] = eagle
    return {**layer, **config, "architectures": ["LlamaForCausalLMEagle3"], **form.changes}


def _sizes(target: PreTrainedModel) -> dict[str, int]:
    config: Any = target.config.get_text_config(decoder=True)
    return {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}


def _layer_config(sizes: Mapping[str, int], hidden: int, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "vocab_size": sizes["vocab_size"],
    }


def _layer(
    inputs: int,
    hidden: int,
    random: torch.Generator,
    *,
    has_bias: bool = False,
    has_qk_norm: bool = False,
) -> dict[str, Tensor]:
    tensors = {
        "input_layernorm.weight": _norm(hidden, random),
        "post_attention_layernorm.weight": _norm(hidden, random),
        "self_attn.o_proj.weight": _matrix(hidden, HEADS * HEAD_DIM, random),
        "mlp.gate_proj.weight": _matrix(WIDTH, hidden, random),
        "mlp.up_proj.weight": _matrix(WIDTH, hidden, random),
        "mlp.down_proj.weight": _matrix(hidden, WIDTH, random),
    }
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        tensors[f"self_attn.{name}_proj.weight"] = _matrix(heads * HEAD_DIM, inputs, random)
        if has_bias:
            tensors[f"self_attn.{name}_proj.bias"] = _matrix(heads * HEAD_DIM, 1, random)[:, 0]
    if has_qk_norm:
        tensors["self_attn.q_norm.weight"] = _norm(HEAD_DIM, random)
        tensors["self_attn.k_norm.weight"] = _norm(HEAD_DIM, random)
    return tensors


def _fusion(
    form: Eagle3Form, target_hidden: int, hidden: int, random: torch.Generator
) -> dict[str, Tensor]:
    if not form.flags.get("use_aux_hidden_state", True):
        return {}
    count = len(form.layer_ids or (1, 2, 3))
    tensors = {"fc.weight": _matrix(hidden, count * target_hidden, random)}
    if form.flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = _norm(count * target_hidden, random)
    if form.flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": _norm(target_hidden, random) for i in range(count)}
    return tensors


def _vocabulary(size: int, target_size: int, random: torch.Generator) -> dict[str, Tensor]:
    kept = torch.randperm(target_size, generator=random)[:size].sort().values
    is_kept = torch.zeros(target_size, dtype=torch.bool)
    is_kept[kept] = True
    return {"d2t": kept - torch.arange(size), "t2d": is_kept}


def _matrix(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Of a size that neither loses what comes in nor lets recycled states grow without bound."""
    return torch.randn(rows, columns, generator=random) * (0.8 / math.sqrt(columns))


def _norm(size: int, random: torch.Generator) -> Tensor:
    return 1 + 0.3 * torch.randn(size, generator=random)


def _write(path: Path, tensors: Mapping[str, Tensor], files: Files) -> None:
    stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if path.suffix == ".safetensors":
        save_file(stored, path)
    else:
        torch.save(stored, path, _use_new_zipfile_serialization=files != "legacy_bin")
