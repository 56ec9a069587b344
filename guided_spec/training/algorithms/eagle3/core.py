"""Training of EAGLE-3 heads: training-time test, arXiv:2503.01840."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.eagle3 import Eagle3Head
from guided_spec.models.eagle3_layout import Eagle3Options, eagle3_layout_for
from guided_spec.models.head_config import HeadShape
from guided_spec.models.head_export import head_layouts, save_head
from guided_spec.training.algorithm import TrainingOutput
from guided_spec.training.algorithms.eagle3.config import Eagle3Config
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

__all__ = ["Eagle3Training"]


@register("eagle3")
class Eagle3Training(nn.Module):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = Eagle3Config
    reduced_vocabulary = True
    get_trainer_kwargs = staticmethod(trainer_kwargs)

    def __init__(self, head: Eagle3Head, target: FrozenTarget, config: Eagle3Config) -> None:
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
    ) -> Eagle3Training:
        """A fresh head, or the one of ``init``, whose draft vocabulary then counts."""
        del verifier_config
        config = Eagle3Config(**options)
        return cls(_make_head(config, target, vocabulary), FrozenTarget.of(target), config)

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


def _make_head(
    config: Eagle3Config, target: PreTrainedModel, vocabulary: DraftVocabulary | None
) -> Eagle3Head:
    if config.init is not None:
        return make_trainable(Eagle3Head.from_checkpoint(Checkpoint.open(config.init), target))
    shape = HeadShape(
        config.num_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
    )
    options = Eagle3Options(
        shape=shape,
        model_type=config.layer_type,
        aux_hidden_layers=None if config.aux_layers is None else tuple(config.aux_layers),
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
    )
    layout = eagle3_layout_for(target, options)
    return Eagle3Head.fresh(target, vocabulary=vocabulary, layout=layout)
