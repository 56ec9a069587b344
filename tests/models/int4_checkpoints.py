"""Checkpoints with linear layers in int4, packed as their formats say, and the same in float32.

Packed number by number, as the tools that write them do: AutoAWQ's awq/modules/linear/gemm.py,
GPTQModel's gptqmodel/nn_modules/qlinear, compressed-tensors' compressors/pack_quantized.py.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.models.fp8_checkpoints import store_quantized

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Form(NamedTuple):
    """One way to publish. layout: awq, gptq, gptq_v2 or pack-quantized. group: inputs, -1 for all.

    lowest: of zero points. is_ordered: whether groups are of inputs in an order of their own.
    """

    layout: str
    group: int
    is_symmetric: bool = False
    lowest: int = 0
    is_ordered: bool = False
    config: dict[str, Any] | None = None

    @property
    def quantization(self) -> dict[str, Any]:
        """The ``quantization_config`` of config.json."""
        if self.layout == "pack-quantized":
            strategy = "channel" if self.group < 0 else "group"
            weights = {
                "num_bits": 4,
                "type": "int",
                "strategy": strategy,
                "symmetric": self.is_symmetric,
                "group_size": None if self.group < 0 else self.group,
                "actorder": "group" if self.is_ordered else None,
            }
            group = {"weights": weights, "targets": ["Linear"], "input_activations": None}
            return {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "ignore": ["lm_head"],
                "config_groups": {"group_0": group},
                **(self.config or {}),
            }
        if self.layout == "awq":
            found = {"quant_method": "awq", "version": "gemm", "zero_point": True}
        else:
            found = {"quant_method": "gptq", "sym": self.is_symmetric, "desc_act": self.is_ordered}
        return {**found, "bits": 4, "group_size": self.group, **(self.config or {})}


FORMS = {
    "awq": Form("awq", 32),
    "awq, all inputs": Form("awq", -1),
    "awq of GPTQModel": Form("awq", 16, config={"version": None, "checkpoint_format": "gemm"}),
    "gptq": Form("gptq", 32, lowest=1),
    "gptq, symmetric": Form("gptq", -1, is_symmetric=True),
    "gptq, zero points of 0": Form("gptq", 16),
    "gptq, ordered": Form("gptq", 32, is_symmetric=True, is_ordered=True),
    "gptq, a short group": Form("gptq", 24, lowest=1, is_ordered=True),
    "gptq_v2": Form("gptq_v2", 32, config={"checkpoint_format": "gptq_v2"}),
    "compressed groups": Form("pack-quantized", 32, is_symmetric=True),
    "compressed channels": Form("pack-quantized", -1, is_symmetric=True),
    "compressed zero points": Form("pack-quantized", 16),
    "compressed, ordered": Form("pack-quantized", 32, is_ordered=True),
}


@torch.no_grad()
def write_int4(
    folder: Path, model: PreTrainedModel, form: Form, spare: str = "", *, with_head: bool = False
) -> PreTrainedModel:
    """Write the model with the linear layers of its decoder in int4; returns what it then computes.

    spare: linear layers whose names end so keep their weights. with_head: the output head too.
    """
    whole: Any = copy.deepcopy(model)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, module in whole.named_modules():
        is_spared = bool(spare) and name.endswith(spare)
        if type(module) is not nn.Linear or is_spared or (name == "lm_head" and not with_head):
            continue
        # Maps of the same inputs have them in the same order.
        module.weight.copy_(put_int4(stored, name, form))
    store_quantized(folder, stored, form.quantization)
    assert isinstance(whole, PreTrainedModel)
    return whole


def put_int4(stored: dict[str, Tensor], name: str, form: Form) -> Tensor:
    """Store a weight in int4 instead; returns what it then is."""
    weight = stored.pop(f"{name}.weight").float()
    outputs, inputs = weight.shape
    size = inputs if form.group < 0 else form.group
    order = list(range(inputs))
    if form.is_ordered:
        random.Random(inputs).shuffle(order)
    g_idx = np.zeros(inputs, dtype=np.int32)
    for at, column in enumerate(order):
        g_idx[column] = at // size
    groups = -(-inputs // size)
    numbers = np.zeros((outputs, inputs), dtype=np.int64)
    scales, zeros = torch.zeros(outputs, groups), np.zeros((outputs, groups), dtype=np.int64)
    whole = torch.zeros(outputs, inputs)
    for group in range(groups):
        columns = np.flatnonzero(g_idx == group)
        part = weight[:, columns]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if form.is_symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / 15).clamp(min=1e-4).half().float()
        zero = (-low / scale).round().clamp(form.lowest, 15)
        zero = torch.full_like(zero, 8) if form.is_symmetric else zero
        found = (part / scale[:, None] + zero[:, None]).round().clamp(0, 15)
        whole[:, columns] = (found - zero[:, None]) * scale[:, None]
        numbers[:, columns], zeros[:, group] = found.numpy(), zero.numpy()
        scales[:, group] = scale
    made = _compressed if form.layout == "pack-quantized" else _in_columns
    for suffix, tensor in made(form, numbers, zeros, scales, g_idx).items():
        stored[f"{name}.{suffix}"] = tensor
    return whole


def _in_columns(
    form: Form, numbers: np.ndarray, zeros: np.ndarray, scales: Tensor, g_idx: np.ndarray
) -> dict[str, Tensor]:
    """AWQ's and GPTQ's tensors."""
    (outputs, inputs), groups = numbers.shape, zeros.shape[1]
    awq = form.layout == "awq"
    zero_words = np.zeros((groups, outputs // 8), dtype=np.uint32)
    for word in range(outputs // 8):
        for nibble in range(8):
            output = 8 * word + (AWQ_ORDER[nibble] if awq else nibble)
            zero_words[:, word] |= zeros[output].astype(np.uint32) << (4 * nibble)
    if form.layout == "gptq":
        zero_words -= np.uint32(0x11111111)
    if awq:
        words = np.zeros((inputs, outputs // 8), dtype=np.uint32)
        for word in range(outputs // 8):
            for nibble in range(8):
                output = 8 * word + AWQ_ORDER[nibble]
                words[:, word] |= numbers[output].astype(np.uint32) << (4 * nibble)
    else:
        words = np.zeros((inputs // 8, outputs), dtype=np.uint32)
        for word in range(inputs // 8):
            for nibble in range(8):
                words[word] |= numbers[:, 8 * word + nibble].astype(np.uint32) << (4 * nibble)
    found = {
        "qweight": torch.from_numpy(words.view(np.int32)),
        "qzeros": torch.from_numpy(zero_words.view(np.int32)),
        "scales": scales.T.half().contiguous(),
    }
    return found if awq else {**found, "g_idx": torch.from_numpy(g_idx)}


def _compressed(
    form: Form, numbers: np.ndarray, zeros: np.ndarray, scales: Tensor, g_idx: np.ndarray
) -> dict[str, Tensor]:
    """Those of compressed-tensors."""
    (outputs, inputs), groups = numbers.shape, zeros.shape[1]
    words = np.zeros((outputs, -(-inputs // 8)), dtype=np.uint32)
    for column in range(inputs):
        words[:, column // 8] |= numbers[:, column].astype(np.uint32) << (4 * (column % 8))
    found = {
        "weight_packed": torch.from_numpy(words.view(np.int32)),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not form.is_symmetric:
        packed = np.zeros((-(-outputs // 8), groups), dtype=np.uint32)
        for row in range(outputs):
            packed[row // 8] |= zeros[row].astype(np.uint32) << (4 * (row % 8))
        found["weight_zero_point"] = torch.from_numpy(packed.view(np.int32))
    if form.is_ordered:
        found["weight_g_idx"] = torch.from_numpy(g_idx)
    return found
