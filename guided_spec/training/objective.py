"""What a draft is trained for: a loss weighted over its depths, and how many drafts would stay.

How far a draft's distribution is from the target's: one number a row, float32.

Every loss takes the draft's and the target's logits over the same D tokens. With p the target's
distribution and q the draft's, speculative sampling accepts a draft token with probability
``sum(min(p, q)) = 1 - total variation`` (Leviathan et al., 2023, arXiv:2211.17192); the divergence
from p to q bounds it and has a better gradient while q is still far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.ops.mask_words import BITS
from guided_spec.training.algorithm import Metric, TrainingBatch, TrainingOutput
from guided_spec.training.compiled import compiled_on_cuda
from guided_spec.training.rows import Positions, pick_rows
from guided_spec.training.target_rows import TargetRows, TargetScores, forbid
from guided_spec.types import require_int


class LossRows(NamedTuple):
    """What a loss sees of n rows.

    draft, target: logits float32 [n, D]; finite, so that no gradient becomes NaN: forbidden tokens
        have the least number of the dtype.
    tokens: int64 [n], the draft id of the document's token; -1 for a token that
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
                raise ConfigError("loss", text, f"{name!r} is not a loss; choose from {known}")
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


class DraftStates(NamedTuple):
    """What a draft is scored by at one depth.

    positions: the n where it drafts; position p drafts token p + 2 + depth.
    hidden: [n, H], with gradient; ``DraftScorer.logits`` makes scores of them.
    """

    positions: Positions
    hidden: Tensor


class Confidence(NamedTuple):
    """What a draft believes of itself. logits: from its hidden states [n, H] to [n], logits of the
    probability that rejection sampling keeps it, among tokens that it scores. weight: of its binary
    cross-entropy in the loss.
    """

    logits: Callable[[Tensor], Tensor]
    weight: float


class DraftScorer(NamedTuple):
    """How the hidden states [n, H] of a draft become logits [n, D].

    parameters: what is trained among that which ``logits`` uses; others may be there too.
    """

    logits: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    confidence: Confidence | None = None

    @classmethod
    def of(
        cls,
        logits: Callable[[Tensor], Tensor],
        module: nn.Module,
        layers: nn.ModuleList,
        confidence: Confidence | None = None,
    ) -> DraftScorer:
        """With the parameters of ``module`` that are not in ``layers``, which it runs before."""
        inside = {id(parameter) for parameter in layers.parameters()}
        outside = (p for p in module.parameters() if p.requires_grad and id(p) not in inside)
        return cls(logits, tuple(outside), confidence)


@dataclass(frozen=True)
class Objective:
    """How the loss is put together.

    weights: of the depths, the first being the first draft token; a depth of weight 0 is measured,
        not trained.
    loss: of one row. masked: whether draft and target are compared under the grammar's masks, as
        they are when the draft is used. Otherwise over all tokens; metrics always use the masks.
    """

    weights: tuple[float, ...]
    loss: Loss
    masked: bool = True

    @classmethod
    def parse(cls, *, steps: int, decay: float, loss: str, masked: bool) -> Objective:
        """``steps`` depths with the weights 1, decay, decay squared, ...

        Raises ConfigError for steps below 1, a decay outside (0, 1], and an unknown loss.
        """
        require_int("steps", steps, low=1)
        if not 0 < decay <= 1:
            raise ConfigError("decay", decay, "must be above 0 and at most 1")
        weights = tuple(decay**depth for depth in range(steps))
        return cls(weights, LossMixture.parse(loss), masked)


# What the scores of a chunk of rows may take, all tables of them together. The gradients of an
# output head are written and added once a chunk: few are better.
CHUNK_BYTES = 2**32
TABLES = (3, 8)  # float32, V wide for each row of the target, and D wide for each draft


