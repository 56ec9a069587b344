"""How far a draft's distribution is from the target's: one number a row, float32.

Every loss takes the draft's and the target's logits over the same D tokens. With p the target's
distribution and q the draft's, speculative sampling accepts a draft token with probability
``sum(min(p, q)) = 1 - total variation`` (Leviathan et al., 2023, arXiv:2211.17192); the divergence
from p to q bounds it and has a better gradient while q is still far off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError

__all__ = ["LOSSES", "Loss", "LossMixture", "LossRows"]


class LossRows(NamedTuple):
    """What a loss sees of n rows.

    draft, target: logits float32 [n, D]; finite, so that no gradient becomes NaN: forbidden tokens
        have the least number of the dtype.
    tokens: int64 [n], the draft id of the token that stands in the document; -1 for a token that
        the draft does not know.
    """

    draft: Tensor
    target: Tensor
    tokens: Tensor


def kl(rows: LossRows) -> Tensor:
    """KL(p || q), [n]."""
    p, q = _log_softmax(rows.target), _log_softmax(rows.draft)
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(rows: LossRows) -> Tensor:
    """KL(q || p), [n]: the draft is asked for tokens the target likes, not for all of them."""
    p, q = _log_softmax(rows.target), _log_softmax(rows.draft)
    return (q.exp() * (q - p)).sum(-1)


def total_variation(rows: LossRows) -> Tensor:
    """1 - sum(min(p, q)), [n]: the probability that rejection sampling rejects."""
    return 1 - rows.target.softmax(-1).minimum(rows.draft.softmax(-1)).sum(-1)


def cross_entropy(rows: LossRows) -> Tensor:
    """-log q(the target's likeliest token), [n]."""
    return functional.cross_entropy(rows.draft, rows.target.argmax(-1), reduction="none")


def token_cross_entropy(rows: LossRows) -> Tensor:
    """-log q(the document's own token), [n]; 0 where the draft does not know it.

    What FastMTP trains with (arXiv:2509.18362), over responses of the target.
    """
    return functional.cross_entropy(rows.draft, rows.tokens, reduction="none", ignore_index=-1)


Loss = Callable[[LossRows], Tensor]
"""The loss of each of n rows, float32 [n]."""

LOSSES: dict[str, Loss] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "cross_entropy": cross_entropy,
    "token_cross_entropy": token_cross_entropy,
}


@dataclass(frozen=True)
class LossMixture:
    """A weighted sum of losses; made by ``parse``."""

    weights: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> LossMixture:
        """From a name, ``"kl"``, or names with weights, ``"kl=0.9,total_variation=0.1"``.

        Raises ConfigError for a name that is no loss and a weight that is no positive number.
        """
        weights = []
        for part in text.split(","):
            name, _, weight = part.strip().partition("=")
            if name not in LOSSES:
                known = ", ".join(LOSSES)
                raise ConfigError("loss", text, f"{name!r} is no loss; choose among {known}")
            weights.append((name, _positive(text, weight or "1")))
        return cls(tuple(weights))

    def __call__(self, rows: LossRows) -> Tensor:
        """The loss of each row, float32 [n]."""
        terms = [weight * LOSSES[name](rows) for name, weight in self.weights]
        return sum(terms[1:], start=terms[0])


def _log_softmax(logits: Tensor) -> Tensor:
    return functional.log_softmax(logits, -1)


def _positive(text: str, weight: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError("loss", text, f"the weight {weight!r} must be a positive number")
    return value
