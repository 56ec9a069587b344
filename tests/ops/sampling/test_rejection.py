"""The law of the rejection sampler: what it emits is distributed as the target, for any draft."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask
from guided_spec.ops.sampling.rejection import rejection_sample
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import Draft, Noise, SamplingParams
from tests.toys import CPU, chi_square_p_value

ROWS = 400_000
SIZE = 4
DEPTHS = 3  # two draft tokens and one more
UNLIKELY = 1e-6


class Tables(NamedTuple):
    """[V**i, V] for i = 0, 1, 2: the distributions after each prefix of i tokens."""

    target: list[Tensor]
    draft: list[Tensor]


def tables(params: SamplingParams, *, mask_draft: bool) -> Tables:
    generator = torch.Generator().manual_seed(7)
    legal = [torch.rand(SIZE**i, SIZE, generator=generator) < 0.65 for i in range(DEPTHS)]
    for rows in legal:
        rows[torch.arange(len(rows)), torch.arange(len(rows)) % SIZE] = True

    def one(mask: Tensor, *, is_masked: bool) -> Tensor:
        logits = torch.randn(1, *mask.shape, generator=generator) * 1.5
        bitmask = pack_bitmask(mask).unsqueeze(0) if is_masked else None
        return warp(apply_token_bitmask(logits, bitmask), Sampling.stack([params], [0], CPU))[0]

    return Tables(
        [one(mask, is_masked=True) for mask in legal],
        [one(mask, is_masked=mask_draft) for mask in legal],
    )


def draw_noise(generator: torch.Generator, rows: int = ROWS) -> Noise:
    accept = torch.rand(rows, DEPTHS - 1, generator=generator)
    sample = torch.empty(rows, SIZE).exponential_(generator=generator)
    return Noise(accept, sample.clamp_min(1e-30))


def emit(known: Tables, kind: str) -> Tensor:
    """[ROWS, 3] tokens: what one call emits, and the target's own draws behind it."""
    generator = torch.Generator().manual_seed(11)
    prefix = torch.zeros(ROWS, dtype=torch.int64)
    tokens, proposed, target = [], [], [known.target[0][prefix]]
    for depth in range(DEPTHS - 1):
        probs = known.draft[depth][prefix]
        token = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        prefix = prefix * SIZE + token
        tokens.append(token)
        proposed.append(probs)
        target.append(known.target[depth + 1][prefix])
    lengths = torch.full((ROWS,), DEPTHS - 1)
    if kind == "shorter":
        lengths = torch.randint(0, DEPTHS, (ROWS,), generator=generator)
    if kind == "empty":
        lengths = torch.zeros(ROWS, dtype=torch.int64)
    sampled = None if kind == "one_hot" else torch.stack(proposed, 1)
    draft = Draft(torch.stack(tokens, 1), lengths, sampled)
    accepted = rejection_sample(torch.stack(target, 1), draft, draw_noise(generator))
    check_shape(accepted.token_ids, accepted.num_accepted, draft)
    return complete(accepted.token_ids, known.target, generator)


def check_shape(token_ids: Tensor, num_accepted: Tensor, draft: Draft) -> None:
    depth = torch.arange(token_ids.shape[1])
    assert bool((num_accepted <= draft.num_tokens).all())
    assert bool(((token_ids >= 0) == (depth <= num_accepted.unsqueeze(1))).all())
    kept = depth[:-1] < num_accepted.unsqueeze(1)
    assert torch.equal(token_ids[:, :-1][kept], draft.token_ids[kept])


def complete(token_ids: Tensor, target: list[Tensor], generator: torch.Generator) -> Tensor:
    prefix = torch.zeros(ROWS, dtype=torch.int64)
    for depth in range(DEPTHS):
        drawn = torch.multinomial(target[depth][prefix], 1, generator=generator).squeeze(1)
        token = torch.where(token_ids[:, depth] >= 0, token_ids[:, depth], drawn)
        prefix = prefix * SIZE + token
    return prefix


def joint(target: list[Tensor]) -> Tensor:
    """[V**3]: the probability of every three tokens."""
    law = torch.ones(1)
    for table in target:
        law = (law.unsqueeze(1) * table).flatten()
    return law


PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one_hot", "sampled", "unmasked", "shorter", "empty"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_law_is_the_targets(params: SamplingParams, kind: str) -> None:
    known = tables(params, mask_draft=kind != "unmasked")
    counts = torch.bincount(emit(known, kind), minlength=SIZE**DEPTHS)
    assert chi_square_p_value(counts, joint(known.target)) > UNLIKELY


def test_the_chi_square_sees_another_law() -> None:
    known = tables(PARAMS["plain"], mask_draft=True)
    counts = torch.bincount(emit(known, "sampled"), minlength=SIZE**DEPTHS)
    other = joint(known.target) * torch.linspace(0.9, 1.1, SIZE**DEPTHS)
    assert chi_square_p_value(counts, other) < UNLIKELY


@pytest.mark.parametrize("with_probs", [False, True])
def test_acceptance_rate_is_the_overlap(*, with_probs: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    target, proposed = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.1, 0.2])
    token = torch.multinomial(proposed.expand(ROWS, -1), 1, generator=generator)
    probs = proposed.expand(ROWS, 1, -1) if with_probs else None
    draft = Draft(token, torch.ones(ROWS, dtype=torch.int64), probs)
    found = rejection_sample(target.expand(ROWS, 2, -1), draft, draw_noise(generator))
    rate = torch.minimum(target, proposed).sum() if with_probs else (target * proposed).sum()
    assert abs(found.num_accepted.float().mean() - rate).item() < 0.004  # five deviations


@pytest.mark.parametrize("with_probs", [False, True])
def test_zero_noise_accepts_no_illegal_token(*, with_probs: bool) -> None:
    target = torch.tensor([0.5, 0.0, 0.5, 0.0]).expand(4, 3, -1)
    probs = torch.full((4, 2, SIZE), 0.25) if with_probs else None
    tokens = torch.tensor([[0, 1], [1, 0], [2, 0], [3, 3]])
    draft = Draft(tokens, torch.full((4,), 2), probs)
    noise = Noise(torch.zeros(4, 2), torch.ones(4, SIZE))
    found = rejection_sample(target, draft, noise)
    assert found.num_accepted.tolist() == [1, 0, 2, 0]
    emitted = found.token_ids[found.token_ids >= 0]
    assert bool((emitted % 2 == 0).all())


def test_acceptance_is_strict() -> None:
    target = torch.tensor([[[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]])
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[[0.5, 0.5, 0.0]]]))
    for u, expected in ((0.5, 0), (0.49999, 1)):
        found = rejection_sample(target, draft, Noise(torch.tensor([[u]]), torch.ones(1, 3)))
        assert found.num_accepted.tolist() == [expected]


def test_dead_ends_give_minus_one() -> None:
    target = torch.zeros(3, 3, SIZE)
    target[1, 0, 2] = target[2, :2, 2] = 1.0
    draft = Draft(torch.full((3, 2), 2), torch.full((3,), 2))
    found = rejection_sample(target, draft, draw_noise(torch.Generator().manual_seed(0), 3))
    assert found.token_ids.tolist() == [[-1, -1, -1], [2, -1, -1], [2, 2, -1]]
    assert found.num_accepted.tolist() == [0, 1, 2]


def test_padding_is_not_read() -> None:
    target = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 3, -1)
    draft = Draft(torch.tensor([[1, 1]]), torch.tensor([1]))
    found = rejection_sample(target, draft, Noise(torch.zeros(1, 2), torch.ones(1, SIZE)))
    assert found.token_ids.tolist() == [[1, 1, -1]]


def test_no_draft_draws_from_the_target() -> None:
    target = torch.tensor([[[0.0, 0.2, 0.8, 0.0]], [[0.0] * 4]])
    draft = Draft(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    noise = Noise(torch.zeros(2, 5), torch.tensor([[1.0, 1.0, 9.0, 1.0]] * 2))
    found = rejection_sample(target, draft, noise)
    assert found.token_ids.tolist() == [[1], [-1]]
    assert found.num_accepted.tolist() == [0, 0]


def test_equal_up_to_rounding_falls_back_to_the_target() -> None:
    probs = torch.tensor([0.6, 0.4, 0.0, 0.0])
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), (probs * 1.0000002).view(1, 1, -1))
    noise = Noise(torch.tensor([[1 - 2**-24]]), torch.ones(1, SIZE))
    found = rejection_sample(probs.expand(1, 2, -1), draft, noise)
    assert found.token_ids[0, 0].item() in (0, 1)
