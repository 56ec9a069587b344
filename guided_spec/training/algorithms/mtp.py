"""Training of multi-token prediction modules, DeepSeek-V3's report, section 2.2.

A single module is repeated when it drafts, and trained so: FastMTP, arXiv:2509.18362. Its attention
follows what drafting leaves in the cache, as EAGLE-3's training-time test does.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.mtp import MtpHead, QwenMtpHead
from guided_spec.training.algorithms.options import MtpConfig
from guided_spec.training.head_training import HeadTraining, make_trainable, source_of
from guided_spec.training.registry import register

__all__ = ["MtpTraining"]

# Targets by model_type whose own modules follow DeepSeek's equations.
DEEPSEEK = ("deepseek_v3", "deepseek_v32", "glm4_moe")


@register("mtp")
class MtpTraining(HeadTraining):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = MtpConfig

    @classmethod
    def make_head(
        cls, config: MtpConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> MtpHead | QwenMtpHead:
        """Fresh modules, or those of ``init``; ``vocabulary`` has to be None."""
        del vocabulary
        is_deepseek = config.form == "deepseek"
        if config.form == "auto":
            is_deepseek = target.config.model_type in DEEPSEEK
        kind = MtpHead if is_deepseek else QwenMtpHead
        if config.init is None:
            return kind.fresh(target, config.num_modules, initialize=config.initialize)
        source = source_of(target) if config.init == "target" else config.init
        return make_trainable(kind.from_checkpoint(Checkpoint.open(source), target))
