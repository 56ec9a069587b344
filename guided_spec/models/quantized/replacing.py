"""Models whose quantized modules are put in before transformers reads the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "guided_spec"  # its name among transformers' quantizers
LAYER = re.compile(r"\.layers\.(\d+)\.")


class Replaced(NamedTuple):
    """A module in another's place. names: what the checkpoint calls its quantized parts."""

    module: nn.Module
    names: frozenset[str]


class Kind(NamedTuple):
    """replace: a module, its name in the checkpoint, the names of all quantized parts.

    It returns None where the module stays. ignored: a pattern of tensors that transformers is not
    to miss.
    """

    replace: Callable[[nn.Module, str, Collection[str]], Replaced | None]
    ignored: str


KINDS: dict[str, Kind] = {}


class OthersError(Exception):
    """Something is quantized that ``Kind.replace`` does not take; of it, one name."""


def load_replaced(
    path: str, kind: str, names: Collection[str], config: Any, arguments: Mapping[str, Any]
) -> PreTrainedModel:
    """The model on the CPU with modules replaced, whose weights are still to be filled.

    path: a folder or a hub id. kind: a key of ``KINDS``. names: of all quantized parts. config:
    transformers' of it, changed meanwhile. arguments: of ``from_pretrained``.

    Raises OthersError where not all ``names`` are of modules that are replaced, or that draft.
    """
    stored = config.quantization_config
    config.quantization_config = {"quant_method": METHOD, "kind": kind, "names": sorted(names)}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, **{**arguments, "config": config})
    finally:
        config.quantization_config = stored
    model.config.quantization_config = stored
    assert isinstance(model, PreTrainedModel)
    return model


def stored_name(name: str, stored: Container[str]) -> str:
    """What a checkpoint calls a module: with a vision tower a text's layers are named otherwise."""
    if name in stored:
        return name
    return name.replace("model.language_model.", "language_model.model.")


@register_quantization_config(METHOD)
class _Config(QuantizationConfigMixin):
    """As ``load_replaced`` says."""

    quant_method: Any  # transformers' own are members of an enumeration

    def __init__(self, kind: str, names: list[str], quant_method: str = METHOD) -> None:
        self.quant_method = quant_method
        self.kind = kind
        self.names = names


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    """Puts modules where the weights are quantized, before the others are read."""

    quantization_config: _Config

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        kind, names = KINDS[self.quantization_config.kind], set(self.quantization_config.names)
        modules = dict(model.named_modules())
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            kind.ignored,
        }
        found = set[str]()
        for name, module in modules.items():
            replaced = kind.replace(module, stored_name(name, names), names)
            if replaced is not None:
                parent, _, last = name.rpartition(".")
                setattr(modules[parent], last, replaced.module)
                found |= replaced.names
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        others = [name for name in names - found if not _is_of_a_draft(name, layers)]
        if others:
            raise OthersError(min(others))

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _is_of_a_draft(name: str, num_layers: int) -> bool:
    """Modules of multi-token prediction are in the checkpoint, and not in the model."""
    layer = LAYER.search(name)
    return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= num_layers)
