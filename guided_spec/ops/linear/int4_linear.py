"""Matrix products with weights in int4: each number is half a byte, and a group shares its factor.

A weight is (number - zero point) * scale. The weights alone are rounded, as the checkpoint has
them; the states they are multiplied with keep their precision. The torch code here is the
definition; on CUDA the kernels of ``guided_spec.ops.linear.int4_linear_triton`` run.

Groups are those of Frantar et al., "GPTQ" (2022), and Lin et al., "AWQ" (2023): consecutive inputs
of one output.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.ops.kernels import has_triton, kernels_of
from guided_spec.ops.linear.fp8_linear import nobody_arrived, require_finite

LARGEST = 15  # of the numbers, which are 0 and more
IN_WORD = 4
WIDEST_TILE = 128  # inputs


class Int4Weight(NamedTuple):
    """values: int16 [O, I // 4], contiguous. factors: int32 [G, O], contiguous.

    A tile of ``tile`` inputs is a fourth as many words: word j has, from its lowest bits, inputs j,
    j + tile / 4, j + tile / 2 and j + 3 * tile / 4 of the tile. So the quarters of a tile are four
    matrices as they are read, and each is of one group. Group g has the inputs from g * I / G; its
    factor is the bits of the scale in float32, with the zero point as the lowest 4 of them.
    order: int64 [I], which column of the states each input is; None for all in turn.
    arrived: int32 [ceil(O / COUNTED)], where programs of a kernel count each other; 0 between
    products. So a weight serves one stream at a time.
    """

    values: Tensor
    factors: Tensor
    order: Tensor | None
    arrived: Tensor

    @classmethod
    def of(
        cls, numbers: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None
    ) -> Int4Weight:
        """Packed. numbers: uint8 [O, I], zeros: uint8 [G, O], 0 to 15. scales: floating [G, O].

        Of scales in float32 the lowest 4 bits are lost, a millionth of them.

        Raises ConfigError for another dtype of numbers, for shapes that do not fit, and for scales
        that are NaN or infinite.
        """
        if numbers.dtype != torch.uint8 or numbers.dim() != 2:
            shown = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
            raise ConfigError("numbers", shown, "must be torch.uint8 of shape [O, I]")
        outputs, inputs = numbers.shape
        if inputs % IN_WORD:
            raise ConfigError(
                "numbers", (outputs, inputs), f"must be [O, I], I a multiple of {IN_WORD}"
            )
        groups = len(scales)
        if tuple(scales.shape) != (groups, outputs) or groups == 0 or inputs % groups:
            fix = f"must be [G, {outputs}], in G equal groups of the {inputs} inputs"
            raise ConfigError("scales", tuple(scales.shape), fix)
        require_finite("scales", scales.float())
        if zeros.shape != scales.shape or zeros.dtype != torch.uint8:
            shown = f"{zeros.dtype} of shape {tuple(zeros.shape)}"
            raise ConfigError("zeros", shown, f"must be torch.uint8 of shape {tuple(scales.shape)}")
        if order is not None and not torch.equal(order.sort().values, _steps(inputs, order)):
            raise ConfigError("order", tuple(order.shape), f"must be a permutation of [{inputs}]")
        quarter = _tile(inputs, inputs // groups) // IN_WORD
        values = torch.zeros(outputs, inputs // IN_WORD, dtype=torch.int16, device=numbers.device)
        for at, part in enumerate(numbers.view(outputs, -1, IN_WORD, quarter).unbind(2)):
            values |= part.flatten(1).to(torch.int16) << 4 * at
        factors = scales.float().contiguous().view(torch.int32) & ~LARGEST | zeros
        return cls(values, factors, order, nobody_arrived(outputs, numbers.device))

    @classmethod
    def joined(cls, parts: Sequence[Int4Weight], values: Tensor) -> Int4Weight:
        """Several maps of the same inputs, of one ``form``, concatenated; values: theirs."""
        factors = torch.cat([part.factors for part in parts], 1)
        return cls(values, factors, parts[0].order, nobody_arrived(len(values), values.device))

    @property
    def scales(self) -> Tensor:
        """float32 [G, O]."""
        return (self.factors & ~LARGEST).view(torch.float32)

    @property
    def zeros(self) -> Tensor:
        """int32 [G, O]."""
        return self.factors & LARGEST

    @property
    def inputs(self) -> int:
        """I."""
        return self.values.shape[1] * IN_WORD

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.inputs // len(self.factors)

    @property
    def tile(self) -> int:
        """Inputs of a tile, see above: a power of two."""
        return _tile(self.inputs, self.group)

    @property
    def form(self) -> Hashable:
        """What is equal of weights that can be joined."""
        order = None if self.order is None else bytes(self.order.cpu().numpy())
        return "int4", self.group, order

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``int4_linear``."""
        return int4_linear(x, self, bias)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """``multiply_out``."""
        return multiply_out(self, dtype)


def _tile(inputs: int, group: int) -> int:
    return min(inputs & -inputs, IN_WORD * (group & -group), WIDEST_TILE)


def _steps(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device, dtype=like.dtype)


def unpacked(weight: Int4Weight) -> Tensor:
    """uint8 [O, I]: the numbers, inputs as they are stored."""
    tiles = weight.values.view(len(weight.values), -1, weight.tile // IN_WORD)
    parts = [(tiles >> 4 * at & LARGEST).to(torch.uint8) for at in range(IN_WORD)]
    return torch.stack(parts, 2).view(len(tiles), -1)


def multiply_out(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """[O, I]: (number - zero) * scale, worked out in float32 and rounded once to ``dtype``."""
    found = _in_stored_order(weight, dtype)
    return found if weight.order is None else found[:, weight.order.argsort()]


def _in_stored_order(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    numbers = unpacked(weight).unflatten(1, (-1, weight.group))
    centered = numbers.float() - weight.zeros.T.unsqueeze(2)
    found: Tensor = centered * weight.scales.T.unsqueeze(2)
    return found.to(dtype).flatten(1)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """[..., O]: x [..., I] times the weight, plus the bias [O].

    x, bias: of one floating dtype, that of the result. Sums in float32. Never waits for the device.

    Raises ConfigError for an x of another width.
    """
    if x.shape[-1] != weight.inputs:
        raise ConfigError("x", tuple(x.shape), f"must be [..., {weight.inputs}]")
    given = x if weight.order is None else x.index_select(-1, weight.order)
    if x.is_cuda and has_triton() and kernels_of(__name__).serves(weight):
        found: Tensor = kernels_of(__name__).int4_linear(given, weight, bias)
        return found
    return functional.linear(given, _in_stored_order(weight, x.dtype), bias)
