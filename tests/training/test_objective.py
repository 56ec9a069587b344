"""Loss and metrics of a batch, against loops over documents, positions and depths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guided_spec.errors import ConfigError
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.training.algorithm import TargetStates, TrainingBatch, TrainingOutput
from guided_spec.training.objective import (
    LOSSES,
    DraftScorer,
    DraftStates,
    LossRows,
    Objective,
    measure,
)
from guided_spec.training.target_rows import TargetRows, forbid

B, T, V, STEPS, WIDTH = 3, 9, 12, 3, 6
KNOWN = [0, 2, 3, 5, 7, 8, 11]  # the draft's tokens
CHUNK = "guided_spec.training.objective.CHUNK_BYTES"
SIZES = (1, 4000, 2**31)  # a row at a time, some, and all


class Identity:
    """A target whose last hidden states are its logits."""

    def normed(self, last: Tensor) -> Tensor:
        return last

    def logits(self, normed: Tensor) -> Tensor:
        return normed


class World:
    """A random batch, what the target thinks of it and what a draft scores."""

    def __init__(self, *, reduced: bool, masked: bool) -> None:
        dice = torch.Generator().manual_seed(11)
        lengths = torch.tensor([9, 6, 2])
        place = torch.arange(T)
        loss_mask = (torch.rand(B, T, generator=dice) < 0.7) & (place < lengths[:, None])
        loss_mask[:, 0] = False
        legal = torch.rand(5, V, generator=dice) < 0.5
        legal[:, 6] = True  # outside of the draft's tokens, so that some rows may starve
        legal[4] = False
        legal[4, 6] = True
        legal[0] = True
        rows = torch.randint(5, (B, T), generator=dice) if masked else torch.zeros(B, T).long()
        self.legal = legal[rows]
        bitmask = pack_bitmask(legal)[: 5 if masked else 1]
        bitmask[0] = -1
        self.vocabulary = DraftVocabulary(torch.tensor(KNOWN), V) if reduced else None
        self.known = KNOWN if reduced else list(range(V))
        tokens = self.legal.flatten(0, 1).float().multinomial(1, generator=dice).view(B, T)
        self.batch = TrainingBatch(tokens, loss_mask, lengths, bitmask, rows, torch.arange(B))
        self.goal = torch.randn(B, T, V, generator=dice)  # at place p, of token p + 1
        self.hidden = torch.randn(STEPS, B, T, WIDTH, generator=dice)
        self.head = nn.Linear(WIDTH, len(self.known), bias=False)
        self.head.weight.data.copy_(torch.randn(len(self.known), WIDTH, generator=dice))
        self.scorer = DraftScorer(self.head, tuple(self.head.parameters()))

    @property
    def scores(self) -> Tensor:
        """Float32 [steps, B, T, D]."""
        with torch.no_grad():
            scores: Tensor = self.head(self.hidden)
        return scores

    def measure(self, objective: Objective) -> TrainingOutput:
        states = TargetStates(torch.zeros(B, T, 0, V), self.goal)
        head: Any = Identity()
        targets = TargetRows.build(self.batch, states, head, self.vocabulary)
        drafts = []
        for depth in range(STEPS):
            positions = targets.positions(depth)
            drafts.append(DraftStates(positions, self.hidden[depth][positions.mask]))
        return measure(drafts, self.scorer, self.batch, targets, objective)


def expected(world: World, objective: Objective) -> tuple[float, dict[str, tuple[float, float]]]:
    """The loss by loops, and (sum, count) of each metric."""
    loss = 0.0
    metrics: dict[str, tuple[float, float]] = {}
    agreed: dict[tuple[int, int, int], bool] = {}
    stays: dict[tuple[int, int, int], float] = {}
    for depth, weight in enumerate(objective.weights):
        total, count, accepted, overlap, started = 0.0, 0, 0.0, 0.0, 0
        for b in range(B):
            for p in range(T):
                a = p + 2 + depth  # the place of the token that is drafted
                counted = depth == 0 or (b, p, depth - 1) in agreed
                if a >= T or not world.batch.loss_mask[b, a]:
                    continue
                goal, score = world.goal[b, a - 1], world.scores[depth, b, p]
                legal = world.legal[b, a]
                q = score.masked_fill(~legal[world.known], -torch.inf).softmax(0).nan_to_num(0)
                full = goal.masked_fill(~legal, -torch.inf).softmax(0)
                if not objective.masked:
                    total += divergence(goal[world.known].softmax(0), score.softmax(0))
                    count += 1
                elif legal[world.known].any():
                    p_known = full[world.known]
                    total += divergence(p_known / p_known.sum(), q)
                    count += 1
                if counted:
                    started += 1
                    is_same = bool(q.any()) and world.known[int(q.argmax())] == int(full.argmax())
                    before = depth == 0 or agreed[b, p, depth - 1]
                    agreed[b, p, depth] = is_same and before
                    accepted += agreed[b, p, depth]
                    share = float(full[world.known].minimum(q).sum())
                    stays[b, p, depth] = share * (1 if depth == 0 else stays[b, p, depth - 1])
                    overlap += stays[b, p, depth]
        loss += weight * total / max(count, 1)
        metrics[f"loss_{depth}"] = (total, count)
        metrics[f"accept_{depth}"] = (accepted, started)
        metrics[f"overlap_{depth}"] = (overlap, started)
    return loss, metrics


def divergence(p: Tensor, q: Tensor) -> float:
    parts = [a * (a / b).log() for a, b in zip(p, q, strict=True) if a > 0]
    return float(sum(parts))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("masks", ["none", "metrics", "loss"])
@pytest.mark.parametrize("size", SIZES)
def test_against_loops(
    monkeypatch: pytest.MonkeyPatch, *, reduced: bool, masks: str, size: int
) -> None:
    monkeypatch.setattr(CHUNK, size)
    world = World(reduced=reduced, masked=masks != "none")
    objective = Objective.parse(steps=STEPS, decay=0.5, loss="kl", masked=masks == "loss")
    output = world.measure(objective)
    loss, metrics = expected(world, objective)
    assert output.loss.item() == pytest.approx(loss, rel=1e-4)
    assert output.metrics.keys() == metrics.keys()
    for name, (total, count) in metrics.items():
        found = output.metrics[name]
        assert (found.total.item(), found.count.item()) == pytest.approx((total, count), rel=1e-4)
    assert any(count > 0 for _, count in metrics.values())


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", [*LOSSES, "kl=0.7,total_variation=0.3"])
@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_is_that_of_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch, *, reduced: bool, masked: bool, loss: str, size: int
) -> None:
    monkeypatch.setattr(CHUNK, size)
    world = World(reduced=reduced, masked=masked)
    objective = Objective.parse(steps=STEPS, decay=0.5, loss=loss, masked=masked)
    world.hidden.requires_grad_()
    leaves = (world.hidden, world.head.weight)
    found = world.measure(objective)
    with torch.no_grad():
        assert world.measure(objective).loss == found.loss
    wanted = at_once(world, objective)
    torch.testing.assert_close(found.loss, wanted, rtol=1e-6, atol=1e-6)
    pairs = zip(
        torch.autograd.grad(3 * found.loss, leaves),
        torch.autograd.grad(3 * wanted, leaves),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def at_once(world: World, objective: Objective) -> Tensor:
    """The loss by ordinary autograd, with the scores of all rows in memory."""
    loss = torch.zeros(())
    token = torch.full((V,), -1)
    token[world.known] = torch.arange(len(world.known))
    for depth, weight in enumerate(objective.weights):
        after = world.batch.loss_mask[:, 2 + depth :]
        draft = world.head(world.hidden[depth, :, : T - 2 - depth][after])
        goal = world.goal[:, 1 + depth : T - 1][after][:, world.known]
        legal = world.legal[:, 2 + depth :][after][:, world.known]
        if objective.masked:
            draft, goal = forbid(draft, legal), forbid(goal, legal)
        keep = legal.any(-1) if objective.masked else torch.ones(len(legal), dtype=torch.bool)
        rows = LossRows(draft, goal, token[world.batch.token_ids[:, 2 + depth :][after]])
        loss = loss + weight * objective.loss(rows)[keep].mean()
    return loss


def test_output_is_the_likeliest_legal_token() -> None:
    world = World(reduced=True, masked=True)
    objective = Objective.parse(steps=STEPS, decay=1.0, loss="kl", masked=True)
    output = world.measure(objective).output
    assert output.shape == (STEPS, B, T)
    for depth in range(STEPS):
        for b in range(B):
            for p in range(T):
                a = p + 2 + depth
                if a >= T or not world.batch.loss_mask[b, a]:
                    assert output[depth, b, p] == -1
                elif world.legal[b, a][world.known].any():
                    assert world.legal[b, a, output[depth, b, p]]


def test_a_depth_of_weight_zero_is_measured_only() -> None:
    world = World(reduced=False, masked=False)
    objective = Objective.parse(steps=STEPS, decay=1.0, loss="kl", masked=False)
    first = Objective((1.0, 0.0, 0.0), objective.loss, masked=False)
    output, whole = world.measure(first), world.measure(objective)
    assert output.loss.item() == pytest.approx(
        (whole.metrics["loss_0"].total / whole.metrics["loss_0"].count).item()
    )
    assert "loss_1" not in output.metrics
    assert output.metrics["accept_2"] == whole.metrics["accept_2"]


def test_nothing_to_train_is_no_loss() -> None:
    world = World(reduced=False, masked=False)
    world.batch.loss_mask.zero_()
    objective = Objective.parse(steps=STEPS, decay=1.0, loss="kl", masked=False)
    assert world.measure(objective).loss.item() == 0


@pytest.mark.parametrize("changes", [{"steps": 0}, {"decay": 0.0}, {"decay": 1.5}, {"loss": "x"}])
def test_bad_objectives(changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"steps": 3, "decay": 1.0, "loss": "kl", "masked": True} | changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Objective.parse(**settings)
