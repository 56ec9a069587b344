"""Multi-token prediction modules in the layouts that are published: the inverse of reading them.

"deepseek" and "qwen" have the target's own config.json, with the number of modules in it, and only
the tensors of the modules: as a folder of its own, or to be added to the target's. speculators' own
layout is not written: no engine loads it before its modules are put back into the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.experts import split_experts
from guided_spec.models.head_files import (
    HeadFiles,
    SaveOptions,
    architectures_of,
    dtype_name,
    rope_fields,
)
from guided_spec.models.mtp import OWN_NAMES, MtpHead
from guided_spec.models.qwen_mtp import QwenMtpHead
from guided_spec.models.target_ends import TargetEnds
from guided_spec.models.target_layers import TargetLayers

__all__ = ["mtp_deepseek", "mtp_qwen"]

Tensors = Mapping[str, Tensor]

# Of a whole model as it was loaded; a head is none of that.
DROPPED = ("_name_or_path", "quantization_config", "transformers_version")


def mtp_deepseek(
    head: MtpHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``model.layers.{N + i}.*`` of a target of N layers, experts one by one.

    With embedding="copy" each module has its ``embed_tokens`` and ``shared_head.head``, as
    published ones have.
    """
    kind = TargetLayers(target)
    first: int = kind.config.num_hidden_layers
    own = {inner: outer for outer, inner in OWN_NAMES.items()}
    named = {}
    for name, tensor in split_experts(dict(tensors)).items():
        _, number, rest = name.split(".", 2)
        prefix = next((inner for inner in own if rest.startswith(inner)), "mtp_block.")
        stem = own.get(prefix, "") + rest.removeprefix(prefix)
        named[f"model.layers.{first + int(number)}.{stem}"] = tensor
    if options.embedding == "copy":
        ends = _ends(target, head.hidden_size)
        for module in range(head.num_modules):
            layer = f"model.layers.{first + module}."
            named[f"{layer}embed_tokens.weight"] = ends["embed_tokens.weight"]
            named[f"{layer}shared_head.head.weight"] = ends["lm_head.weight"]
    config = _target_config(target, options, "num_nextn_predict_layers", head.num_modules)
    return HeadFiles(config, named, frozenset(kind.exact))


def mtp_qwen(
    head: QwenMtpHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``mtp.*``, experts one by one.

    With embedding="copy" the target's ``model.embed_tokens`` and ``lm_head`` are there too.
    """
    named = {f"mtp.{name}": tensor for name, tensor in split_experts(dict(tensors)).items()}
    if options.embedding == "copy":
        ends = _ends(target, head.hidden_size)
        named["model.embed_tokens.weight"] = ends["embed_tokens.weight"]
        named["lm_head.weight"] = ends["lm_head.weight"]
    config = _target_config(target, options, "mtp_num_hidden_layers", head.num_modules)
    return HeadFiles(config, named, frozenset(TargetLayers(target).exact))


def _target_config(
    target: PreTrainedModel, options: SaveOptions, count: str, num_modules: int
) -> dict[str, Any]:
    config = {
        **_plain(target.config),
        "architectures": architectures_of(target),
        "dtype": dtype_name(options.dtype),
    }
    config.get("text_config", config)[count] = num_modules
    return config


def _plain(config: Any) -> dict[str, Any]:
    """What config.json says of a model whose weights are not quantized."""
    values = {name: v for name, v in config.to_diff_dict().items() if name not in DROPPED}
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:  # not one for each type of layer
        values |= rope_fields(rope)
    return {"model_type": config.model_type, **values}


def _ends(target: PreTrainedModel, width: int) -> dict[str, Tensor]:
    ends = TargetEnds(target)
    rows = {
        "embed_tokens.weight": ends.embedding_rows(width),
        "lm_head.weight": ends.output_rows(None, width),
    }
    found = {name: tensor for name, tensor in rows.items() if tensor is not None}
    if len(found) < len(rows):
        raise ModelError(
            "embedding='copy': expected plain weights of the target's embedding and output head, "
            "found others; pass embedding='omit'"
        )
    return found
