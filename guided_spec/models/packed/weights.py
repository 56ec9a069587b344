"""Linear maps of one input as one: their weights are concatenated.

The packed weights replace the stock ones, whose parameters become views of them; so
nothing is stored twice, and the stock modules compute what they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.models.fp8 import Fp8Linear
from guided_spec.models.linear_layer import has_plain_weight
from guided_spec.models.lora.low_rank import LoraLinear, LowRank, without_adapters
from guided_spec.ops.linear.fp8_linear import Fp8Weight, fp8_linear
from guided_spec.ops.linear.linear import linear


class PackedWeights(NamedTuple):
    """Several linear maps of one input as one: weight [sum of outputs, inputs], and biases.

    low_rank: what adapters add to the maps; None without any.
    """

    weight: Tensor | Fp8Weight
    bias: Tensor | None
    low_rank: LowRank | None = None

    def product(self, states: Tensor) -> Tensor:
        """[N, I] to [N, sum of outputs]."""
        multiply: Any = fp8_linear if isinstance(self.weight, Fp8Weight) else linear
        found: Tensor = multiply(states, self.weight, self.bias)
        return found if self.low_rank is None else self.low_rank.add(found, states)


def is_plain(layer: Any) -> bool:
    """Whether it is a linear layer of plain weights, or in fp8, with adapters or without."""
    layer = without_adapters(layer)
    return type(layer) is Fp8Linear or (type(layer) is nn.Linear and has_plain_weight(layer))


def can_be_joined(linears: Sequence[Any]) -> bool:
    """Whether plain layers are all in one form: a few of them may not be in fp8."""
    plain = map(without_adapters, linears)
    return len({type(one) is Fp8Linear and one.numbers.block[1] for one in plain}) == 1


def pack(layers: Sequence[nn.Linear | Fp8Linear | LoraLinear]) -> PackedWeights:
    """The maps as one, whose weight the layers' own become views of, where they are not yet."""
    linears, low_rank = [without_adapters(one) for one in layers], LowRank.joined(layers)
    weight = join(linears)
    parts = weight.split([len(linear.weight) for linear in linears])
    scaled = [linear.numbers for linear in linears if isinstance(linear, Fp8Linear)]
    joined = Fp8Weight.joined(scaled, weight) if scaled else weight
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
