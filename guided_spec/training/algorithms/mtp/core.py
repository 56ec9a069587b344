"""Training of multi-token prediction modules, DeepSeek-V3's report, section 2.2.

A single module is repeated when it drafts, and trained so: FastMTP, arXiv:2509.18362. Its attention
follows what drafting leaves in the cache, as EAGLE-3's training-time test does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.head_export import head_layouts, save_head
from guided_spec.models.mtp import MtpHead
from guided_spec.models.qwen_mtp import QwenMtpHead
from guided_spec.training.algorithm import TrainingOutput
from guided_spec.training.algorithms.mtp.config import MtpConfig
from guided_spec.training.batch import TargetStates, TrainingBatch
from guided_spec.training.head_training import (
    FrozenTarget,
    forward_head,
    head_feature_layers,
    make_trainable,
    own_tensors,
    source_of,
    trainer_kwargs,
)
from guided_spec.training.objective import Objective
from guided_spec.training.registry import register

__all__ = ["MtpTraining"]


@register("mtp")
class MtpTraining(nn.Module):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = MtpConfig
    reduced_vocabulary = False
    get_trainer_kwargs = staticmethod(trainer_kwargs)

    def __init__(
        self, head: MtpHead | QwenMtpHead, target: FrozenTarget, config: MtpConfig
    ) -> None:
        super().__init__()
        self.head = head
        self._target = target
        self._config = config

    @classmethod
    def from_training_args(
        cls,
        verifier_config: Any,
        *,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary | None,
        **options: Any,
    ) -> MtpTraining:
        """Fresh modules, or those of ``init``; ``vocabulary`` has to be None."""
        del verifier_config, vocabulary
        config = MtpConfig(**options)
        return cls(_make_head(config, target), FrozenTarget.of(target), config)

    @property
    def layouts(self) -> tuple[str, ...]:
        """See ``head_layouts``."""
        return head_layouts(self.head)

    @property
    def layers(self) -> nn.ModuleList:
        """The head's decoder layers."""
        return self.head.layers

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the target that the head reads."""
        return head_feature_layers(self.head)

    def forward(
        self, batch: TrainingBatch, states: TargetStates, *, objective: Objective
    ) -> TrainingOutput:
        """See ``forward_head``."""
        return forward_head(self.head, self._target.head, batch, states, objective)

    def export(
        self, folder: Path, *, layout: str, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """See ``save_head``."""
        save_head(
            self.head,
            folder,
            layout=layout,
            target=self._target.model,
            tensors=own_tensors(tensors, "head."),
            speculative_tokens=self._config.ttt_steps,
        )


# Targets by model_type whose own modules follow DeepSeek's equations.
DEEPSEEK = ("deepseek_v3", "deepseek_v32", "glm4_moe")


def _make_head(config: MtpConfig, target: PreTrainedModel) -> MtpHead | QwenMtpHead:
    is_deepseek = config.form == "deepseek"
    if config.form == "auto":
        is_deepseek = target.config.model_type in DEEPSEEK
    kind = MtpHead if is_deepseek else QwenMtpHead
    if config.init is None:
        return kind.fresh(target, config.num_modules, initialize=config.initialize)
    source = source_of(target) if config.init == "target" else config.init
    return make_trainable(kind.from_checkpoint(Checkpoint.open(source), target))