def measure(
    drafts: Iterable[DraftStates],
    scorer: DraftScorer,
    batch: TrainingBatch,
    targets: TargetRows,
    objective: Objective,
) -> TrainingOutput:
    """Loss and metrics of a draft, one item of ``drafts`` a depth.

    Fewer items than depths: the last one drafts a token from the text before it, so that its scores
    are those of all further depths; these have to have weight 0.

    The loss of a depth is the mean over its tokens; that of the whole is their weighted sum, as in
    EAGLE-3's training-time test. Scores are made, used and forgotten in chunks of rows, and their
    gradients with them, here and not in the backward pass: memory is that of one chunk, whatever
    the size of the batch. Liger's fused losses (arXiv:2410.10989, section 3.2) work so.
    """
    rows = _DraftRows.gather(list(drafts), targets)
    loss = _FusedLoss(rows, scorer, targets, objective)
    for chunk in rows.chunks(*loss.widths(batch.bitmask.shape[-1] * BITS)):
        loss.add(chunk)
    metrics: dict[str, Metric] = {}
    if scorer.confidence is not None:
        metrics["confidence_error"] = Metric(loss.confidence_error, loss.counts.sum())
    tally, chosen = _Tally(batch), []
    for depth, weight in enumerate(objective.weights):
        if weight > 0:
            metrics[f"loss_{depth}"] = Metric(loss.totals[depth], loss.counts[depth])
        positions = (
            rows.positions[depth] if depth < len(rows.positions) else targets.positions(depth)
        )
        drafted = positions.read(targets.at_depth(depth))
        metrics |= tally.add(depth, positions, loss.verdicts(drafted, depth))
        chosen.append(tally.choice)
    return TrainingOutput(torch.stack(chosen), loss.result(), metrics)


class _DraftRows(NamedTuple):
    """M drafts of all depths, those of one row of the target next to each other.

    hidden: [M, H], with gradient. row: int64 [M], ascending. depth: int64 [M]. positions: of each
    depth. own: int64 [n] of each depth, which of the M its drafts are.
    """

    hidden: Tensor
    row: Tensor
    depth: Tensor
    positions: list[Positions]
    own: list[Tensor]

    @classmethod
    def gather(cls, drafts: list[DraftStates], targets: TargetRows) -> _DraftRows:
        positions = [draft.positions for draft in drafts]
        each = [at.read(targets.at_depth(depth)) for depth, at in enumerate(positions)]
        row = torch.cat(each)
        depth = torch.cat([torch.full_like(rows, at) for at, rows in enumerate(each)])
        order = row.argsort(stable=True)
        hidden = pick_rows(torch.cat([draft.hidden for draft in drafts]), order)
        own = order.argsort().split([len(rows) for rows in each])
        return cls(hidden, row[order], depth[order], positions, list(own))

    def chunks(self, row_bytes: int, draft_bytes: int) -> Iterator[_Chunk]:
        """All drafts, those of a row together, as many at a time as ``CHUNK_BYTES`` allow.

        Once if there is none.
        """
        rows, at, counts = self.row.unique_consecutive(return_inverse=True, return_counts=True)
        last = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu()
        total = torch.arange(len(last)) * row_bytes + last * draft_bytes
        start = 0
        while start < max(1, len(counts)):
            fitting = int(torch.searchsorted(total, total[start] + CHUNK_BYTES, right=True)) - 1
            end = min(max(start + 1, fitting), len(counts))
            own = slice(int(last[start]), int(last[end]))
            yield _Chunk(own, rows[start:end], at[own] - start)
            start = max(1, end)


class _Chunk(NamedTuple):
    """own: m drafts. rows: int64 [k], the target's. at: int64 [m], which of these each is of."""

    own: slice
    rows: Tensor
    at: Tensor


class _Verdicts(NamedTuple):
    """What the loss gave of m drafts.

    best: int64, the likeliest token, as a target id. agrees: bool, whether it is the target's.
    overlap: float32, the probability that rejection sampling keeps the draft.
    """

    best: Tensor
    agrees: Tensor
    overlap: Tensor


