"""Options of draft-model distillation."""

from __future__ import annotations

from dataclasses import dataclass

from guided_spec.training.algorithms.options import LossOptions, option

__all__ = ["DraftModelConfig"]


@dataclass(frozen=True)
class DraftModelConfig(LossOptions):
    """What the small model looks like, and how it is trained.

    All depths are trained at once by its causal attention: ``ttt_steps`` only says for how many
    the acceptance is reported, and there is nothing to decay.
    """

    init: str | None = option("A model of the target's tokens to go on from.", default=None)
    num_layers: int = option("Decoder layers of a fresh model, which is a Llama.", default=2)
    hidden_size: int = option("Width of a fresh model.", default=256)
    intermediate_size: int = option("Width of its MLPs.", default=704)
    num_attention_heads: int = option("Its attention heads.", default=4)
    num_key_value_heads: int = option("Its KV heads.", default=2)
