"""Filling a draft head with the tensors of a checkpoint, and refusing those that do not fit.

Mixture-of-experts weights: one tensor an expert, as published, and one for all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.quantized.fp8 import IGNORED, Fp8Recipe, fp8_weight, scale_names
from guided_spec.ops.linear.fp8_linear import FP8, multiply_out

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

    Stacks with another layout (gpt-oss, whose experts have biases) stay as they are.
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


Head = TypeVar("Head", bound=nn.Module)

MOST_LINES = 40
QUANTIZATIONS = ("quantization_config", "compression_config")


def match_biases(module: nn.Module, names: Collection[str]) -> None:
    """Give every ``Linear`` in ``module`` a bias exactly where ``names`` has a tensor for it.

    Configurations of draft heads say little that is reliable about biases; their files do.
    """
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            bias = nn.Parameter(linear.weight.new_empty(linear.out_features))
            linear.register_parameter("bias", bias if f"{name}.bias" in names else None)


def read_tensors(
    checkpoint: Checkpoint, names: Mapping[str, str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a head by its own names, on the CPU: plain weights, experts fused.

    names: what the head calls each tensor of the checkpoint that is to be read, scales of fp8
        weights among them. dtype: of what was quantized; the rest keeps its own.

    Raises ModelError as ``recipe_of``, ``Checkpoint.read``, ``dequantize`` and ``fuse_experts`` do.
    """
    recipe = recipe_of(checkpoint.config, checkpoint.source)
    tensors = checkpoint.read([*names])
    if recipe is not None:
        tensors = dequantize(tensors, recipe, checkpoint.source, dtype)
    return fuse_experts({names[name]: tensor for name, tensor in tensors.items()})


def fill_head(
    build: Callable[[], Head],
    tensors: Mapping[str, Tensor],
    target: PreTrainedModel,
    source: str,
    *,
    exact: Collection[str] = (),
) -> Head:
    """A head for inference, filled with tensors, on the target's device and in its dtype.

    build: makes the head on torch's default device, which is the meta device meanwhile; what it
        puts elsewhere stays there. tensors, source, exact: as for ``load_tensors``.

    Raises ModelError as ``load_tensors`` does, and for buffers that no checkpoint would fill.
    """
    with torch.device("meta"):
        head = build()
    stored = head.state_dict()
    unfilled = [name for name, t in head.named_buffers() if t.is_meta and name not in stored]
    if unfilled:
        raise ModelError(
            f"{source}: expected layers whose every tensor is in a checkpoint, found "
            f"{unfilled[0]}, which is not; use EAGLE-3 for this target"
        )
    load_tensors(
        head, tensors, source, like=torch.empty(0).to(target.device, target.dtype), exact=exact
    )
    return head.eval()


def load_tensors(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    like: Tensor,
    exact: Collection[str] = (),
) -> None:
    """Replace the parameters and buffers of the same names by copies of the tensors.

    tensors: in any dtype, on any device. source: what to name in the error. like: of the device and
    the dtype that they are to have. exact: parts of names of tensors that are float32 all the same,
    such as router biases. What is not of floating point keeps the module's dtype, and what no
    checkpoint holds stays as it is: rotary frequencies have to be float32 whatever the weights are.

    Parameters take no gradient. Raises ModelError as ``check_tensors`` does; the module is
    unchanged then.
    """
    expected = module.state_dict()
    check_tensors(expected, tensors, source)
    placed = {}
    for name, old in expected.items():
        is_exact = any(fragment in name for fragment in exact)
        kind = torch.float32 if is_exact else like.dtype
        kind = kind if old.is_floating_point() else old.dtype
        placed[name] = tensors[name].to(like.device, kind, copy=True)
    module.load_state_dict(placed, assign=True)
    module.requires_grad_(requires_grad=False)


def check_tensors(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise one ModelError that lists every missing, unexpected and wrongly shaped tensor.

    what: where they are from, for the error.
    """
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys())
    shared = sorted(expected.keys() & tensors.keys())
    misshaped = [name for name in shared if expected[name].shape != tensors[name].shape]
    problems = [
        *(f"{name}: expected {list(expected[name].shape)}, found none" for name in missing),
        *(f"{name}: expected none, found {list(tensors[name].shape)}" for name in unexpected),
        *(
            f"{name}: expected {list(expected[name].shape)}, found {list(tensors[name].shape)}"
            for name in misshaped
        ),
    ]
    if problems:
        listed = "\n  ".join(problems[:MOST_LINES])
        more = f"\n  and {len(problems) - MOST_LINES} more" if len(problems) > MOST_LINES else ""
        raise ModelError(
            f"{what}: its tensors do not fit the head; pass a head of this kind "
            f"that was made for this target:\n  {listed}{more}"
        )


def recipe_of(config: Mapping[str, Any], source: str) -> Fp8Recipe | None:
    """How weights are in fp8; None for plain ones.

    config: the checkpoint's config.json. Raises ModelError for weights of other kinds.
    """
    for key in QUANTIZATIONS:
        found = config.get(key)
        if not found:
            continue
        recipe = Fp8Recipe.of(found) if isinstance(found, Mapping) else None
        if recipe is None:
            method = found.get("quant_method") if isinstance(found, Mapping) else found
            raise ModelError(
                f"{source}: {key}: expected plain weights or fp8, found "
                f"quant_method={method!r}; pass a head that is not quantized this way"
            )
        return recipe
    return None


def dequantize(
    tensors: Mapping[str, Tensor], recipe: Fp8Recipe, source: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors, weights in fp8 multiplied out into ``dtype`` and all scales left out.

    Nothing else is changed. source: what to name in the error. Raises ModelError for a weight
    without scales of a fitting shape, and scales without a weight.
    """
    in_fp8 = {name for name, tensor in tensors.items() if tensor.dtype == FP8}
    plain = {name: tensor for name, tensor in tensors.items() if not re.search(IGNORED, name)}
    for module, scales in scale_names(tensors, in_fp8, source).items():
        name = f"{module}.weight"
        try:
            weight = fp8_weight(plain[name], tensors[scales], recipe.block)
        except ConfigError as error:
            problem = f"{module}: {error}; the checkpoint is broken"
            raise ModelError(f"{source}: {problem}") from error
        plain[name] = multiply_out(weight, dtype)
    return plain
