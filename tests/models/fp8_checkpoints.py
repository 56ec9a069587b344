"""Checkpoints with linear layers in fp8, as they are published, and the same models in float32."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Form(NamedTuple):
    """One way to publish: what config.json says, what scales are called, and how large blocks are.

    block: of a scale, for a matrix of this shape. scale_shape: as stored. dtype: of scales.
    """

    config: dict[str, Any]
    scale: str
    block: Callable[[torch.Size], tuple[int, int]]
    scale_shape: Callable[[Tensor], Tensor] = lambda scales: scales
    dtype: torch.dtype = torch.float32
    input_scale: str | None = None


def _compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FORMS = {
    "qwen": Form(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "weight_scale_inv",
        lambda _: (128, 128),
    ),
    "no size of blocks": Form({"quant_method": "fp8"}, "weight_scale_inv", lambda _: (128, 128)),
    "small blocks": Form(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24]},
        "weight_scale_inv",
        lambda _: (16, 24),
    ),
    "static": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "weight_scale",
        lambda shape: (shape[0], shape[1]),
        lambda scales: scales.reshape(()),
        input_scale="input_scale",
    ),
    "compressed channels": Form(
        _compressed("channel"), "weight_scale", lambda shape: (1, shape[1]), dtype=torch.bfloat16
    ),
    "compressed tensors": Form(
        _compressed("tensor"),
        "weight_scale",
        lambda shape: (shape[0], shape[1]),
        lambda scales: scales.reshape(1),
    ),
    "compressed blocks": Form(
        _compressed("block", block_structure=[16, 16]), "weight_scale", lambda _: (16, 16)
    ),
}


@torch.no_grad()
def write_fp8(
    folder: Path,
    model: PreTrainedModel,
    form: Form,
    spare: str = "",
    *,
    with_experts: bool = False,
) -> PreTrainedModel:
    """Write the model with the linear layers of its decoder in fp8; returns what it then computes.

    spare: linear layers whose names end so keep their weights. with_experts: whether experts are
    in fp8 too.
    """
    whole: Any = copy.deepcopy(model)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, module in whole.named_modules():
        if type(module) is not nn.Linear or name == "lm_head" or (spare and name.endswith(spare)):
            continue
        module.weight.copy_(put_fp8(stored, name, form))
    for name in [name for name in stored if with_experts and EXPERT.search(name)]:
        experts, number, part = EXPERT.split(name)[:3]
        module = whole.get_submodule(f"{experts}.mlp.experts")
        target = module.down_proj if part == "down" else module.gate_up_proj
        halves = target[int(number)].chunk(1 if part == "down" else 2)
        halves[part == "up"].copy_(put_fp8(stored, name.removesuffix(".weight"), form))
    store_quantized(folder, stored, form.config)
    assert isinstance(whole, PreTrainedModel)
    return whole


def store_quantized(folder: Path, stored: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Put tensors and the quantization's configuration into a checkpoint's folder."""
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(whole))


def put_fp8(stored: dict[str, Tensor], name: str, form: Form) -> Tensor:
    """Store a weight in fp8 instead; returns what it then is."""
    weight = stored[f"{name}.weight"]
    block = form.block(weight.shape)
    values, scales = _quantize(weight, block, form.dtype)
    stored[f"{name}.weight"] = values
    stored[f"{name}.{form.scale}"] = form.scale_shape(scales)
    if form.input_scale is not None:
        stored[f"{name}.{form.input_scale}"] = torch.tensor(0.5)
    return values.float() * _spread(scales, values.shape, block)


def _quantize(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = [part.abs() for part in weight.split(block[0])]
    largest = [[tile.max() for tile in row.split(block[1], 1)] for row in rows]
    scales = (torch.tensor(largest) / LARGEST).to(dtype)
    shape = weight.shape
    values = weight / _spread(scales, shape, block)
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def _spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """One for each number, [O, I]."""
    spread = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]
