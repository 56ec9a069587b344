"""Training of EAGLE-3 heads: training-time test, arXiv:2503.01840."""

from __future__ import annotations

from transformers import PreTrainedModel

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.eagle3 import Eagle3Head, Eagle3Options, eagle3_layout_for
from guided_spec.training.algorithms.options import Eagle3Config
from guided_spec.training.head_training import HeadTraining, head_shape, make_trainable
from guided_spec.training.registry import register

__all__ = ["Eagle3Training"]


@register("eagle3")
class Eagle3Training(HeadTraining):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = Eagle3Config
    reduced_vocabulary = True

    @classmethod
    def make_head(
        cls, config: Eagle3Config, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> Eagle3Head:
        """A fresh head, or the one of ``init``, whose own draft vocabulary then counts."""
        if config.init is not None:
            return make_trainable(Eagle3Head.from_checkpoint(Checkpoint.open(config.init), target))
        options = Eagle3Options(
            shape=head_shape(config),
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
