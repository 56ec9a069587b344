"""Training of EAGLE heads, arXiv:2401.15077, by EAGLE-3's training-time test.

The paper regresses the target's next hidden state; drafting needs the distribution only, and the
unroll trains the head on its own states, which the regression was there for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.eagle import EagleHead
from guided_spec.models.head_config import HeadShape
from guided_spec.models.head_export import head_layouts, save_head
from guided_spec.training.algorithm import TrainingOutput
from guided_spec.training.algorithms.eagle.config import EagleConfig
from guided_spec.training.batch import TargetStates, TrainingBatch
from guided_spec.training.head_training import (
    FrozenTarget,
    forward_head,
    head_feature_layers,
    make_trainable,
    own_tensors,
    trainer_kwargs,
)
from guided_spec.training.objective import Objective
from guided_spec.training.registry import register

__all__ = ["EagleTraining"]


@register("eagle")
class EagleTraining(nn.Module):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = EagleConfig
    reduced_vocabulary = False
    get_trainer_kwargs = staticmethod(trainer_kwargs)

    def __init__(self, head: EagleHead, target: FrozenTarget, config: EagleConfig) -> None:
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
    ) -> EagleTraining:
        """A fresh head, or the one of ``init``; ``vocabulary`` has to be None."""
        del verifier_config, vocabulary
        config = EagleConfig(**options)
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


def _make_head(config: EagleConfig, target: PreTrainedModel) -> EagleHead:
    if config.init is not None:
        return make_trainable(EagleHead.from_checkpoint(Checkpoint.open(config.init), target))
    return EagleHead.fresh(target, shape=HeadShape(num_layers=config.num_layers))
