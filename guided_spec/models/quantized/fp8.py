"""Checkpoints whose linear layers and experts are in fp8, loaded as they are stored.

transformers multiplies such weights out where there is no GPU, and needs kernels from a hub where
there is one. Here the layers keep their bytes and their scales, and are multiplied by
``guided_spec.ops.linear.fp8_linear``. Which layers are quantized, the tensors of the checkpoint
say; from its configuration is the size of blocks alone. Scales of activations are not read:
activations keep their precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_mm

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.quantized.replacing import (
    KINDS,
    Kind,
    OthersError,
    Replaced,
    load_replaced,
    stored_name,
)
from guided_spec.models.stock.experts import has_silu_gate
from guided_spec.ops.linear.experts import Gating, Projection, Routes, close_experts, open_experts
from guided_spec.ops.linear.fp8_linear import (
    FP8,
    Fp8Weight,
    fp8_linear,
    nobody_arrived,
    scales_shape,
    whole_matrix,
)
from guided_spec.ops.pointwise import silu_mul_packed

DEFAULT_BLOCK = (128, 128)  # where a configuration is silent, and scales are of blocks
SCALES = ("weight_scale_inv", "weight_scale")  # both are factors of the weight
EXPERTS = ".experts"
# Multiplied out, a matrix is read once and then written and read at twice the size: five times the
# bytes that one pair reads.
PAIRS_OF_EXPERT = 4
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Scales of what is not rounded here.
IGNORED = r"\.(weight_scale_inv|weight_scale|input_scale|activation_scale|k_scale|v_scale)$"


Block = tuple[int, int]


class Fp8Recipe(NamedTuple):
    """How a checkpoint's weights are in fp8. block: of a scale; None for larger ones."""

    block: Block | None

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


def _pair(block: Any) -> Block | None:
    return None if block is None else (int(block[0]), int(block[1]))


class Fp8Linear(nn.Module):
    """Replaces a linear layer: weights in fp8, for inference alone.

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

    def scale(self, scales: Tensor, block: Block | None) -> None:
        """Take scales as a checkpoint has them: one, one for each output, or for each block.

        Raises ConfigError for as many as are none of these.
        """
        found = fp8_weight(self.weight.data, scales, block)
        self.block = found.block
        self.register_buffer("scales", found.scales, persistent=False)
        self.register_buffer("arrived", found.arrived, persistent=False)

    @property
    def numbers(self) -> Fp8Weight:
        """The weight and its scales."""
        return Fp8Weight(self.weight.data, self.scales, self.block, self.arrived)

    def forward(self, states: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return fp8_linear(states, self.numbers, self.bias)


class Fp8Experts(nn.Module):
    """Replaces a stock module of experts: weights in fp8, for inference alone.

    experts: of which it takes shapes; with silu(gate) * up, and without biases. ``fits`` says so.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.config, self.act_fn = experts.config, experts.act_fn
        self.has_bias = self.is_transposed = False
        for name in ("gate_up_proj", "down_proj"):
            like = getattr(experts, name)
            values = torch.empty(like.shape, dtype=FP8, device=like.device)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self._blocks = {"gate_up_proj": (1, 1), "down_proj": (1, 1)}

    @staticmethod
    def fits(experts: Any) -> bool:
        """Whether a stock module is of the kind described above."""
        is_known = isinstance(getattr(experts, "gate_up_proj", None), nn.Parameter)
        if not is_known or not has_silu_gate(experts):
            return False
        # The second one came with transformers 5.20.
        return not (experts.has_bias or getattr(experts, "has_post_expert_norm", False))

    def scale(self, name: str, parts: Sequence[Sequence[Tensor]], block: Block | None) -> None:
        """Take the scales of a projection.

        parts: of each expert, those of gate and up, or of down, as a checkpoint has them.

        Raises ConfigError as ``Fp8Linear.scale`` does.
        """
        whole = getattr(self, name).data
        found = []
        for expert, scales in enumerate(parts):
            halves = whole[expert].chunk(len(scales))
            weights = []
            for part, values, own in zip(PARTS[name], halves, scales, strict=True):
                try:
                    weights.append(fp8_weight(values, own, block))
                except ConfigError as error:
                    place = f"{expert}.{part}.{error.argument}"
                    raise ConfigError(place, error.value, error.fix) from None
            found.append(Fp8Weight.joined(weights, whole[expert]))
        self._blocks[name] = found[0].block
        stacked = torch.stack([one.scales for one in found])
        self.register_buffer(f"{name}_scales", stacked, persistent=False)

    @property
    def most_pairs(self) -> int:
        """Pairs of a token and an expert up to which each pair is a product of its own."""
        return PAIRS_OF_EXPERT * len(self.down_proj)

    def projection(self, name: str) -> Projection:
        """gate_up_proj or down_proj."""
        scales: Tensor = getattr(self, f"{name}_scales")
        return Projection(getattr(self, name).data, None, scales, self._blocks[name])

    def forward(self, states: Tensor, expert_ids: Tensor, shares: Tensor) -> Tensor:
        """[N, H]: the sum of what its experts make of each row.

        states: [N, H]. expert_ids: int64 [N, K]; shares of them: [N, K].
        """
        routes = Routes(expert_ids, shares.float())
        opening, closing = self.projection("gate_up_proj"), self.projection("down_proj")
        if not states.is_cuda:
            return _one_by_one(states, routes, opening, closing)
        is_few = expert_ids.numel() <= self.most_pairs
        if is_few or states.dtype != torch.bfloat16:
            opened = open_experts(states, expert_ids, opening, Gating())
            return close_experts(opened, routes, closing)
        return _grouped(states, routes, opening, closing)


