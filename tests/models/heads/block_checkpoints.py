"""Tiny heads that draft blocks, written under the names and in the layouts that are published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.models.heads.block.lattice import LatticeShape
from tests.models.heads.heads import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    NORM_EPS,
    SPECULATORS_CONFIG,
    WIDTH,
    save,
    write_eagle3,
)

MASK, RANK, TAPS, GROUP, TOP_K, STATE_SIZE = 3, 4, 2, 8, 5, 6
LATTICE = LatticeShape(
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    mlp_ratio=2.0,
    candidate_topk=TOP_K,
    factor_dim=6,
    vector_eps=1e-4,
    logit_scale=8.0,
)
# kind: the dialects that it is published in
DIALECTS = {
    "dflash": ("zlab", "deepseek", "speculators"),
    "dspark": ("deepseek", "speculators"),
    "dflash2": ("zlab", "speculators"),
    "domino": ("zlab",),
    "lilicorr": ("zlab",),
}


def write_dflash(folder: Path, target: PreTrainedModel, **changes: Any) -> Path:
    """A random DFlash head in z-lab's layout; ``changes``: fields of config.json that differ."""
    return write_block(folder, target, "dflash", "zlab", **changes)


def write_block(
    folder: Path, target: PreTrainedModel, kind: str, dialect: str, **changes: Any
) -> Path:
    """A random head of ``kind`` that reads the outputs of the target's layers 0 and 1.

    changes: fields of config.json that differ. Those of DeepSeek and speculators have an embedding
    and an output head of their own, as theirs have, and what only training reads. A
    ``draft_vocab_size`` among the changes of speculators' is a reduced vocabulary.
    """
    text_config: Any = target.config.get_text_config(decoder=True)
    layer = {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": WIDTH,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "vocab_size": text_config.vocab_size,
    }
    write = {"zlab": _zlab, "deepseek": _deepseek, "speculators": _speculators}[dialect]
    config = {**write(kind, layer), **changes}
    shapes = _shapes(kind, dialect, {**layer, **config})
    random = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.rand(shape, generator=random) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=random) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }
    if "draft_vocab_size" in changes:
        total, count = text_config.vocab_size, changes["draft_vocab_size"]
        kept = torch.randperm(total, generator=random)[:count].sort().values
        tensors["d2t"] = kept - torch.arange(count)
        tensors["t2d"] = torch.zeros(total, dtype=torch.bool).index_fill(0, kept, value=True)
    return save(folder, config, tensors, "safetensors")


def write_p_eagle(folder: Path, target: PreTrainedModel, **options: Any) -> dict[str, Tensor]:
    """An EAGLE-3 head with what P-EAGLE adds; options: of ``write_eagle3``. Returns its tensors."""
    tensors = write_eagle3(folder, target, **options)
    config = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" in config:
        config |= {"speculators_model_type": "peagle", "mask_token_id": MASK}
    else:
        config["ptd_token_id"] = MASK
    stored = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(6)
    width = tensors["fc.weight"].shape[1]
    tensors["mask_hidden"] = stored["mask_hidden"] = torch.randn(1, 1, width, generator=random)
    save(folder, config, stored, "safetensors")
    return tensors