class _Compared(NamedTuple):
    """What the comparison of m drafts with the target gave.

    losses: float32 [m], with gradient. best: int64 [m], the likeliest token, as a draft id.
    overlap, kept: float32 [m], the probability that rejection sampling keeps the draft: under the
    masks, and, where a confidence is trained, among what the loss compares.
    """

    losses: Tensor
    best: Tensor
    overlap: Tensor
    kept: Tensor | None


@compiled_on_cuda
def _compare(
    logits: Tensor, goal: TargetScores, at: Tensor, objective: Objective, *, doubts: bool
) -> _Compared:
    """logits: [m, D], of the drafts. at: int64 [m], the row of ``goal`` of each."""
    plain = LossRows(logits.float(), goal.logits[at].float(), goal.token[at])
    legal = None if goal.legal is None else goal.legal[at]
    bound = plain._replace(draft=forbid(plain.draft, legal), target=forbid(plain.target, legal))
    compared = bound if objective.masked else plain
    with torch.no_grad():
        likely = bound.draft.softmax(-1)
        overlap = (bound.target - goal.total[at, None]).exp_().minimum(likely).sum(-1)
        del likely
        kept = 1 - total_variation(compared) if doubts else None
    return _Compared(objective.loss(compared), bound.draft.argmax(-1), overlap, kept)