def _one_by_one(states: Tensor, routes: Routes, opening: Projection, closing: Projection) -> Tensor:
    """On the host: no more than one expert is multiplied out at a time."""
    total = states.new_zeros(states.shape, dtype=torch.float32)
    for expert in routes.experts.unique():
        tokens, columns = (routes.experts == expert).nonzero(as_tuple=True)
        both = functional.linear(states[tokens], opening.of(expert).to(states.dtype))
        gate, up = both.chunk(2, -1)
        found = functional.linear(functional.silu(gate) * up, closing.of(expert).to(states.dtype))
        total.index_add_(0, tokens, found.float() * routes.shares[tokens, columns, None])
    return total.to(states.dtype)


def _grouped(states: Tensor, routes: Routes, opening: Projection, closing: Projection) -> Tensor:
    """[N, H]: torch's grouped product of all experts, multiplied out; no sync."""
    experts, order = routes.experts.flatten().sort()
    numbers = torch.arange(len(opening.weight), device=states.device)
    ends = torch.searchsorted(experts, numbers, right=True).int()
    count = routes.experts.shape[1]
    both = _grouped_mm(states[order // count], _whole(opening, states.dtype).mT, ends)
    found = _grouped_mm(silu_mul_packed(both), _whole(closing, states.dtype).mT, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    weighted = found[back].unflatten(0, routes.shares.shape).float() * routes.shares.unsqueeze(-1)
    total: Tensor = weighted.sum(1).to(states.dtype)
    return total


def _whole(projection: Projection, dtype: torch.dtype) -> Tensor:
    """[E, O, I] in ``dtype``."""
    weight, scales, block = projection.weight, projection.scales, projection.block
    assert scales is not None
    if weight.shape[1] % block[0] != 0:  # an expert ends within a block
        scales = scales.repeat_interleave(block[0], 1)[:, : weight.shape[1]]
        block = (1, block[1])
    # Made as it is: ``of`` would read all values again, and wait for the device.
    values, factors = weight.flatten(0, 1), scales.flatten(0, 1)
    flat = Fp8Weight(values, factors, block, nobody_arrived(len(values), values.device))
    return whole_matrix(flat, dtype).view(weight.shape)


def fp8_weight(values: Tensor, scales: Tensor, block: Block | None) -> Fp8Weight:
    """A weight as checkpoints have it; its scales are then float32, on its device.

    values: float8_e4m3fn [O, I]. scales: one, one for each output, or for each block. block: of a
    ``Fp8Recipe``.

    Raises ConfigError for other values and scales.
    """
    if block is None:
        block = (len(values) if scales.numel() == 1 else 1, values.shape[1])
        if tuple(scales.shape) == scales_shape(values.shape, DEFAULT_BLOCK):
            block = DEFAULT_BLOCK
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    return Fp8Weight.of(values, scales.to(values.device).float(), block)


def load_fp8(
    path: str, recipe: Fp8Recipe, config: Any, arguments: Mapping[str, Any]
) -> PreTrainedModel | None:
    """The model on the CPU with linear layers and experts in fp8; None where there is more in it.

    path: a folder or a hub id. config: transformers' of it, changed meanwhile. arguments: of
    ``from_pretrained``.

    Raises ModelError for a weight without a scale, or another number of scales than it has blocks.
    """
    checkpoint = Checkpoint.open(path, revision=arguments.get("revision"), argument="model")
    scales = scale_names(checkpoint.names, checkpoint.fp8_names(), checkpoint.source)
    try:
        model = load_replaced(path, "fp8", scales, config, arguments)
    except OthersError:
        return None
    read = checkpoint.read(scales.values())
    found = {name: read[of] for name, of in scales.items()}
    for name, module in model.named_modules():
        try:
            _scale(module, stored_name(name, found), found, recipe.block)
        except ConfigError as error:
            problem = f"{checkpoint.source}: {name}: {error}; the checkpoint is broken"
            raise ModelError(problem) from error
    return model


def _scale(module: nn.Module, name: str, scales: Mapping[str, Tensor], block: Block | None) -> None:
    """name: of a module in the checkpoint. scales: of all modules that the checkpoint has."""
    if isinstance(module, Fp8Linear):
        module.scale(scales[name], block)
    elif isinstance(module, Fp8Experts):
        for projection, parts in PARTS.items():
            names = _names_of_experts(name, module, parts)
            module.scale(projection, [[scales[one] for one in group] for group in names], block)


def _names_of_experts(name: str, experts: Any, parts: Sequence[str]) -> list[list[str]]:
    """The checkpoint's names of the parts of each expert."""
    return [[f"{name}.{at}.{part}" for part in parts] for at in range(len(experts.down_proj))]


def scale_names(names: Collection[str], in_fp8: Collection[str], source: str) -> dict[str, str]:
    """The name of the scales of each module with weights in fp8.

    names: of all tensors of a checkpoint. in_fp8: of those in fp8. source: to name in the error.

    Raises ModelError for weights without scales, and the reverse.
    """
    scales = {
        name.removesuffix(f".{suffix}"): name
        for suffix in SCALES
        for name in names
        if name.endswith(f".{suffix}")
    }
    unpaired = sorted({f"{module}.weight" for module in scales} ^ set(in_fp8))
    if unpaired:
        pair = f"weights in float8_e4m3fn with {' or '.join(SCALES)}"
        at = unpaired[0].removesuffix(".weight")
        problem = f"expected {pair}, found one without the other at {at!r}"
        raise ModelError(f"{source}: {problem}; the checkpoint is broken")
    return scales


def _replace(module: nn.Module, name: str, names: Collection[str]) -> Replaced | None:
    """For ``replacing.KINDS``."""
    if name in names and type(module) is nn.Linear:
        return Replaced(Fp8Linear(module), frozenset([name]))
    if name.endswith(EXPERTS) and Fp8Experts.fits(module):
        groups = _names_of_experts(name, module, [*chain(*PARTS.values())])
        parts = frozenset(chain(*groups))
        return Replaced(Fp8Experts(module), parts) if parts <= set(names) else None
    return None


KINDS["fp8"] = Kind(_replace, IGNORED)
