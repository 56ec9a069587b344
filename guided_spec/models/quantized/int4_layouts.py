"""How published checkpoints store int4 weights, and what they are in memory.

- "awq": qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales [G, O]. The nibbles of a word,
  from the lowest, are outputs 0, 2, 4, 6, 1, 3, 5, 7 (AutoAWQ, awq/modules/linear/gemm.py).
- "gptq": qweight int32 [I / 8, O], qzeros int32 [G, O / 8], scales [G, O], g_idx int32 [I], the
  group of each input. Nibbles in turn. qzeros were one less each before they were packed, as one
  subtraction of 0x11111111, which is undone likewise; in "gptq_v2" they are as they are
  (GPTQModel, gptqmodel/utils/model.py: convert_gptq_v1_to_v2_format_module).
- "pack-quantized": weight_packed int32 [O, ceil(I / 8)], weight_scale [O, G], weight_shape [2],
  weight_zero_point int32 [ceil(O / 8), G] unless symmetric, weight_g_idx int32 [I] with
  actorder "group". Nibbles in turn, 8 above the number (compressed-tensors,
  compressors/quantized_compressors/pack_quantized.py).

The last word of a line may be padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.linear.int4_linear import Int4Weight

AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each output
IN_WORD = 8
MIDDLE = 8  # the zero point of symmetric weights
ONES = 0x11111111


class Int4Recipe(NamedTuple):
    """How a checkpoint's weights are in int4. layout: see above. group_size: None for all inputs.

    obstacle: why it is left to transformers; None where it is not.
    """

    layout: str
    group_size: int | None
    obstacle: str | None = None

    @classmethod
    def of(cls, quantization: Mapping[str, Any]) -> Int4Recipe | None:
        """What ``quantization_config`` of a config.json says; None for other kinds of weights."""
        method = quantization.get("quant_method")
        if method in ("awq", "gptq"):
            return _of_words(method, quantization)
        if method != "compressed-tensors":
            return None
        groups = [*(quantization.get("config_groups") or {}).values()]
        weights = [group.get("weights") or {} for group in groups]
        usual = quantization.get("format")
        formats = {group.get("format") or usual for group in groups}
        is_int4 = all(one.get("type") == "int" and one.get("num_bits") == 4 for one in weights)
        if formats != {"pack-quantized"} or not is_int4:
            return None
        sizes = {_size(one.get("group_size")) for one in weights}
        obstacle = None
        if not {one.get("strategy") for one in weights} <= {"group", "channel"}:
            obstacle = "its scales are neither of groups nor of channels"
        elif quantization.get("transform_config"):
            obstacle = "its states are transformed first (transform_config)"
        elif len(sizes) != 1:
            obstacle = "its layers have groups of several sizes"
        return cls("pack-quantized", sizes.pop(), obstacle)

    @property
    def names(self) -> tuple[str, ...]:
        """Suffixes of the tensors of a layer, the numbers first."""
        if self.layout == "pack-quantized":
            return "weight_packed", "weight_scale", "weight_shape"
        return "qweight", "scales", "qzeros"

    @property
    def optional(self) -> tuple[str, ...]:
        """Suffixes of those that not every layer has."""
        if self.layout == "pack-quantized":
            return "weight_zero_point", "weight_g_idx"
        return ("g_idx",)

    def weight(self, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Int4Weight:
        """A layer's weight. stored: its tensors by suffix. shape: [O, I] of it.

        Raises ConfigError for tensors of other shapes or dtypes than the layout has.
        """
        outputs, inputs = shape
        size = self.group_size or inputs
        groups = -(-inputs // size)
        sizes = (outputs, inputs, groups)
        if self.layout == "pack-quantized":
            numbers, scales, zeros = _read_rows(stored, sizes)
        else:
            numbers, scales, zeros = _read_columns(self.layout, stored, sizes)
        g_idx = stored.get("g_idx", stored.get("weight_g_idx"))
        order = None if g_idx is None else _order(g_idx, inputs, size)
        if order is not None:
            numbers = numbers[:, order]
        # Where the last group is shorter, all are split into what they have in common.
        whole = math.gcd(size, inputs)
        scales, zeros = (
            one.repeat_interleave(size // whole, 0)[: inputs // whole] for one in (scales, zeros)
        )
        return Int4Weight.of(numbers, scales, zeros, order)


def _of_words(method: str, quantization: Mapping[str, Any]) -> Int4Recipe:
    """Of AWQ or GPTQ. Keys and their defaults: transformers' GPTQConfig and AwqConfig."""
    layout = str(
        quantization.get("checkpoint_format")
        or quantization.get("version")
        or quantization.get("format")
        or ("gemm" if method == "awq" else "gptq")
    ).lower()
    bits = int(quantization.get("bits", quantization.get("w_bit", 4)))
    others = [one for one in (quantization.get("dynamic") or {}).values() if one]
    known = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    obstacle = None
    if bits != 4 or any(one.get("bits", 4) != 4 for one in others):
        obstacle = "not all of its weights have 4 bits"
    elif layout not in known:
        obstacle = f"its format is {layout!r}, and not {' or '.join(known)}"
    elif any("group_size" in one for one in others):
        obstacle = "its layers have groups of several sizes"
    elif quantization.get("pack_dtype", "int32") != "int32":
        obstacle = "its numbers are packed in other words than int32"
    size = quantization.get("group_size", quantization.get("q_group_size", 128))
    return Int4Recipe("awq" if method == "awq" else layout, _size(size), obstacle)


