"""The first weights of a draft head that is made from nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.target_layers import TargetLayers

__all__ = ["Initialize", "copy_layers", "initialize", "start_modules"]

Head = TypeVar("Head", bound=nn.Module)
Initialize = Literal["target", "random"]


@torch.no_grad()
def initialize(head: nn.Module, std: float) -> None:
    """Weights of ``Linear`` and ``Embedding`` from normal(0, std), biases zero; norms stay ones.

    This is what transformers does to layers of Llama and Qwen3. Drawn from torch's own generator of
    the weights' device, in the order of the head's modules.
    """
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


@torch.no_grad()
def start_modules(build: Callable[[], Head], target: PreTrainedModel) -> Head:
    """A head of the target's own kind of layer, on its device, in float32 and in train mode.

    build: makes the head on torch's default device. Its weights start as the target's class starts
    its own: routers, experts, norms that scale by 1 + w. They are drawn from torch's own generator
    of the device, in the order of the head's modules.

    Raises ModelError for layers that do not run outside their model; one token is tried.
    """
    try:
        with torch.device(target.device):
            head = build().float()
        rule: Any = target
        for module in head.modules():
            rule._init_weights(module)
        _run_once(head, target)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a layer that was meant for its model alone may raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model_type={target.config.model_type!r}: expected decoder layers that run alone, "
            f"found that they fail ({reason}); use EAGLE-3 for this target"
        ) from error
    return head


def _run_once(head: Any, target: PreTrainedModel) -> None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    masks = {
        "eager": torch.zeros(1, 1, 1, 1, device=target.device),
        "sdpa": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=target.device),
    }
    head(
        token,
        torch.zeros(1, 1, head.hidden_size, device=target.device),
        module=0,
        position_ids=token,
        attention_mask=masks.get(head.config._attn_implementation),
        past_key_values=None,
    )


def copy_layers(layers: Iterable[nn.Module], kind: TargetLayers, start: Initialize) -> None:
    """Start decoder layers as the target's last one, or leave them as they are.

    A last layer with other weights, of linear attention or quantized, is not copied. Raises
    ConfigError for another ``start`` than "target" and "random".
    """
    if start not in ("target", "random"):
        raise ConfigError("initialize", start, "must be 'target' or 'random'")
    if start == "target":
        for layer in layers:
            kind.copy_last(layer)
