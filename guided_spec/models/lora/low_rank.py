"""Linear layers to whose output adapters add terms of low rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from guided_spec.models.linear_layer import product
from guided_spec.models.lora.slot_adapters import SlotAdapters


class LowRank(NamedTuple):
    """What adapters add to the output of one or several linear layers of the same input.

    down: [P * R, I] of the P parts. ups: of each part, where its outputs begin, and [O, R], with
        the adapters' scaling.
    """

    adapters: SlotAdapters
    down: Tensor
    ups: tuple[tuple[int, Tensor], ...]

    @classmethod
    def joined(cls, layers: Sequence[Any]) -> LowRank | None:
        """Of layers whose outputs are concatenated; None where no adapter changes any."""
        ups, downs, start, adapters = list[tuple[int, Tensor]](), list[Tensor](), 0, None
        for layer in layers:
            if isinstance(layer, LoraLinear):
                adapters = layer.slot_adapters
                ups.append((start, layer.up))
                downs.append(layer.down)
            start += layer.out_features
        return None if adapters is None else cls(adapters, torch.cat(downs), tuple(ups))

    def add(self, output: Tensor, states: Tensor) -> Tensor:
        """The output [..., O] of states [..., I], which is changed in place, with the terms.

        The adapters are those of the forward that ``SlotAdapters.reading`` names.
        """
        left_out = self.adapters.left_out
        if left_out is None:
            return output
        low = functional.linear(states.reshape(-1, states.shape[-1]), self.down)
        # Filled, not multiplied: what another adapter makes of a token may be no number.
        low = low.view(len(low), len(self.ups), -1).masked_fill(left_out.unsqueeze(1), 0)
        flat = output.view(-1, output.shape[-1])
        for at, (start, up) in enumerate(self.ups):
            flat[:, start : start + len(up)].addmm_(low[:, at], up.T)
        return output


class LoraLinear(nn.Module):
    """A stock linear layer, of any kind, with the adapters' terms.

    base: stays as it is. down: [R, I], up: [O, R] with the scaling, zeros where an adapter leaves
        the layer alone.
    """

    down: Tensor
    up: Tensor

    def __init__(self, base: nn.Module, adapters: SlotAdapters, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.base, self.slot_adapters = base, adapters
        self.in_features, self.out_features = down.shape[1], len(up)
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)
        self.train(base.training)

    @property
    def weight(self) -> Any:
        """That of the base."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """That of the base."""
        return self.base.bias

    def forward(self, states: Tensor) -> Tensor:
        """States [..., I] to [..., O]."""
        found = product(self.base, states)
        return LowRank(self.slot_adapters, self.down, ((0, self.up),)).add(found, states)


def adapters_of(model: nn.Module) -> SlotAdapters | None:
    """The adapters of a model; None where it has none."""
    layers = (module for module in model.modules() if isinstance(module, LoraLinear))
    return next((layer.slot_adapters for layer in layers), None)


def without_adapters(layer: Any) -> Any:
    """The base of a layer with adapters; another one as it is."""
    return layer.base if isinstance(layer, LoraLinear) else layer
