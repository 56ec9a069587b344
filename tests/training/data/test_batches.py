"""The order of training: within the budget, fair to every rank, and the same again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.training.data.batches import TokenBatches, padded_length

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)
BUDGETS = st.integers(1, 600)
SEEDS = st.integers(0, 3)


def test_widths() -> None:
    assert [padded_length(length) for length in (1, 16, 17, 160)] == [16, 16, 32, 160]


@given(LENGTHS, BUDGETS, SEEDS, st.integers(0, 3), st.integers(1, 5))
def test_all_ranks_of_an_epoch(
    lengths: list[int], budget: int, seed: int, epoch: int, world: int
) -> None:
    ranks = []
    for rank in range(world):
        batches = TokenBatches(lengths, batch_tokens=budget, seed=seed, rank=rank, world=world)
        batches.set_epoch(epoch)
        ranks.append(list(batches))
        assert len(batches) == len(ranks[-1]) > 0
    alone = TokenBatches(lengths, batch_tokens=budget, seed=seed)
    alone.set_epoch(epoch)
    everything = list(alone)
    assert sorted(index for batch in everything for index in batch) == list(range(len(lengths)))
    for batch in everything:
        width = padded_length(max(lengths[index] for index in batch))
        assert len(batch) == 1 or len(batch) * width <= budget
    assert len({len(batches) for batches in ranks}) == 1
    taken = [tuple(batch) for batches in ranks for batch in batches]
    assert {*taken} <= {tuple(batch) for batch in everything}
    if len(everything) >= world:
        assert len({*taken}) == len(taken)
        assert len(everything) - len(taken) < world
    else:
        assert {*taken} == {tuple(batch) for batch in everything}


@given(LENGTHS, BUDGETS, SEEDS, st.data())
def test_resuming_is_skipping(
    lengths: list[int], budget: int, seed: int, data: st.DataObject
) -> None:
    batches = TokenBatches(lengths, batch_tokens=budget, seed=seed)
    batches.set_epoch(2)
    everything = list(batches)
    assert list(batches) == everything
    resumed = TokenBatches(lengths, batch_tokens=budget, seed=seed)
    resumed.set_epoch(2)
    count = data.draw(st.integers(0, len(everything)))
    for _ in range(2):  # not counted from where the last one led
        resumed.skip(count)
        assert list(resumed) == everything[count:]
        assert len(resumed) == len(everything) - count
    resumed.set_epoch(3)
    batches.set_epoch(3)
    assert resumed.epoch == 3
    assert list(resumed) == list(batches)


def test_epochs_and_seeds_differ() -> None:
    lengths = np.arange(1, 100)
    orders = []
    for seed in (0, 1):
        batches = TokenBatches(lengths, batch_tokens=512, seed=seed)
        for epoch in (0, 1):
            batches.set_epoch(epoch)
            orders.append(list(batches))
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_like_lengths_stand_together() -> None:
    """Hardly anything is padding, and the batches do not come in the order of their length."""
    lengths = np.random.default_rng(0).integers(1, 1000, 4000)
    batches = list(TokenBatches(lengths, batch_tokens=16_384, seed=0))
    padded = sum(len(batch) * padded_length(int(lengths[batch].max())) for batch in batches)
    assert lengths.sum() > 0.95 * padded
    assert len(batches) < 1.1 * lengths.sum() / 16_384
    longest = [int(lengths[batch].max()) for batch in batches]
    assert longest != sorted(longest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "at least one document"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"rank": 2, "world": 2}, "rank=2: .* world, which is 2"),
    ],
)
def test_errors(options: dict[str, int], message: str) -> None:
    arguments = {"lengths": [1], "batch_tokens": 16, "seed": 0, **options}
    with pytest.raises(ConfigError, match=message):
        TokenBatches(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="count=2: .* epoch's 1"):
        TokenBatches([1], batch_tokens=16, seed=0).skip(2)
