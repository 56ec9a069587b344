"""The lattice of candidates: published scores, and how a draft follows them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guided_spec.models.heads.block.lattice import (
    CandidateLattice,
    HeadEnds,
    Lattice,
    LatticeShape,
)
from guided_spec.models.heads.block.transitions import BlockPosition

WIDTH, VOCAB = 32, 16
SHAPE = LatticeShape(
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    mlp_ratio=2,
    candidate_topk=3,
    factor_dim=8,
    vector_eps=1e-4,
    logit_scale=8,
)
IDS = torch.tensor([[2, 5, 9], [6, 3, 1], [4, 7, 8]])
LOG_PROBS = torch.tensor([[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]])
# What ModelOpt computes for these parameters and inputs, as the tests of TensorRT-LLM have it.
FIRST = [-2.00565147, -2.00631571, -2.01010752]
PAIRS = [
    [
        [1.16437435, 1.16812551, 1.15701485],
        [1.16656375, 1.17030466, 1.15921211],
        [1.17068172, 1.17445230, 1.16334319],
    ],
    [
        [1.14806044, 1.14459574, 1.12698877],
        [1.14481199, 1.14134955, 1.12373281],
        [1.14475155, 1.14125943, 1.12357390],
    ],
]


@pytest.fixture
def lattice() -> CandidateLattice:
    embeddings = torch.linspace(-1.2, 1.3, VOCAB * WIDTH).view(VOCAB, WIDTH)
    ends = HeadEnds(lambda ids: embeddings[ids], lambda states: states)
    made = CandidateLattice(SHAPE, 4, WIDTH, 1e-5, ends).eval()
    for name, parameter in made.named_parameters():
        values = torch.arange(parameter.numel()).float().view(parameter.shape)
        parameter.data.copy_(torch.sin(values * 0.17 + sum(name.encode()) * 0.013) * 0.2)
    return made.requires_grad_(requires_grad=False)


def logits() -> Tensor:
    """[1, 3, VOCAB]: what is left of each position's probabilities, other tokens share."""
    left = (1 - LOG_PROBS.exp().sum(1, keepdim=True)) / (VOCAB - 3)
    return left.log().expand(-1, VOCAB).scatter(1, IDS, LOG_PROBS).unsqueeze(0)


def plan_of(lattice: CandidateLattice) -> Tensor:
    outputs = torch.linspace(-0.7, 0.9, 3 * WIDTH).view(1, 3, WIDTH)
    anchor = torch.linspace(-0.5, 0.4, WIDTH).unsqueeze(0)
    return lattice.plan(logits(), outputs, lattice.anchors(anchor))


def test_published_scores(lattice: CandidateLattice) -> None:
    plan = plan_of(lattice)
    assert plan.shape == (1, lattice.plan_size(3))
    ids, scores = Lattice.unpacked(plan, 3)
    assert torch.equal(ids[0], IDS)
    expected = torch.stack([torch.tensor(FIRST).expand(3, 3), *torch.tensor(PAIRS)])
    torch.testing.assert_close(scores[0], expected, atol=2e-5, rtol=2e-5)


def test_a_draft_follows_the_candidate_before(lattice: CandidateLattice) -> None:
    """Of several depths at once; after another token the position's own logits stay."""
    plan, own = plan_of(lattice), logits()[0]
    previous, depth = torch.tensor([11, 5, 3, 6, 2]), torch.tensor([0, 1, 2, 2, 2])
    hidden, state = torch.zeros(5, WIDTH), torch.zeros(5, 0)
    position = BlockPosition(hidden, previous, state, depth, plan.expand(5, -1))
    found = lattice.step(own[depth], position)
    rows = [FIRST, PAIRS[0][1], PAIRS[1][1], PAIRS[1][0]]
    for row, scores in enumerate(rows):
        expected = torch.full((VOCAB,), -torch.inf)
        expected[IDS[depth[row]]] = torch.tensor(scores)
        torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(found[4], own[2])


def test_a_block_of_one_position(lattice: CandidateLattice) -> None:
    plan = lattice.plan(logits()[:, :1], torch.zeros(1, 1, WIDTH), torch.ones(1, WIDTH))
    zero = torch.zeros(1, dtype=torch.int64)
    position = BlockPosition(torch.zeros(1, WIDTH), zero, torch.zeros(1, 0), zero, plan)
    found = lattice.step(logits()[:, 0], position)
    assert (found > -torch.inf).nonzero()[:, 1].tolist() == sorted(IDS[0].tolist())
