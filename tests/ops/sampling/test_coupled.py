"""Coupled verification: the text is the target's own draws, whatever is drafted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.ops.sampling.verify import coupled_sample
from guided_spec.types import Draft, Noise
from tests.toys import chi_square_p_value

SIZE = 5


def make_noise(rows: int, num_draft: int, seed: int = 0) -> Noise:
    generator = torch.Generator().manual_seed(seed)
    sample = torch.empty(rows, num_draft + 1, SIZE).exponential_(generator=generator)
    return Noise(torch.zeros(rows, num_draft), sample.clamp_min(1e-30))


def make_target(rows: int, num_draft: int, seed: int = 0, share: float = 0.6) -> Tensor:
    """[rows, num_draft + 1, SIZE] with zeros where tokens are illegal, and some rows all zeros."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(rows, num_draft + 1, SIZE, generator=generator)
    legal = torch.rand(probs.shape, generator=generator) < share
    probs = probs * legal
    return probs / probs.sum(-1, keepdim=True).clamp_min(1e-30)


def plain(probs: Tensor, exponential: Tensor) -> int:
    """One draw, one token after the other; -1 where nothing is legal."""
    scores = (probs / exponential).tolist()
    best = max(range(SIZE), key=lambda token: scores[token])
    return best if scores[best] > 0 else -1


def expected_row(target: Tensor, draft: list[int], sample: Tensor) -> list[int]:
    """The plain draws up to the first that was not drafted, and -1 behind it."""
    found = []
    for depth in range(len(target)):
        found.append(plain(target[depth], sample[depth]))
        if depth >= len(draft) or found[-1] != draft[depth]:
            break
    return found + [-1] * (len(target) - len(found))


@given(data=st.data())
def test_it_emits_the_plain_draws(data: st.DataObject) -> None:
    """Any drafts, any lengths, dead rows, no draft at all."""
    rows, num_draft = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    seed, share = data.draw(st.integers(0, 999)), data.draw(st.sampled_from([0.2, 0.6, 1.0]))
    target, noise = make_target(rows, num_draft, seed, share), make_noise(rows, num_draft, seed)
    drafts, lengths = [], []
    for row in range(rows):
        draws = [plain(target[row, at], noise.sample[row, at]) for at in range(num_draft)]
        agreeing = data.draw(st.integers(0, num_draft))  # the tokens that are drafted right
        others = data.draw(st.lists(st.integers(0, SIZE - 1), min_size=4, max_size=4))
        drafts.append([max(token, 0) for token in draws[:agreeing]] + others[agreeing:num_draft])
        lengths.append(data.draw(st.integers(0, num_draft)))
    ids = torch.tensor(drafts, dtype=torch.int64).view(rows, num_draft)
    found = coupled_sample(target, Draft(ids, torch.tensor(lengths)), noise)
    for row, (draft, length) in enumerate(zip(drafts, lengths, strict=True)):
        expected = expected_row(target[row], draft[:length], noise.sample[row])
        assert found.token_ids[row].tolist() == expected
        emitted = [token for token in expected if token >= 0]
        assert all(target[row, at, token] > 0 for at, token in enumerate(emitted))
        kept = found.num_accepted[row].item()
        assert draft[: int(kept)] == expected[: int(kept)]
        assert kept <= length
    assert found.token_ids.dtype == found.num_accepted.dtype == torch.int64


def test_the_draft_does_not_change_the_text() -> None:
    """The tokens that two drafts let out agree as far as the shorter text goes."""
    target, noise = make_target(500, 3, share=1.0), make_noise(500, 3)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (500,), generator=generator)
    outcomes = []
    for _ in range(3):
        ids = torch.randint(0, SIZE, (500, 3), generator=generator)
        outcomes.append(coupled_sample(target, Draft(ids, lengths), noise).token_ids)
    for one in outcomes:
        both = (one >= 0) & (outcomes[0] >= 0)
        assert torch.equal(one[both], outcomes[0][both])


