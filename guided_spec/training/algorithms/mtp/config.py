"""Options of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from guided_spec.training.algorithms.options import LossOptions, option

__all__ = ["MtpConfig"]


@dataclass(frozen=True)
class MtpConfig(LossOptions):
    """What the modules look like, and how they are trained."""

    init: str | None = option(
        "Modules to go on from: a folder or hub id; 'target' for those in its checkpoint.",
        default=None,
    )
    form: Literal["auto", "deepseek", "qwen"] = option(
        "Whose equations: DeepSeek's and GLM's, or Qwen's; auto follows the target.", default="auto"
    )
    num_modules: int = option("Modules at successive depths; the last one is repeated.", default=1)
    initialize: Literal["target", "random"] = option(
        "Fresh decoder layers: a copy of the target's last one, or random.", default="target"
    )
