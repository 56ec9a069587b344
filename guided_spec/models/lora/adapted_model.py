"""A base model with adapters in its linear layers; the base itself stays as it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from guided_spec.errors import ModelError
from guided_spec.models.lora.checkpoint import LowRankPair, read_adapter
from guided_spec.models.lora.low_rank import LoraLinear
from guided_spec.models.lora.slot_adapters import SlotAdapters
from guided_spec.models.stock.slot_trial import errors_naming

# How a whole model of text and pictures names the layers of its language model.
_INSIDE = re.compile(
    r"^(model\.(language_model|text_model)|language_model(\.model)?|model\.model)\."
)
_EXPERTS = re.compile(r"\bexperts\b")
_PROBE = (1, 2, 3, 5)  # token ids


def with_adapters(
    model: PreTrainedModel, loras: Mapping[str, str | Path], num_slots: int
) -> PreTrainedModel:
    """A model that shares all modules with ``model`` but those that lead to an adapted layer.

    loras: folders or hub ids by the names of the adapters. num_slots: of texts at most.

    Outside of ``SlotAdapters.reading`` it computes what the base does. Raises ModelError, naming
    the adapter and the layer, for one that does not fit.
    """
    if len({parameter.device for parameter in model.parameters()}) != 1:
        fix = "pass no device_map, or merge the adapters"
        raise ModelError(f"loras={[*loras]}: the model must be on one device for these; {fix}")
    layers: dict[str, dict[str, LowRankPair]] = {}
    for name, path in loras.items():
        argument = f"loras[{name!r}]"
        for layer, pair in read_adapter(argument, path).items():
            found = _find_layer(model, layer, pair, f"{argument}={str(path)!r}")
            if name in layers.setdefault(found, {}):
                fix = "save the adapter again, with one name for it"
                raise ModelError(f"{argument}={str(path)!r}: it has {found} twice; {fix}")
            layers[found][name] = pair
    ranks = [max(len(of[name].down) for of in layers.values() if name in of) for name in loras]
    adapters = SlotAdapters([*loras], ranks, num_slots, model.device)
    adapted = {}
    for layer, pairs in layers.items():
        base = model.get_submodule(layer)
        down, up = _stacked(pairs, dict(zip(loras, ranks, strict=True)))
        down, up = (one.to(model.device, model.dtype) for one in (down, up))
        adapted[layer] = LoraLinear(base, adapters, down, up)
    found_model: Any = _rebuilt(model, "", adapted)
    _require_called(found_model, adapted, adapters)
    whole: PreTrainedModel = found_model
    return whole


def _find_layer(model: PreTrainedModel, layer: str, pair: LowRankPair, shown: str) -> str:
    """The name in the model of an adapter's layer, which the pair fits. Raises ModelError."""
    modules = dict(model.named_modules())
    name = layer if layer in modules else _INSIDE.sub("model.", layer)
    module = modules.get(name)
    if _EXPERTS.search(layer):
        fix = "train without the experts' layers, or merge it into its base"
        raise ModelError(f"{shown}: {layer} is of routed experts, which take no adapters; {fix}")
    if module is None:
        fix = "pass an adapter that was trained on this model, on layers of its text alone"
        raise ModelError(f"{shown}: the model has no layer {layer}; {fix}")
    stock: Any = model
    if module is stock.get_output_embeddings():
        fix = "train without it, or merge the adapter into its base"
        raise ModelError(f"{shown}: {layer} is the output head, which drafts share; {fix}")
    sizes = _sizes(module)
    if sizes is None:
        fix = "train without it, or merge the adapter into its base"
        raise ModelError(f"{shown}: {layer} is no linear layer, a {type(module).__name__}; {fix}")
    own = len(pair.up), pair.down.shape[1]
    if own != sizes:
        reason = f"{layer} is of [{own[0]}, {own[1]}], that of the model [{sizes[0]}, {sizes[1]}]"
        raise ModelError(f"{shown}: {reason}; pass an adapter that was trained on this model")
    return name


def _sizes(module: Any) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer of any kind; None for another module."""
    if isinstance(module, Conv1D):
        return module.nf, int(module.weight.shape[0])
    is_linear = isinstance(module, nn.Linear) or type(module).__name__.endswith("Linear")
    if not (is_linear and hasattr(module, "in_features") and hasattr(module, "out_features")):
        return None
    return int(module.out_features), int(module.in_features)


def _stacked(pairs: Mapping[str, LowRankPair], ranks: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """[R, I] and [O, R]: the matrices of all adapters, zeros where one has fewer columns."""
    some = next(iter(pairs.values()))
    downs, ups = list[Tensor](), list[Tensor]()
    for name, rank in ranks.items():
        down, up = torch.zeros(rank, some.down.shape[1]), torch.zeros(len(some.up), rank)
        if name in pairs:
            own = len(pairs[name].down)
            down[:own], up[:, :own] = pairs[name].down.float(), pairs[name].up
        downs.append(down)
        ups.append(up)
    return torch.cat(downs), torch.cat(ups, 1)


def _rebuilt(module: nn.Module, path: str, adapted: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a module, with copies of those in it that lead to ``adapted`` ones, by name."""
    own = copy.copy(module)
    # What is registered on one of the two is not to be found on the other.
    for registered in ("_modules", "_forward_hooks", "_forward_pre_hooks", "_buffers"):
        own.__dict__[registered] = copy.copy(module.__dict__[registered])
    for name, child in module.named_children():
        at = f"{path}{name}"
        if at in adapted:
            own._modules[name] = adapted[at]
        elif any(one.startswith(f"{at}.") for one in adapted):
            own._modules[name] = _rebuilt(child, f"{at}.", adapted)
    return own


@torch.inference_mode()
def _require_called(
    model: nn.Module, adapted: Mapping[str, LoraLinear], adapters: SlotAdapters
) -> None:
    """Raise ModelError for a layer whose weight is read past it: its terms would be lost."""
    called: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    hooks = [layer.register_forward_hook(note(name)) for name, layer in adapted.items()]
    whole: Any = model
    ids = torch.tensor([_PROBE], device=whole.device)
    try:
        failing = errors_naming(whole, "a forward with adapters failed")
        with failing, adapters.reading(ids.new_zeros(1)):
            whole(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for name in adapted:
        if name not in called:
            fix = "train without it, or merge the adapter into its base"
            raise ModelError(f"loras={[*adapters.names]}: {name} is not run as a layer; {fix}")