def test_dead_rows_give_minus_one() -> None:
    target = torch.zeros(3, 3, SIZE)
    target[1, 0, 2] = target[2, :2, 2] = 1.0
    draft = Draft(torch.full((3, 2), 2), torch.full((3,), 2))
    found = coupled_sample(target, draft, make_noise(3, 2))
    assert found.token_ids.tolist() == [[-1, -1, -1], [2, -1, -1], [2, 2, -1]]
    assert found.num_accepted.tolist() == [0, 1, 2]


def test_a_dead_row_accepts_no_draft() -> None:
    """Not even -1, which no proposer may draft, or the token that an argmax of zeros names."""
    draft = Draft(torch.tensor([[0], [-1]]), torch.tensor([1, 0]))
    found = coupled_sample(torch.zeros(2, 2, SIZE), draft, make_noise(2, 1))
    assert found.num_accepted.tolist() == [0, 0]
    assert found.token_ids.tolist() == [[-1, -1], [-1, -1]]


def test_padding_is_not_read() -> None:
    target = torch.zeros(1, 3, SIZE)
    target[..., 1] = 1.0
    found = coupled_sample(
        target, Draft(torch.tensor([[1, 1]]), torch.tensor([1])), make_noise(1, 2)
    )
    assert found.token_ids.tolist() == [[1, 1, -1]]
    assert found.num_accepted.tolist() == [1]


@pytest.mark.parametrize("extra", [0, 3])
def test_no_draft_draws_one_token(extra: int) -> None:
    """The noise may be there for more positions than are used."""
    target = torch.tensor([[[0.0, 0.2, 0.8, 0.0, 0.0]], [[0.0] * SIZE]])
    draft = Draft(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    sample = torch.ones(2, 1 + extra, SIZE)
    sample[:, 0, 2] = 9.0
    found = coupled_sample(target, draft, Noise(torch.zeros(2, extra), sample))
    assert found.token_ids.tolist() == [[1], [-1]]
    assert found.num_accepted.tolist() == [0, 0]


def test_no_illegal_token_is_kept_at_any_noise() -> None:
    target = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0]).expand(SIZE, 3, -1)
    tiny = torch.full((SIZE, 3, SIZE), 1.0)
    tiny[..., 1::2] = 1e-30  # an illegal token with all the luck there is
    draft = Draft(torch.arange(SIZE).view(-1, 1).expand(-1, 2), torch.full((SIZE,), 2))
    found = coupled_sample(target, draft, Noise(torch.zeros(SIZE, 2), tiny))
    emitted = found.token_ids[found.token_ids >= 0]
    assert bool(((emitted == 0) | (emitted == 2)).all())


def test_noise_of_one_row_serves_greedy_targets() -> None:
    """At temperature 0 every row is one-hot, and noise of shape [B, 1, 1] decides alike."""
    target = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3]]), SIZE).float()
    draft = Draft(torch.tensor([[1, 0]]), torch.tensor([2]))
    found = coupled_sample(target, draft, Noise(torch.zeros(1, 2), torch.ones(1, 1, 1)))
    assert found.token_ids.tolist() == [[1, 2, -1]]


def test_a_drafter_with_the_same_noise_agrees_as_often_as_is_promised() -> None:
    """At least (1 - d) / (1 + d), d being the total variation; always if the two are equal."""
    rows = 200_000
    target = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    drafter = torch.tensor([0.25, 0.25, 0.1, 0.1, 0.3])
    noise = make_noise(rows, 1)
    rates = []
    for probs in (target, drafter):
        ids = (probs / noise.sample[:, 0]).argmax(-1, keepdim=True)
        draft = Draft(ids, torch.ones(rows, dtype=torch.int64))
        found = coupled_sample(target.expand(rows, 2, -1), draft, noise)
        rates.append(found.num_accepted.float().mean().item())
        counts = torch.bincount(found.token_ids[:, 0], minlength=SIZE)
        assert chi_square_p_value(counts, target) > 1e-6
    distance = ((target - drafter).abs().sum() / 2).item()
    assert rates[0] == 1.0
    assert (1 - distance) / (1 + distance) < rates[1] < 1 - distance
