"""Options that the algorithms share, and how an option is declared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["LossOptions", "option"]

LOSS_HELP = (
    "What is minimised: kl, reverse_kl, total_variation, cross_entropy (with the likeliest "
    "token of the target), token_cross_entropy (with the document's token), or a mixture such as "
    "kl=0.9,total_variation=0.1."
)


def option(help_text: str, *, default: Any) -> Any:
    """A dataclass field with the text that ``guided-spec train --help`` shows for it."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class LossOptions:
    """The options about the loss; an algorithm's own options extend them."""

    ttt_steps: int = option("Draft tokens that are trained ahead: depths of the unroll.", default=3)
    ttt_step_loss_decay: float = option(
        "Weight of a depth's loss, relative to the one before.", default=1.0
    )
    loss: str = option(LOSS_HELP, default="kl")
