"""Checkpoints whose linear layers are in int4, of AWQ, GPTQ or compressed-tensors.

The layers keep 4 bits a number, in one layout for all three, and are multiplied by
``guided_spec.ops.linear.int4_linear``. Which layers are quantized, the tensors of the checkpoint
say. Activations keep their precision.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.quantized.int4_layouts import Int4Recipe
from guided_spec.models.quantized.replacing import (
    KINDS,
    Kind,
    OthersError,
    Replaced,
    load_replaced,
    stored_name,
)
from guided_spec.ops.linear.int4_linear import IN_WORD, Int4Weight, int4_linear

IGNORED = (
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_shape|weight_zero_point"
    r"|weight_g_idx|input_scale|output_scale|k_scale|v_scale)$"
)
OUTPUT = re.compile(r"(^|\.)lm_head$")
_OF_OTHERS = f"no linear layer of the decoder, or its inputs are no multiple of {IN_WORD}"

_LOG = logging.getLogger(__name__)


class Int4Linear(nn.Module):
    """Replaces a linear layer: weights in int4, for inference alone.

    linear: of which it takes shape and bias; its weights are still to be filled.
    """

    weight: nn.Parameter
    factors: Tensor
    order: Tensor | None
    arrived: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def fill(self, weight: Int4Weight) -> None:
        """Take a weight [O, I]."""
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        for name, buffer in weight._asdict().items():
            if name != "values":
                self.register_buffer(name, buffer, persistent=False)

    @property
    def numbers(self) -> Int4Weight:
        """The weight."""
        return Int4Weight(self.weight.data, self.factors, self.order, self.arrived)

    def forward(self, states: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return int4_linear(states, self.numbers, self.bias)


def load_int4(
    path: str,
    recipe: Int4Recipe,
    config: Any,
    arguments: Mapping[str, Any],
    device: torch.device,
) -> PreTrainedModel | None:
    """The model with linear layers in int4 on ``device``; None, and a warning, for another kind.

    path: a folder or a hub id. config: transformers' of it, changed meanwhile. arguments: of
    ``from_pretrained``.

    Raises ModelError for tensors that are missing, or have other shapes or dtypes than they must.
    """
    others = "%s: transformers loads it, by its own quantizer and with its packages: %s"
    if recipe.obstacle is not None:
        _LOG.warning(others, path, recipe.obstacle)
        return None
    checkpoint = Checkpoint.open(path, revision=arguments.get("revision"), argument="model")
    try:
        names = layer_names(checkpoint.names, recipe, checkpoint.source)
        model = load_replaced(path, "int4", names, config, arguments)
    except OthersError as error:
        _LOG.warning(others, path, f"{error} is quantized, and {_OF_OTHERS}")
        return None
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            try:
                _fill(module, stored_name(name, names), recipe, checkpoint, device)
            except ConfigError as error:
                size = recipe.group_size or -1
                fix = f"the checkpoint is broken, or its group_size is not {size}"
                problem = f"{checkpoint.source}: {name}: {error}; {fix}"
                raise ModelError(problem) from error
    return model


def _fill(
    layer: Int4Linear,
    name: str,
    recipe: Int4Recipe,
    checkpoint: Checkpoint,
    device: torch.device,
) -> None:
    suffixes = (*recipe.names, *recipe.optional, "bias")
    there = [suffix for suffix in suffixes if f"{name}.{suffix}" in checkpoint.names]
    read = checkpoint.read(f"{name}.{suffix}" for suffix in there)
    stored = {suffix: read[f"{name}.{suffix}"].to(device) for suffix in there}
    layer.fill(recipe.weight(stored, (layer.out_features, layer.in_features)))
    bias = stored.get("bias")
    if layer.bias is None and bias is not None and bool(bias.any()):
        fix = "must be 0: this layer of the model has none"
        raise ConfigError("bias", f"of shape {tuple(bias.shape)}", fix)


def layer_names(names: Collection[str], recipe: Int4Recipe, source: str) -> frozenset[str]:
    """The layers with weights in int4. names: of all tensors of a checkpoint.

    source: to name in the error. Raises ModelError for a layer that lacks one of its tensors, and
    OthersError for scales alone: AWQ has such for activations of some families.
    """
    parts = {
        suffix: {name.removesuffix(f".{suffix}") for name in names if name.endswith(f".{suffix}")}
        for suffix in recipe.names
    }
    found = set[str]().union(*parts.values())
    numbers, scales, last = parts.values()
    if alone := scales - numbers - last:
        raise OthersError(min(alone))
    for suffix, layers in parts.items():
        if lacking := found - layers:
            at, have = min(lacking), [one for one in parts if min(lacking) in parts[one]]
            problem = f"expected {at}.{suffix} next to {' and '.join(have)}, found none"
            raise ModelError(f"{source}: {problem}; the checkpoint is broken")
    return frozenset(found)


def _replace(module: nn.Module, name: str, names: Collection[str]) -> Replaced | None:
    """For ``replacing.KINDS``. Output heads are left: heads that draft read their weights."""
    if name not in names or type(module) is not nn.Linear or OUTPUT.search(name):
        return None
    if module.in_features % IN_WORD:  # to be padded by those who can
        return None
    return Replaced(Int4Linear(module), frozenset([name]))


KINDS["int4"] = Kind(_replace, IGNORED)
