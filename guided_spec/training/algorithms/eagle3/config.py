"""Options of EAGLE-3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from guided_spec.training.algorithms.options import LossOptions, option

__all__ = ["Eagle3Config"]


@dataclass(frozen=True)
class Eagle3Config(LossOptions):
    """What a head looks like, and how it is trained."""

    init: str | None = option("An EAGLE-3 head to go on from; a folder or hub id.", default=None)
    num_layers: int = option("Decoder layers of the head.", default=1)
    layer_type: Literal["llama", "qwen3"] = option("Kind of these layers.", default="llama")
    aux_layers: list[int] | None = option(
        "Layers of the target whose inputs the head reads; three, spread, by default.", default=None
    )
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
    norm_before_fc: bool = option("Norm over all that the first projection reads.", default=False)
    fc_norm: bool = option("A norm for each layer it reads instead.", default=False)
    norm_before_residual: bool = option("Residual stream from behind the norm.", default=False)
    norm_output: bool = option("Recycle what is behind the final norm (EAGLE 3.1).", default=False)