def _size(group_size: Any) -> int | None:
    return None if group_size is None or int(group_size) <= 0 else int(group_size)


Numbers = tuple[Tensor, Tensor, Tensor]  # uint8 [O, I], scales [G, O], zeros uint8 [G, O]


def _read_columns(
    layout: str, stored: Mapping[str, Tensor], sizes: tuple[int, int, int]
) -> Numbers:
    """Of AWQ and GPTQ. sizes: O, I, G."""
    outputs, inputs, groups = sizes
    words, packed, is_awq = -(-outputs // IN_WORD), stored["qweight"], layout == "awq"
    shape = (inputs, words) if is_awq else (-(-inputs // IN_WORD), outputs)
    _check("qweight", packed, shape, torch.int32)
    _check("qzeros", stored["qzeros"], (groups, words), torch.int32)
    _check("scales", stored["scales"], (groups, outputs))
    zeros = stored["qzeros"] + ONES if layout == "gptq" else stored["qzeros"]
    if is_awq:
        columns = list(AWQ_COLUMNS)
        numbers, zeros = (
            _unpack(one).unflatten(1, (-1, IN_WORD))[:, :, columns].flatten(1)
            for one in (packed, zeros)
        )
        return numbers[:, :outputs].T.contiguous(), stored["scales"], zeros[:, :outputs]
    numbers = _unpack(packed.T)[:, :inputs]
    return numbers, stored["scales"], _unpack(zeros)[:, :outputs]


def _read_rows(stored: Mapping[str, Tensor], sizes: tuple[int, int, int]) -> Numbers:
    """Of compressed-tensors."""
    outputs, inputs, groups = sizes
    scales, zeros = stored["weight_scale"], stored.get("weight_zero_point")
    _check("weight_shape", stored["weight_shape"], (2,))
    found = tuple(stored["weight_shape"].tolist())
    if found != (outputs, inputs):
        raise ConfigError("weight_shape", found, f"must be {(outputs, inputs)}")
    words = -(-inputs // IN_WORD)
    _check("weight_packed", stored["weight_packed"], (outputs, words), torch.int32)
    _check("weight_scale", scales, (outputs, groups))
    numbers = _unpack(stored["weight_packed"])[:, :inputs]
    if zeros is None:
        middle = torch.full((groups, outputs), MIDDLE, dtype=torch.uint8, device=scales.device)
        return numbers, scales.T, middle
    if zeros.dtype == torch.int8:  # of earlier versions
        _check("weight_zero_point", zeros, (outputs, groups), torch.int8)
        return numbers, scales.T, (zeros + MIDDLE).T.to(torch.uint8)
    _check("weight_zero_point", zeros, (-(-outputs // IN_WORD), groups), torch.int32)
    return numbers, scales.T, _unpack(zeros.T)[:, :outputs]


def _unpack(words: Tensor) -> Tensor:
    """int32 [N, W] to uint8 [N, 8 * W]: the nibbles of each word, from the lowest."""
    # Of one column, "contiguous" tensors may have any stride.
    bytes_ = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack([bytes_ & 0xF, bytes_ >> 4], 2).flatten(1)


def _order(g_idx: Tensor, inputs: int, size: int) -> Tensor | None:
    """int64 [I]: the inputs, by their groups; None where they are in turn."""
    _check("g_idx", g_idx, (inputs,))
    usual = torch.arange(inputs, device=g_idx.device) // size
    if torch.equal(g_idx, usual.to(g_idx.dtype)) or bool((g_idx < 0).all()):  # -1: not used
        return None
    sorted_, order = g_idx.long().sort(stable=True)
    if not torch.equal(sorted_, usual):
        fix = f"must have {size} inputs of each group"
        raise ConfigError("g_idx", f"groups {sorted_.unique().tolist()!s:.60}", fix)
    return order


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """dtype: None for any floating one of scales, and any of integers elsewhere."""
    is_scale = name.endswith(("scales", "scale"))
    is_right = tensor.is_floating_point() == is_scale and not tensor.is_complex()
    if tuple(tensor.shape) != shape or not is_right or dtype not in (None, tensor.dtype):
        shown = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        usual = "floating" if is_scale else "of integers"
        kind = usual if dtype is None else str(dtype)
        raise ConfigError(name, shown, f"must be {kind} of shape {shape}")
