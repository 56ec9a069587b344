"""Options of the algorithms: what they share, and those of each.

They are separate from the algorithms, which load torch: a command's help reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from guided_spec.config import option

LOSS_HELP = (
    "What is minimised: kl, reverse_kl, total_variation, cross_entropy (with the likeliest "
    "token of the target), token_cross_entropy (with the document's token), or a mixture such as "
    "kl=0.9,total_variation=0.1."
)


@dataclass(frozen=True)
class LossOptions:
    """The options about the loss; an algorithm's own options extend them."""

    ttt_steps: int = option("Draft tokens that are trained ahead: depths of the unroll.", default=3)
    ttt_step_loss_decay: float = option(
        "Weight of a depth's loss, relative to the one before.", default=1.0
    )
    loss: str = option(LOSS_HELP, default="kl")


@dataclass(frozen=True)
class HeadOptions(LossOptions):
    """And those of every head."""

    gradient_checkpointing: bool = option(
        "Compute what the backward pass needs a second time instead of keeping it.", default=False
    )


@dataclass(frozen=True)
class ShapeOptions(HeadOptions):
    """And those about the sizes of a head's layers; see ``head_shape``."""

    num_layers: int = option("Decoder layers of the head.", default=1)
    intermediate_size: int | None = option(
        "Width of its MLPs; the target's by default.", default=None
    )
    num_attention_heads: int | None = option(
        "Its attention heads; the target's by default.", default=None
    )
    num_key_value_heads: int | None = option("Its KV heads; the target's by default.", default=None)
    head_dim: int | None = option(
        "Width of an attention head; the target's by default.", default=None
    )


@dataclass(frozen=True)
class DFlashConfig(ShapeOptions):
    """What a head looks like, and how it is trained."""

    ttt_steps: int = option("Draft tokens of a block; its last token is one more.", default=15)
    ttt_step_loss_decay: float = option(
        "Weight of a position's loss, relative to the one before.", default=0.87
    )
    init: str | None = option("DFlash head to continue from: a folder or hub id.", default=None)
    anchors: int = option("Blocks of a document in a step at most, drawn anew.", default=128)
    num_layers: int = option("Decoder layers of the head, of Qwen3's kind.", default=5)
    aux_layers: list[int] | None = option(
        "Layers of the target whose inputs the head reads; as many as its own, spread, by default.",
        default=None,
    )
    mask_token_id: int | None = option(
        "Token that stands where one is drafted; the last of the embedding by default.",
        default=None,
    )


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """What a head looks like, and how it is trained."""

    ttt_steps: int = option("Draft tokens of a block, its last one included.", default=7)
    ttt_step_loss_decay: float = option(
        "Weight of a position's loss, relative to the one before.", default=0.78
    )
    init: str | None = option("DSpark head to continue from: a folder or hub id.", default=None)
    markov_rank: int = option("Rank of what the token before adds to the scores.", default=256)
    markov_head_type: Literal["vanilla", "gated"] = option(
        "Whether that depends on the head's output too.", default="vanilla"
    )
    confidence_weight: float = option(
        "Weight of the confidence head's loss; with 0 a fresh head has none.", default=1.0
    )


@dataclass(frozen=True)
class DraftModelConfig(LossOptions):
    """What the small model looks like, and how it is trained.

    All depths are trained at once by its causal attention: ``ttt_steps`` only says for how many
    the acceptance is reported, and there is nothing to decay.
    """

    init: str | None = option("Model with the target's tokenizer to continue from.", default=None)
    num_layers: int = option("Decoder layers of a fresh model, which is a Llama.", default=2)
    hidden_size: int = option("Width of a fresh model.", default=256)
    intermediate_size: int = option("Width of its MLPs.", default=704)
    num_attention_heads: int = option("Its attention heads.", default=4)
    num_key_value_heads: int = option("Its KV heads.", default=2)


@dataclass(frozen=True)
class EagleConfig(HeadOptions):
    """What a head looks like, and how it is trained."""

    init: str | None = option("EAGLE head to continue from: a folder or hub id.", default=None)
    num_layers: int = option("Decoder layers of the head.", default=1)


@dataclass(frozen=True)
class Eagle3Config(ShapeOptions):
    """What a head looks like, and how it is trained."""

    init: str | None = option("EAGLE-3 head to continue from: a folder or hub id.", default=None)
    layer_type: Literal["llama", "qwen3"] = option("Kind of these layers.", default="llama")
    aux_layers: list[int] | None = option(
        "Layers of the target whose inputs the head reads; three, spread, by default.", default=None
    )
    norm_before_fc: bool = option("Norm over all that the first projection reads.", default=False)
    fc_norm: bool = option("A norm for each layer it reads instead.", default=False)
    norm_before_residual: bool = option("Residual stream from after the norm.", default=False)
    norm_output: bool = option("Recycle the output of the final norm (EAGLE 3.1).", default=False)


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """What a head looks like, and how it is trained."""

    ttt_steps: int = option("Draft tokens that are trained ahead, at once.", default=8)
    init: str | None = option("P-EAGLE head to continue from: a folder or hub id.", default=None)
    anchors: int = option(
        "Most positions of a document after which a step drafts masks; drawn anew each step.",
        default=128,
    )
    mask_token_id: int | None = option(
        "Token that stands where one is drafted; the last of the vocabulary by default.",
        default=None,
    )


@dataclass(frozen=True)
class MtpConfig(HeadOptions):
    """What the modules look like, and how they are trained."""

    init: str | None = option(
        "Modules to continue from: a folder or hub id, or 'target' for those in its checkpoint.",
        default=None,
    )
    form: Literal["auto", "deepseek", "qwen"] = option(
        "Whose equations: DeepSeek's and GLM's, or Qwen's; auto follows the target.", default="auto"
    )
    num_modules: int = option("Modules at successive depths; the last one is repeated.", default=1)
    initialize: Literal["target", "random"] = option(
        "Fresh decoder layers: a copy of the target's last one, or random.", default="target"
    )


CONFIGS: dict[str, type] = {
    "dflash": DFlashConfig,
    "draft_model": DraftModelConfig,
    "dspark": DSparkConfig,
    "eagle": EagleConfig,
    "eagle3": Eagle3Config,
    "mtp": MtpConfig,
    "p_eagle": PEagleConfig,
}
"""Of the built-in algorithms, by name."""