def _zlab(kind: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    section = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    config = {**layer, "architectures": ["DFlashDraftModel"], "dflash_config": section}
    if kind == "dflash":
        return {**config, "block_size": 8}
    if kind == "domino":
        section |= {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 2}
        section |= {
            "gru_hidden_dim": STATE_SIZE
        }  # and emb_dim beside it, as the published ones have
        return {**config, "architectures": ["DominoDraftModel"], "block_size": 7, "emb_dim": RANK}
    if kind == "lilicorr":
        section |= {f"lilicorr_{name}": value for name, value in LATTICE._asdict().items()}
        section |= {"projector_type": "lilicorr"}
        return {**config, "block_size": 8}
    section |= {"block_size": 8, "selector_rank": RANK, "selector_top_k": TOP_K}
    section |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
    return {**config, "architectures": ["DFlash2DraftModel"], "is_causal": False}


def _deepseek(kind: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **layer,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "enable_confidence_head": kind == "dspark",
        "confidence_head_with_markov": True,
        "markov_head_type": "vanilla",
        "markov_rank": RANK if kind == "dspark" else 0,
        "mask_token_id": MASK,
        "num_anchors": 512,
        "target_layer_ids": [0, 1],
    }


def _speculators(kind: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        "architectures": [f"{kind}Speculator"],
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": 7 if kind == "dspark" else 8,
        "draft_vocab_size": layer["vocab_size"],
        "mask_token_id": MASK,
        "sample_from_anchor": kind == "dspark",
        "speculators_config": {**SPECULATORS_CONFIG, "algorithm": kind},
        "speculators_model_type": kind,
        "transformer_layer_config": {**layer},
    }
    if kind == "dspark":
        config |= {"markov_rank": RANK, "markov_head_type": "vanilla"}
    if kind == "dflash2":
        config |= {"selector_rank": RANK, "selector_top_k": TOP_K}
        config |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
    return config


def _shapes(kind: str, dialect: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size, total = config["hidden_size"], config["vocab_size"]
    scored = config.get("draft_vocab_size", total)
    section = config.get("dflash_config", config)
    ids = section.get("target_layer_ids", config.get("aux_hidden_state_layer_ids"))
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, len(ids or [0]) * size)}
    shapes |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (size,))
    for index in range(config["num_hidden_layers"]):
        layer = _layer_shapes(size) | (_conv_shapes(size) if kind == "dflash2" else {})
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if dialect != "zlab":
        shapes |= {"embed_tokens.weight": (total, size), "lm_head.weight": (scored, size)}
    if kind == "dspark":
        shapes["markov_head.markov_w1.weight"] = (total, RANK)
        shapes["markov_head.markov_w2.weight"] = (scored, RANK)
        shapes["confidence_head.proj.weight"] = (1, size + RANK)
        shapes["confidence_head.proj.bias"] = (1,)
        if config["markov_head_type"] == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + size)
            shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
        if config["markov_head_type"] == "gated":
            shapes["markov_head.gate_proj.weight"] = (RANK, size + RANK)
            shapes["markov_head.gate_proj.bias"] = (RANK,)
    if kind == "dflash2":
        books = ("predecessor_codebook", "successor_codebook")
        shapes |= dict.fromkeys((f"candidate_selector.{name}" for name in books), (total, RANK))
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, size)
    if kind == "domino":
        shapes["prefix_gru.weight_ih_l0"] = (3 * STATE_SIZE, size)
        shapes["prefix_gru.weight_hh_l0"] = (3 * STATE_SIZE, STATE_SIZE)
        shapes["embed_proj.0.weight"] = (RANK, size + STATE_SIZE)
        shapes["embed_proj.2.weight"] = (total, RANK)
    if kind == "lilicorr":
        shapes |= _lattice_shapes(size, section["lilicorr_num_layers"])
    return shapes


def _lattice_shapes(size: int, num_layers: int) -> dict[str, tuple[int, ...]]:
    """With the names of a sequence's places, as some are published."""
    own, factors, heads = LATTICE.hidden_size, LATTICE.factor_dim, LATTICE.num_heads
    maps = {
        **{"token_proj": (own, size), "pass_hidden_proj": (own, size), "context_proj": (own, size)},
        **{"feature_mlp.1": (own, 5), "feature_mlp.3": (own, own)},
        "factor_input_proj": (own, 3 * own),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (factors, own)),
    }
    shapes: dict[str, tuple[int, ...]] = {
        **{"slot_embedding": (1, 1, 7, 1, own), "rank_embedding": (1, 1, 1, TOP_K, own)},
        **{"relative_slot_bias": (heads, 15), "same_slot_bias": (heads,)},
        **{"feature_mlp.0.weight": (5,), "feature_mlp.0.bias": (5,)},
        **{"output_norm.weight": (own,), "anchor_norm.weight": (own,)},
    }
    for index in range(num_layers):
        layer = f"layers.{index}."
        shapes |= dict.fromkeys((f"{layer}{name}_norm.weight" for name in ("attn", "mlp")), (own,))
        shapes[f"{layer}attn.in_proj_weight"] = (3 * own, own)
        shapes[f"{layer}attn.in_proj_bias"] = (3 * own,)
        maps |= {f"{layer}attn.out_proj": (own, own)}
        maps |= {f"{layer}mlp.0": (2 * own, own), f"{layer}mlp.2": (own, 2 * own)}
    for name, shape in maps.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"lilicorr.{name}": shape for name, shape in shapes.items()}


def _layer_shapes(size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    shapes |= dict.fromkeys(norms, (size,))
    shapes |= dict.fromkeys((f"self_attn.{name}_norm.weight" for name in "qk"), (HEAD_DIM,))
    shapes["self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, size)
    shapes["self_attn.o_proj.weight"] = (size, HEADS * HEAD_DIM)
    for name in "kv":
        shapes[f"self_attn.{name}_proj.weight"] = (KV_HEADS * HEAD_DIM, size)
    for name in ("gate", "up"):
        shapes[f"mlp.{name}_proj.weight"] = (WIDTH, size)
    shapes["mlp.down_proj.weight"] = (size, WIDTH)
    return shapes


def _conv_shapes(size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("attention_conv", "mlp_conv"):
        shapes[f"{name}.base_kernel"] = (2, TAPS, size)
        shapes[f"{name}.kernel_projection.weight"] = (2 * TAPS * (size // GROUP), size)
    return shapes
