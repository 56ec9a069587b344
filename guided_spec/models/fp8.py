"""Checkpoints whose linear layers are in fp8, loaded as they are stored.

transformers multiplies such weights out where there is no GPU, and needs kernels from a hub where
there is one. Here the layers keep their bytes and their scales, and are multiplied by
``guided_spec.ops.fp8_linear``. Which layers are quantized, the tensors of the checkpoint say; from
its configuration is the size of blocks alone. Scales of activations are not read: activations keep
their precision.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.ops.fp8_linear import fp8_linear
from guided_spec.ops.fp8_weight import FP8, Fp8Weight

__all__ = ["Fp8Linear", "Fp8Recipe", "load_fp8"]

METHOD = "guided_spec_fp8"  # its name among transformers' quantizers
SCALES = ("weight_scale_inv", "weight_scale")  # both are factors of the weight
EXPERTS = ".experts"
# Scales of what is not rounded here.
IGNORED = r"\.(weight_scale_inv|weight_scale|input_scale|activation_scale|k_scale|v_scale)$"


class Fp8Recipe(NamedTuple):
    """How a checkpoint's weights are in fp8. block: of a scale; None for larger ones."""

    block: tuple[int, int] | None

    @classmethod
    def of(cls, quantization: Mapping[str, Any]) -> Fp8Recipe | None:
        """What ``quantization_config`` of a config.json says; None for other kinds of weights.

        Those of quant_method "fp8" (Qwen, DeepSeek: blocks, or one scale a matrix) and of
        "compressed-tensors" whose groups are all float-quantized to 8 bits.

        Raises ModelError for other numbers of 8 bits than e4m3.
        """
        method = quantization.get("quant_method")
        if method == "fp8":
            kind = quantization.get("fmt", "e4m3")
            if kind not in ("e4m3", "float8_e4m3fn"):
                raise ModelError(
                    f"quantization_config: quant_method='fp8' with fmt={kind!r} is not supported; "
                    "pass a checkpoint in e4m3, or one that is not quantized"
                )
            return cls(_pair(quantization.get("weight_block_size")))
        if method != "compressed-tensors":
            return None
        groups = (quantization.get("config_groups") or {}).values()
        weights = [group.get("weights") or {} for group in groups]
        is_fp8 = all(one.get("type") == "float" and one.get("num_bits") == 8 for one in weights)
        blocks = {_pair(one.get("block_structure")) for one in weights}
        return cls(blocks.pop()) if is_fp8 and len(blocks) == 1 else None


def _pair(block: Any) -> tuple[int, int] | None:
    return None if block is None else (int(block[0]), int(block[1]))


class Fp8Linear(nn.Module):
    """What stands where a linear layer would: weights in fp8, for inference alone.

    linear: of which it takes shape, device and bias; its weights are still to be filled.
    """

    scales: Tensor
    arrived: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        values = torch.empty(linear.weight.shape, dtype=FP8, device=linear.weight.device)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.bias = linear.bias
        self.block = (self.out_features, self.in_features)

    def scale(self, scales: Tensor, block: tuple[int, int] | None) -> None:
        """Take scales as a checkpoint has them: one, one for each output, or for each block.

        Raises ConfigError for as many as are none of these.
        """
        if block is None:
            is_whole = scales.numel() == 1
            block = (self.out_features if is_whole else 1, self.in_features)
        if scales.dim() < 2:
            scales = scales.reshape(-1, 1)
        found = Fp8Weight.of(self.weight.data, scales.to(self.weight.device).float(), block)
        self.block = block
        self.register_buffer("scales", found.scales, persistent=False)
        self.register_buffer("arrived", found.arrived, persistent=False)

    @property
    def numbers(self) -> Fp8Weight:
        """The weight and its scales."""
        return Fp8Weight(self.weight.data, self.scales, self.block, self.arrived)

    def forward(self, states: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return fp8_linear(states, self.numbers, self.bias)


def load_fp8(
    path: str, recipe: Fp8Recipe, config: Any, arguments: Mapping[str, Any]
) -> PreTrainedModel | None:
    """The model on the CPU with its linear layers in fp8; None where not only these are quantized.

    path: a folder or a hub id. config: transformers' of it, changed meanwhile. arguments: of
    ``from_pretrained``.

    Raises ModelError for a weight without a scale, or another number of scales than it has blocks.
    """
    checkpoint = Checkpoint.open(path, revision=arguments.get("revision"))
    scales = _scale_names(checkpoint)
    stored = config.quantization_config
    config.quantization_config = {"quant_method": METHOD, "linears": sorted(scales)}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, **arguments)
    except _OthersError:
        return None
    finally:
        config.quantization_config = stored
    model.config.quantization_config = stored
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
    found = {_stored_name(name, scales): linear for name, linear in linears.items()}
    read = checkpoint.read(scales[name] for name in found)
    for name, linear in found.items():
        try:
            linear.scale(read[scales[name]], recipe.block)
        except ConfigError as error:
            problem = f"checkpoint={path!r}: {scales[name]}: {error}; the checkpoint is broken"
            raise ModelError(problem) from error
    assert isinstance(model, PreTrainedModel)
    return model


def _scale_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Of each module with weights in fp8, the name of its scales."""
    scales = {
        name.removesuffix(f".{suffix}"): name
        for suffix in SCALES
        for name in checkpoint.names
        if name.endswith(f".{suffix}")
    }
    quantized = {name.removesuffix(".weight") for name in checkpoint.fp8_names()}
    unpaired = sorted(quantized ^ set(scales))
    if unpaired:
        pair = f"weights in float8_e4m3fn beside {' or '.join(SCALES)}"
        problem = f"expected {pair}, found one without the other at {unpaired[0]!r}"
        raise ModelError(f"checkpoint={checkpoint.source!r}: {problem}; the checkpoint is broken")
    return scales


@register_quantization_config(METHOD)
class _Config(QuantizationConfigMixin):
    """linears: the names of the layers in fp8, as the checkpoint has them."""

    quant_method: Any  # transformers' own are members of an enumeration

    def __init__(self, linears: list[str], quant_method: str = METHOD) -> None:
        self.quant_method = quant_method
        self.linears = linears


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    """Puts ``Fp8Linear`` where the weights are in fp8, before they are read."""

    quantization_config: _Config

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        names = set(self.quantization_config.linears)
        modules = dict(model.named_modules())
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            IGNORED,
        }
        for name, module in modules.items():
            stored = _stored_name(name, names)
            if stored in names and type(module) is nn.Linear:
                parent, _, last = name.rpartition(".")
                setattr(modules[parent], last, Fp8Linear(module))
            elif stored in names or (name.endswith(EXPERTS) and _begins_one(stored, names)):
                raise _OthersError(name)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _OthersError(Exception):
    """A module that is no linear layer has weights in fp8."""


def _stored_name(name: str, stored: Container[str]) -> str:
    """What a checkpoint calls a module: with a vision tower a text's layers are named otherwise."""
    if name in stored:
        return name
    return name.replace("model.language_model.", "language_model.model.")


def _begins_one(name: str, stored: Iterable[str]) -> bool:
    """Experts are one module, and stored one by one."""
    return any(one.startswith(f"{name}.") for one in stored)