class _FusedLoss:
    """The loss of all drafts, its gradient, and the verdicts on them, a chunk of rows at a time.

    size: D. totals, counts: float32 [steps], the sums of the losses of each depth, and over how
    many drafts: those that have any legal token. confidence_error: float32, the sum over these of
    how far the confidence is from the probability it is about.
    """

    def __init__(
        self, rows: _DraftRows, scorer: DraftScorer, targets: TargetRows, objective: Objective
    ) -> None:
        self._rows, self._scorer = rows, scorer
        self._targets, self._objective = targets, objective
        with torch.no_grad():
            self._like = scorer.logits(rows.hidden[:1])
        self.size = self._like.shape[-1]
        weights = torch.tensor(objective.weights, device=rows.row.device)
        keep = torch.ones_like(rows.row, dtype=torch.bool)
        if objective.masked:
            keep = targets.has_legal(self.size)[rows.row]
        self.totals = torch.zeros_like(weights)
        self.counts = torch.zeros_like(weights).index_add_(0, rows.depth, keep.float())
        self._keep = keep
        self._share = keep * (weights / self.counts.clamp_min(1))[rows.depth]
        self._value, self.confidence_error = (torch.zeros_like(weights[0]) for _ in range(2))
        self._leaves = (rows.hidden, *scorer.parameters)
        self._needs_gradient = torch.is_grad_enabled() and any(
            x.requires_grad for x in self._leaves
        )
        self._gradients: list[Tensor | None] = [torch.zeros_like(rows.hidden)]
        self._gradients += [None] * len(scorer.parameters)
        self._verdicts: list[_Verdicts] = []

    def widths(self, vocab_size: int) -> tuple[int, int]:
        """Bytes of scores that a row of the target and a draft take while they are compared.

        Compiled, nothing is between passes: there are the draft's scores, their gradient, and the
        target's, and of these the draft's tokens.
        """
        if self._like.is_cuda:
            return 4 * vocab_size, 2 * self.size * self._like.itemsize
        return 4 * TABLES[0] * vocab_size, 4 * TABLES[1] * self.size

    def add(self, chunk: _Chunk) -> None:
        """Score these drafts, and what the target has in their rows."""
        rows, own, at = self._rows, chunk.own, chunk.at
        goal, depth, keep = self._targets.score(chunk.rows), rows.depth[own], self._keep[own]
        hidden = rows.hidden[own].detach().requires_grad_(self._needs_gradient)
        logits = self._scorer.logits(hidden)
        doubts = self._scorer.confidence is not None
        found = _compare(logits, goal, at, self._objective, doubts=doubts)
        self._judge(found, goal.top[at])
        self.totals.index_add_(0, depth, found.losses.detach() * keep)
        losses = found.losses
        if self._scorer.confidence is not None and found.kept is not None:
            losses = losses + self._doubt(self._scorer.confidence, hidden, found.kept, keep)
        value = (losses * self._share[own]).sum()
        self._value += value.detach()
        if self._needs_gradient and value.requires_grad:
            leaves = (hidden, *self._scorer.parameters)
            part, *shared = torch.autograd.grad(value, leaves, allow_unused=True)
            if part is not None and self._gradients[0] is not None:
                self._gradients[0][own] = part
            for number, part in enumerate(shared, 1):
                before = self._gradients[number]
                self._gradients[number] = part if before is None else before.add_(part)

    def _judge(self, found: _Compared, wanted: Tensor) -> None:
        """wanted: int64 [m], the target's likeliest tokens."""
        ids = self._targets.target_ids
        best = found.best if ids is None else ids[found.best]
        self._verdicts.append(_Verdicts(best, best == wanted, found.overlap))

    def _doubt(self, confidence: Confidence, hidden: Tensor, kept: Tensor, keep: Tensor) -> Tensor:
        """What the confidence in each of m drafts adds to its loss, [m]."""
        believed = confidence.logits(hidden).float()
        self.confidence_error += ((believed.detach().sigmoid() - kept).abs() * keep).sum()
        return confidence.weight * functional.binary_cross_entropy_with_logits(
            believed, kept, reduction="none"
        )

    def result(self) -> Tensor:
        """The weighted sum of the depths' means: a scalar, with gradient."""
        if not self._needs_gradient:
            return self._value
        loss: Tensor = _WithGradient.apply(self._value, self._gradients, *self._leaves)  # type: ignore[no-untyped-call]
        return loss

    def verdicts(self, rows: Tensor, depth: int) -> _Verdicts:
        """On what was drafted at a depth; rows: int64 [n], of the target, ascending."""
        scored = min(depth, len(self._rows.positions) - 1)
        own = self._rows.own[scored]
        own = own[torch.searchsorted(self._rows.row[own], rows)]
        return _Verdicts(*(torch.cat(parts)[own] for parts in zip(*self._verdicts, strict=True)))


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *leaves: Tensor) -> Tensor:
        """gradients: as of ``leaves``, which ``value`` was made of; None where it was not."""
        del leaves
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the forward, times that of the loss."""
        known = (None if part is None else _scale(part, upstream[0]) for part in ctx.gradients)
        return (None, None, *known)


@compiled_on_cuda
def _scale(values: Tensor, factor: Tensor) -> Tensor:
    return values * factor


class _Tally:
    """Which drafts would be accepted up to the current depth, for each position they start at."""

    def __init__(self, batch: TrainingBatch) -> None:
        # All of a draft counted so far lies in responses; it agrees with the target's likeliest
        # tokens; the probability that rejection sampling keeps it.
        self._counted = torch.ones_like(batch.loss_mask)
        self._agrees = torch.ones_like(batch.loss_mask)
        self._stays = torch.ones(batch.loss_mask.shape, device=batch.loss_mask.device)
        self.choice = batch.token_ids

    def add(self, depth: int, positions: Positions, verdicts: _Verdicts) -> dict[str, Metric]:
        """The metrics of one more depth; positions: of the n verdicts."""
        self._counted = self._counted & positions.mask
        self._agrees = self._agrees & positions.spread(verdicts.agrees, fill=False)
        self._stays = self._stays * positions.spread(verdicts.overlap, fill=0.0)
        self.choice = positions.spread(verdicts.best, fill=-1)
        count = self._counted.sum().float()
        return {
            f"accept_{depth}": Metric((self._agrees & self._counted).sum().float(), count),
            f"overlap_{depth}": Metric((self._stays * self._counted).sum(), count),
        }
