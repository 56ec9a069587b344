"""What a draft is trained for: a loss weighted over its depths, and how many drafts would stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.training.algorithm import Metric, TrainingOutput
from guided_spec.training.batch import TrainingBatch
from guided_spec.training.losses import Loss, LossMixture, LossRows
from guided_spec.training.target_rows import TargetRows, forbid

__all__ = ["DraftLogits", "Objective", "measure"]


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
