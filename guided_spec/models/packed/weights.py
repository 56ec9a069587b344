"""Linear maps of one input as one: their weights are concatenated.

The packed weights replace the stock ones, whose parameters become views of them; so
nothing is stored twice, and the stock modules compute what they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.models.linear_layer import has_plain_weight
from guided_spec.models.lora.low_rank import LoraLinear, LowRank, without_adapters
from guided_spec.models.quantized.linears import QUANTIZED, QuantizedLinear
from guided_spec.ops.linear.linear import linear
from guided_spec.ops.linear.quantized import QuantizedWeight


class PackedWeights(NamedTuple):
    """Several linear maps of one input as one: weight [sum of outputs, inputs], and biases.

    low_rank: what adapters add to the maps; None without any.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    low_rank: LowRank | None = None

    def product(self, states: Tensor) -> Tensor:
        """[N, I] to [N, sum of outputs]."""
        found: Tensor
        if isinstance(self.weight, Tensor):
            found = linear(states, self.weight, self.bias)
        else:
            found = self.weight.product(states, self.bias)
        return found if self.low_rank is None else self.low_rank.add(found, states)


def is_plain(layer: Any) -> bool:
    """Whether it is a linear layer of plain or of known quantized weights, adapters or not."""
    layer = without_adapters(layer)
    return type(layer) in QUANTIZED or (type(layer) is nn.Linear and has_plain_weight(layer))


def can_be_joined(linears: Sequence[Any]) -> bool:
    """Whether plain layers are all in one form: a few of them may not be quantized."""
    plain = map(without_adapters, linears)
    return len({type(one) in QUANTIZED and one.numbers.form for one in plain}) == 1


def pack(layers: Sequence[nn.Linear | QuantizedLinear | LoraLinear]) -> PackedWeights:
    """The maps as one, whose weight the layers' own become views of, where they are not yet."""
    linears, low_rank = [without_adapters(one) for one in layers], LowRank.joined(layers)
    weight = join(linears)
    parts = weight.split([len(linear.weight) for linear in linears])
    numbers: list[Any] = [linear.numbers for linear in linears if isinstance(linear, QUANTIZED)]
    joined = type(numbers[0]).joined(numbers, weight) if numbers else weight
    biases = [linear.bias for linear in linears]
    given = [bias for bias in biases if bias is not None]
    if not given:
        return PackedWeights(joined, None, low_rank)
    filled = [
        given[0].new_zeros(len(part)) if bias is None else bias.data
        for part, bias in zip(parts, biases, strict=True)
    ]
    return PackedWeights(joined, torch.cat(filled), low_rank)


def join(modules: Sequence[Any]) -> Tensor:
    """[sum of outputs, inputs]: the modules' weights as one, which their own become views of."""
    parts = [module.weight.data for module in modules]
    weight = _joined(parts)
    if weight is None:
        kind = parts[0].dtype  # not every torch joins fp8
        weight = torch.cat([part.view(torch.uint8) for part in parts]).view(kind)
        split = weight.split([len(part) for part in parts])
        for module, view in zip(modules, split, strict=True):
            module.weight.data = view
    return weight


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parts that are contiguous already, as another user left them."""
    first, width = parts[0], parts[0].shape[1]
    end = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, width), (width, 1))
