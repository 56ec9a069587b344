"""Training of EAGLE heads, arXiv:2401.15077, by EAGLE-3's training-time test.

The paper regresses the target's next hidden state; drafting needs the distribution only, and the
unroll trains the head on its own states, which the regression was there for.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.eagle import EagleHead
from guided_spec.training.algorithms.options import EagleConfig
from guided_spec.training.head_training import HeadTraining, make_trainable
from guided_spec.training.registry import register

__all__ = ["EagleTraining"]


@register("eagle")
class EagleTraining(HeadTraining):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = EagleConfig

    @classmethod
    def make_head(
        cls, config: EagleConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> EagleHead:
        """A fresh head, or the one of ``init``; ``vocabulary`` has to be None."""
        del vocabulary
        if config.init is not None:
            return make_trainable(EagleHead.from_checkpoint(Checkpoint.open(config.init), target))
        return EagleHead.fresh(target, shape=HeadShape(num_layers=config.num_layers))
