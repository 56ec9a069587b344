"""What a draft is trained for: a loss weighted over its depths, and how many drafts would stay.

How far a draft's distribution is from the target's: one number a row, float32.

Every loss takes the draft's and the target's logits over the same D tokens. With p the target's
distribution and q the draft's, speculative sampling accepts a draft token with probability
``sum(min(p, q)) = 1 - total variation`` (Leviathan et al., 2023, arXiv:2211.17192); the divergence
from p to q bounds it and has a better gradient while q is still far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.training.algorithm import Metric, TrainingBatch, TrainingOutput
from guided_spec.training.target_rows import TargetRows, forbid

__all__ = ["LOSSES", "DraftLogits", "Loss", "LossMixture", "LossRows", "Objective", "measure"]


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


class DraftLogits(NamedTuple):
    """A draft's scores at one depth.

    places: bool [B, T], n of them true: where there are scores; place p is for token p + 2 + depth.
    logits: [n, D].
    """

    places: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Objective:
    """How the loss is put together.

    weights: of the depths, the first being the first draft token; a depth of weight 0 is measured,
        not trained.
    loss: of one row. masked: whether draft and target are compared under the grammar's masks, as
        they are when the draft is used. Otherwise over all tokens; the metrics are under the masks
        either way.
    """

    weights: tuple[float, ...]
    loss: Loss
    masked: bool = True

    @classmethod
    def parse(cls, *, steps: int, decay: float, loss: str, masked: bool) -> Objective:
        """``steps`` depths with the weights 1, decay, decay squared, ...

        Raises ConfigError for steps below 1, a decay outside (0, 1], and an unknown loss.
        """
        if steps < 1:
            raise ConfigError("steps", steps, "must be at least 1")
        if not 0 < decay <= 1:
            raise ConfigError("decay", decay, "must be above 0 and at most 1")
        weights = tuple(decay**depth for depth in range(steps))
        return cls(weights, LossMixture.parse(loss), masked)


def measure(
    drafts: Iterator[DraftLogits] | Sequence[DraftLogits],
    batch: TrainingBatch,
    targets: TargetRows,
    objective: Objective,
) -> TrainingOutput:
    """Loss and metrics of a draft's scores, one item of ``drafts`` a depth.

    The loss of a depth is the mean over its tokens; that of the whole is their weighted sum, as in
    EAGLE-3's training-time test.
    """
    loss = torch.zeros((), device=batch.token_ids.device)
    metrics: dict[str, Metric] = {}
    tally = _Tally(batch, targets)
    chosen = []
    for depth, (draft, weight) in enumerate(zip(drafts, objective.weights, strict=True)):
        rows = targets.at_depth(depth)[draft.places]
        if weight > 0:
            losses = _losses(draft.logits, rows, targets, objective)
            loss = loss + weight * losses.total / losses.count.clamp_min(1)
            metrics[f"loss_{depth}"] = Metric(losses.total.detach(), losses.count)
        metrics |= tally.add(depth, draft, rows)
        chosen.append(tally.choice)
    return TrainingOutput(torch.stack(chosen), loss, metrics)


def _losses(logits: Tensor, rows: Tensor, targets: TargetRows, objective: Objective) -> Metric:
    """The sum of the losses of rows in which the draft has any legal token, with its gradient."""
    draft, goal, keep = (
        logits.float(),
        targets.logits[rows],
        torch.ones_like(rows, dtype=torch.bool),
    )
    if targets.legal is not None and objective.masked:
        legal = targets.legal[rows]
        draft, goal, keep = forbid(draft, legal), forbid(goal, legal), legal.any(-1)
    losses = objective.loss(LossRows(draft, goal, targets.token[rows]))
    return Metric((losses * keep).sum(), keep.sum().float())


class _Tally:
    """Which drafts would have stayed up to the current depth, for each place they start at."""

    def __init__(self, batch: TrainingBatch, targets: TargetRows) -> None:
        self._targets = targets
        # All of a draft counted so far lies in answers; it agrees with the target's likeliest
        # tokens; the probability that rejection sampling keeps it.
        self._counted = torch.ones_like(batch.loss_mask)
        self._agrees = torch.ones_like(batch.loss_mask)
        self._stays = torch.ones(batch.loss_mask.shape, device=batch.loss_mask.device)
        self.choice = batch.token_ids

    @torch.no_grad()
    def add(self, depth: int, draft: DraftLogits, rows: Tensor) -> dict[str, Metric]:
        """The metrics of one more depth; rows: int64 [n], those of ``targets``."""
        targets, places = self._targets, draft.places
        legal = None if targets.legal is None else targets.legal[rows]
        logits = forbid(draft.logits.float(), legal)
        best = logits.argmax(-1)
        if targets.target_ids is not None:
            best = targets.target_ids[best]
        goal = (forbid(targets.logits[rows], legal) - targets.total[rows, None]).exp()
        overlap = goal.minimum(logits.softmax(-1)).sum(-1)
        agrees = best == targets.top[rows]
        self._counted = self._counted & places
        self._agrees = self._agrees & _spread(agrees, places, fill=False)
        self._stays = self._stays * _spread(overlap, places, fill=0.0)
        self.choice = _spread(best, places, fill=-1)
        count = self._counted.sum().float()
        return {
            f"accept_{depth}": Metric((self._agrees & self._counted).sum().float(), count),
            f"overlap_{depth}": Metric((self._stays * self._counted).sum(), count),
        }


def _spread(values: Tensor, places: Tensor, *, fill: float) -> Tensor:
    """[B, T] with ``values`` [n] at the n true ``places``."""
    spread = torch.full(places.shape, fill, dtype=values.dtype, device=values.device)
    spread[places] = values
    return spread
