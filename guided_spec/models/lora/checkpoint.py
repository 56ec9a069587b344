"""LoRA adapters as peft saves them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import ADAPTER_CONFIG, check_folder, check_hub, find_file

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(r"(.+)\.lora_([AB])\.weight")
_MERGE = "merge it into its base, by passing its folder as the model of an LLM of its own"
# Settings of peft that are more than two matrices next to a layer, and the values that are none.
_MORE: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "ensure_weight_tying"), (False, None)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "layer_replication"), (None, [])),
    **dict.fromkeys(("trainable_token_indices", "alora_invocation_tokens"), (None, [], {})),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), (None,)),
    # Others begin by changing the base. "eva" and these only say how the two matrices began.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_WHAT = {
    "modules_to_save": ", whole layers,",
    "target_parameters": ", as of routed experts,",
    "use_dora": ", the magnitudes of DoRA,",
}


class LowRankPair(NamedTuple):
    """What an adapter adds to one layer: up @ down. down: [r, I]. up: [O, r], with the scaling."""

    down: Tensor
    up: Tensor


def read_adapter(argument: str, path: str | Path) -> dict[str, LowRankPair]:
    """The layers of an adapter by their names in its base, on the CPU in their stored dtype.

    argument: how the caller names it. path: a folder or a hub id.

    Raises ModelError, naming both, for what is no LoRA adapter, is more than that, or is broken.
    """
    shown = f"{argument}={str(path)!r}"
    check_folder(argument, path, "an adapter's folder", ADAPTER_CONFIG)
    check_hub(shown, path, None)
    config, weights = (find_file(path, name, None) for name in (ADAPTER_CONFIG, WEIGHTS))
    for name, file in ((ADAPTER_CONFIG, config), (WEIGHTS, weights)):
        if file is None:
            raise ModelError(f"{shown}: it has no {name}; pass an adapter that peft has saved")
    assert config is not None
    assert weights is not None
    settings = _read_settings(shown, config)
    try:
        tensors = load_file(weights)
    except Exception as error:  # safetensors raises its own class, which derives from Exception
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{shown}: {WEIGHTS} cannot be read ({reason}); save it again") from error
    return _read_pairs(shown, settings, tensors)


def _read_settings(shown: str, file: str) -> dict[str, Any]:
    try:
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"{ADAPTER_CONFIG} is not JSON ({error})"
        raise ModelError(f"{shown}: {reason}; save it again") from error
    found: dict[str, Any] = settings if isinstance(settings, dict) else {}
    kind = found.get("peft_type")
    if kind != "LORA":
        fix = "only LoRA adapters run next to their base"
        raise ModelError(f"{shown}: {ADAPTER_CONFIG} has peft_type={kind!r}; {fix}")
    for name, plain in _MORE.items():
        value = found.get(name)
        if value not in plain:
            reason = f"{name}={value!r:.80}{_WHAT.get(name, '')} cannot run next to the base"
            raise ModelError(f"{shown}: {reason}; train without it, or {_MERGE}")
    return found


def _read_pairs(
    shown: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, LowRankPair]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if found is None or tensor.dim() != 2 or not tensor.is_floating_point():
            reason = f"{key}, {tensor.dtype} {[*tensor.shape]}, is no matrix of a linear layer"
            raise ModelError(f"{shown}: {reason}; {_MERGE}")
        parts.setdefault(found[1], {})[found[2]] = tensor
    if not parts:
        raise ModelError(f"{shown}: {WEIGHTS} has no tensors; save the adapter again")
    pairs = {}
    for layer, both in parts.items():
        if both.keys() != {"A", "B"} or not len(both["A"]) == both["B"].shape[1] > 0:
            shapes = {name: [*tensor.shape] for name, tensor in both.items()}
            reason = f"{layer} needs lora_A [r, inputs] and lora_B [outputs, r], found {shapes}"
            raise ModelError(f"{shown}: {reason}; save the adapter again")
        scale = _scaling(shown, settings, layer, len(both["A"]))
        pair = LowRankPair(both["A"], both["B"].float() * scale)
        if not all(torch.isfinite(one.float()).all() for one in pair):
            reason = f"{layer}, scaled by {scale:g}, has values that are no finite numbers"
            raise ModelError(f"{shown}: {reason}; save the adapter again")
        pairs[layer] = pair
    return pairs


def _scaling(shown: str, settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """What peft multiplies a layer's term by. rank: as its matrices have it."""
    alpha: Any = settings.get("lora_alpha", 8)
    patterns = settings.get("alpha_pattern") or {}
    try:
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                alpha = value
                break
        root = 0.5 if settings.get("use_rslora") else 1.0
        return float(alpha / rank**root)
    except (TypeError, ValueError, ArithmeticError, AttributeError, re.error) as error:
        reason = f"lora_alpha={alpha!r:.40}, alpha_pattern={patterns!r:.80}: {error}"
        raise ModelError(f"{shown}: {ADAPTER_CONFIG} has {reason}; save it again") from error
