"""Draft heads written as checkpoints, which ``load_head`` reads, in the layouts that engines load.

=================  =================================================================
kind of head       layouts, and whose loader was run on what is written here
=================  =================================================================
``EagleHead``      "safeailab": none
``Eagle3Head``     "speculators": speculators 0.9, vLLM 0.25.1; "safeailab": none
``MtpHead``        "deepseek": transformers, once it is added to its target
``QwenMtpHead``    "qwen": none
=================  =================================================================

vLLM ran the bundled head, which has no embedding. vLLM and LMDeploy also ran the widened head of
``bench``, which is in SafeAILab's layout of EAGLE-3 but written by other code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.draft_head import DraftHead
from guided_spec.models.eagle import EagleHead
from guided_spec.models.eagle3 import Eagle3Head
from guided_spec.models.head_export_eagle import (
    eagle3_safeailab,
    eagle3_speculators,
    eagle_safeailab,
)
from guided_spec.models.head_export_mtp import mtp_deepseek, mtp_qwen
from guided_spec.models.head_files import HeadFiles, SaveKeywords, SaveOptions
from guided_spec.models.head_loading import forget_head
from guided_spec.models.head_weights import check_tensors
from guided_spec.models.mtp import MtpHead
from guided_spec.models.qwen_mtp import QwenMtpHead

__all__ = ["head_layouts", "save_head"]

Describe = Callable[[Any, Mapping[str, Tensor], PreTrainedModel, SaveOptions], HeadFiles]

# The first is the one to choose where nothing speaks for another.
LAYOUTS: dict[type[nn.Module], dict[str, Describe]] = {
    EagleHead: {"safeailab": eagle_safeailab},
    Eagle3Head: {"speculators": eagle3_speculators, "safeailab": eagle3_safeailab},
    MtpHead: {"deepseek": mtp_deepseek},
    QwenMtpHead: {"qwen": mtp_qwen},
}


def head_layouts(head: DraftHead) -> tuple[str, ...]:
    """The layouts that heads of this kind can be written in, the usual one first.

    Raises ModelError for a head of another package.
    """
    return tuple(_find_layouts(head))


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    layout: str,
    target: PreTrainedModel,
    tensors: Mapping[str, Tensor] | None = None,
    **options: Unpack[SaveKeywords],
) -> Path:
    """Write config.json and model.safetensors into ``folder``, which is made; returns it.

    head: of this package; not changed. layout: one of ``head_layouts``. target: what the head was
        made for; its config and, where ``options`` ask for it, its embedding are written.
    tensors: the state dict to write instead of the head's own, under the same names, in any dtype
        and on any device: gathered from a run that spreads the head over devices.
    options: fields of ``SaveOptions``: ``speculative_tokens``, ``dtype``, ``embedding``.

    Router biases stay float32. Raises ConfigError for a layout that this kind of head does not
    have and for a target without a name where the layout wants one; ModelError for tensors that
    do not fit the head, listing them, and for what a layout cannot say of this head.
    """
    layouts, module = _find_layouts(head), _as_module(head)
    if layout not in layouts:
        fix = f"must be {' or '.join(map(repr, layouts))} for {type(head).__name__}"
        raise ConfigError("layout", layout, fix)
    chosen, expected = SaveOptions(**options), module.state_dict()
    stored = expected if tensors is None else dict(tensors)
    check_tensors(expected, stored, "tensors=")
    files = layouts[layout](head, stored, target, chosen)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: _store(name, tensor, files, chosen) for name, tensor in files.tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.dumps(files.config, indent=2, sort_keys=True)
    (path / "config.json").write_text(f"{config}\n", encoding="utf-8")
    forget_head(path, target)
    return path


def _find_layouts(head: DraftHead) -> dict[str, Describe]:
    for kind, layouts in LAYOUTS.items():
        if isinstance(head, kind):
            return layouts
    known = ", ".join(kind.__name__ for kind in LAYOUTS)
    raise ModelError(f"head={type(head).__name__}: expected one of {known}; write it yourself")


def _as_module(head: DraftHead) -> nn.Module:
    module: Any = head
    found: nn.Module = module
    return found


def _store(name: str, tensor: Tensor, files: HeadFiles, options: SaveOptions) -> Tensor:
    """A copy on the CPU in memory of its own, as safetensors wants it."""
    is_exact = any(fragment in name for fragment in files.exact)
    dtype = tensor.dtype
    if tensor.is_floating_point():
        dtype = torch.float32 if is_exact else options.dtype
    stored = torch.empty(tensor.shape, dtype=dtype)
    return stored.copy_(tensor.detach())
