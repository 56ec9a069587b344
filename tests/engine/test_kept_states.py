"""Hidden states that are cut out when they are asked for are those cut out at once."""

from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.engine.target.states import KeptStates

SLOTS, WIDTH, SIZE = 4, 3, 2

forwards = st.lists(
    st.dictionaries(st.integers(0, SLOTS - 1), st.integers(1, WIDTH), min_size=1), max_size=5
)


@given(forwards, st.lists(st.integers(0, SLOTS - 1), unique=True))
def test_all_that_was_added_since_the_last_time(
    counts: list[dict[int, int]], slots: list[int]
) -> None:
    kept, cut = KeptStates(), dict[int, list[Tensor]]()
    for step in counts:
        hidden = torch.rand(len(step), WIDTH, SIZE)
        kept.add(list(step), list(step.values()), hidden)
        for row, (slot, count) in enumerate(step.items()):
            cut.setdefault(slot, []).append(hidden[row, :count])
    taken = kept.take(slots)
    expected = [torch.cat(cut[slot]) if slot in cut else None for slot in slots]
    assert len(taken) == len(slots)
    for found in (list(taken), [taken[at] for at in range(len(slots))], list(taken[:])):
        for one, wanted in zip(found, expected, strict=True):
            assert (one is None) == (wanted is None)
            assert one is None or wanted is None or torch.equal(one, wanted)
    assert list(kept.take(slots)) == [None] * len(slots)
    others = [slot for slot in cut if slot not in slots]
    assert all(one is not None for one in kept.take(others))  # not touched


def test_a_copy_goes_its_own_way() -> None:
    kept, hidden = KeptStates(), torch.rand(1, WIDTH, SIZE)
    kept.add([0], [2], hidden)
    kept.copy(0, 1)
    kept.copy(2, 3)  # of nothing
    kept.add([1], [3], hidden)
    first, second, third = kept.take([0, 1, 3])
    assert first is not None
    assert second is not None
    assert third is None
    assert torch.equal(first, hidden[0, :2])
    assert torch.equal(second, torch.cat([hidden[0, :2], hidden[0]]))


def test_what_was_taken_is_not_kept_alive() -> None:
    kept, hidden = KeptStates(), torch.rand(2, WIDTH, SIZE)
    kept.add([0, 1], [1, 1], hidden)
    alive = weakref.ref(hidden)
    del hidden
    taken = kept.take([0, 1])
    assert alive() is not None
    del taken
    gc.collect()
    assert alive() is None
