"""The learned draft heads by name: which checkpoint each is read from."""

from __future__ import annotations

from pathlib import Path

from guided_spec.errors import ConfigError
from guided_spec.models.head_loading import load_head
from guided_spec.proposers.context import ProposerContext
from guided_spec.proposers.learned_head import LearnedHead

__all__ = ["deepseek_mtp", "eagle", "eagle3", "glm4_moe_mtp", "mtp", "qwen3_5_mtp"]


def eagle(context: ProposerContext) -> LearnedHead:
    """EAGLE and EAGLE-2 weights (arXiv:2401.15077, arXiv:2406.16858), drafting a chain."""
    return _build("eagle", context)


def eagle3(context: ProposerContext) -> LearnedHead:
    """EAGLE-3 (arXiv:2503.01840) from SafeAILab, SpecForge or speculators."""
    return _build("eagle3", context)


def deepseek_mtp(context: ProposerContext) -> LearnedHead:
    """The MTP layers in a DeepSeek-V3, R1 or V3.2 checkpoint (arXiv:2412.19437)."""
    return _build("deepseek_mtp", context)


def glm4_moe_mtp(context: ProposerContext) -> LearnedHead:
    """The MTP layers in a GLM-4.5 or GLM-4.5-Air checkpoint."""
    return _build("glm4_moe_mtp", context)


def qwen3_5_mtp(context: ProposerContext) -> LearnedHead:
    """The MTP layers in a Qwen3-Next or Qwen3.5 checkpoint."""
    return _build("qwen3_5_mtp", context)


def mtp(context: ProposerContext) -> LearnedHead:
    """MTP layers of the target's own kind in a folder of their own, for any target."""
    return _build("mtp", context)


def _build(method: str, context: ProposerContext) -> LearnedHead:
    if context.target is None:
        fix = f"{method} needs a transformers model as target; use another proposer"
        raise ConfigError("proposer", method, fix)
    if context.draft is not None and not isinstance(context.draft, str | Path):
        fix = f"{method} takes the folder or hub id of its checkpoint"
        raise ConfigError("draft", type(context.draft).__name__, fix)
    return LearnedHead(context, load_head(method, context.draft, context.target))
