"""Options of EAGLE."""

from __future__ import annotations

from dataclasses import dataclass

from guided_spec.training.algorithms.options import LossOptions, option

__all__ = ["EagleConfig"]


@dataclass(frozen=True)
class EagleConfig(LossOptions):
    """What a head looks like, and how it is trained."""

    init: str | None = option("An EAGLE head to go on from; a folder or hub id.", default=None)
    num_layers: int = option("Decoder layers of the head.", default=1)
