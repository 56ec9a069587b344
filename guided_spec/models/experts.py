"""Mixture-of-experts weights: one tensor an expert, as published, and one for all of them."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor

from guided_spec.errors import ModelError

__all__ = ["fuse_experts", "split_experts"]

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
FUSED = re.compile(r"(.+\.experts)\.gate_up_proj")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

# projection: expert: tensor
Experts = dict[str, dict[int, Tensor]]


def fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the experts of each layer stacked, as transformers' modules hold them.

    tensors: by name; not changed. ``X.experts.{e}.gate_proj.weight`` [I, H], ``up_proj`` [I, H] and
    ``down_proj`` [H, I] of the experts 0 to E - 1 become ``X.experts.gate_up_proj`` [E, 2 * I, H],
    the gate first, and ``X.experts.down_proj`` [E, H, I]. Dtype and device stay, and so does
    everything else, experts that are fused already among it.

    Raises ModelError when an expert lacks one of its three weights.
    """
    fused: dict[str, Tensor] = {}
    groups: defaultdict[str, Experts] = defaultdict(lambda: {name: {} for name in PROJECTIONS})
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            fused[name] = tensor
        else:
            prefix, expert, projection = match.groups()
            groups[prefix][projection][int(expert)] = tensor
    for prefix, experts in groups.items():
        order = _expert_numbers(prefix, experts)
        gate, up, down = ([experts[name][e] for e in order] for name in PROJECTIONS)
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        fused[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        fused[f"{prefix}.down_proj"] = torch.stack(down)
    return fused


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``fuse_experts``: views of the stacked weights, one expert each.

    Stacks that are laid out another way (gpt-oss, whose experts have biases) stay as they are.
    """
    split = dict(tensors)
    for name, pairs in tensors.items():
        match = FUSED.fullmatch(name)
        down = tensors.get(f"{match[1]}.down_proj") if match else None
        if match is None or down is None or f"{name}_bias" in tensors:
            continue
        del split[name], split[f"{match[1]}.down_proj"]
        for expert, (pair, last) in enumerate(zip(pairs, down, strict=True)):
            gate, up = pair.chunk(2)
            for projection, weight in zip(PROJECTIONS, (gate, up, last), strict=True):
                split[f"{match[1]}.{expert}.{projection}.weight"] = weight
    return split


def _expert_numbers(prefix: str, experts: Experts) -> range:
    """0 to E - 1, when every projection is there for each of them."""
    numbers = range(1 + max(number for weights in experts.values() for number in weights))
    for projection, weights in experts.items():
        if set(weights) != set(numbers):
            raise ModelError(
                f"{prefix}: expected the {projection} of experts 0 to {numbers[-1]}, "
                f"found those of {sorted(weights)}"
            )
    return numbers
