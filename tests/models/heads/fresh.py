"""Heads made from nothing for tiny targets, with weights that make every part of them matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.eagle import Eagle3Head, Eagle3Layout, EagleHead, EagleLayout
from guided_spec.models.heads.export import save_head
from guided_spec.models.heads.mtp import MtpHead, QwenMtpHead

KINDS = ("eagle", "eagle3", "mtp", "qwen_mtp")


def vocabulary_of(size: int, target_size: int = 64) -> DraftVocabulary:
    """``size`` random target tokens, ascending."""
    order = torch.randperm(target_size, generator=torch.Generator().manual_seed(3))
    return DraftVocabulary(order[:size].sort().values, target_size)


def fresh_head(kind: str, target: PreTrainedModel, **options: Any) -> Any:
    """A head of one of KINDS, drawn with seed 0; of EAGLE-3, over 24 tokens unless it says else.

    options: arguments of the kind's own ``fresh``, or of its layout's.
    """
    torch.manual_seed(0)
    if kind == "eagle":
        shape = options.get("shape", HeadShape())
        return EagleHead.fresh(target, layout=EagleLayout.fresh(target, shape))
    if kind != "eagle3":
        heads: dict[str, Any] = {"mtp": MtpHead, "qwen_mtp": QwenMtpHead}
        return heads[kind].fresh(target, **options)
    size = options.setdefault("draft_vocab_size", 24)
    vocabulary = None if size is None else vocabulary_of(size, target.config.vocab_size)
    layout = Eagle3Layout.fresh(target, **options)
    return Eagle3Head.fresh(target, vocabulary=vocabulary, layout=layout)


def spread(head: nn.Module) -> None:
    """Weights larger than fresh ones, also those of norms and biases; ready for inference."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in head.state_dict().values():
            tensor += (0.25 if tensor.dim() > 1 else 0.3) * torch.randn(
                tensor.shape, generator=random
            )
    head.requires_grad_(requires_grad=False)
    head.eval()


def write_mtp(folder: Path, target: PreTrainedModel, *, num_modules: int = 1) -> None:
    """A random head of the target's own layers, in the layout of Qwen."""
    head = fresh_head("qwen_mtp", target, num_modules=num_modules, initialize="random")
    spread(head)
    save_head(head, folder, layout="qwen", target=target, dtype=torch.float32)
