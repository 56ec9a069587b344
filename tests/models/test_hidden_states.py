"""What a head pulls are the states at the positions after those that it has read."""

from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.models.hidden_states import HiddenStates

SLOTS, WIDTH, SIZE = 4, 3, 2
TOKENS = [*range(100, 130)]

forwards = st.lists(
    st.dictionaries(st.integers(0, SLOTS - 1), st.integers(1, WIDTH), min_size=1), max_size=5
)


@given(forwards, st.lists(st.integers(0, SLOTS - 1), unique=True), st.integers(0, 6))
def test_all_from_a_position_on(steps: list[dict[int, int]], slots: list[int], start: int) -> None:
    kept, every = HiddenStates(), torch.rand(SLOTS, len(TOKENS), SIZE)
    ends = dict.fromkeys(range(SLOTS), 0)
    for step in steps:
        hidden = torch.rand(len(step), WIDTH, SIZE)
        for row, (slot, count) in enumerate(step.items()):
            hidden[row, :count] = every[slot, ends[slot] : ends[slot] + count]
        starts = [ends[slot] for slot in step]
        kept.push_rows([*step], starts, [TOKENS] * len(step), [*step.values()], hidden)
        for slot, count in step.items():
            ends[slot] += count
    taken = kept.take(slots)
    assert set(taken) == {slot for slot in slots if ends[slot] > 0}
    for slot in slots:
        assert slot not in kept
        for _ in range(2):  # it stays there
            found = taken.pull(slot, start)
            assert (found is None) == (start >= ends[slot])
            if found is not None:
                assert found.token_ids == TOKENS[start + 1 : ends[slot] + 1]
                assert torch.equal(found.states, every[slot, start : ends[slot]])
    others = [slot for slot in range(SLOTS) if ends[slot] > 0 and slot not in slots]
    assert set(kept) == set(others)  # not touched


def test_nothing_before_the_first_position_or_across_a_gap() -> None:
    kept, states = HiddenStates(), torch.rand(2, SIZE)
    kept.push(0, 3, TOKENS, states)
    kept.push(0, 7, TOKENS, states)
    assert kept.pull(0, 2) is None
    assert kept.pull(1, 0) is None
    found = kept.pull(0, 4)
    assert found is not None
    assert torch.equal(found.states, states[1:])
    assert kept.pull(0, 5) is None
    assert kept.pull(0, 8) is not None


def test_no_further_than_the_tokens_of_the_text() -> None:
    """The text is not copied: the token after the last position may come later."""
    kept, states, text = HiddenStates(), torch.rand(3, SIZE), [1, 2]
    kept.push(0, 0, text, states)
    found = kept.pull(0, 0)
    assert found is not None
    assert (found.token_ids, len(found.states)) == ([2], 1)
    assert kept.pull(0, 1) is None
    text += [3, 4]
    found = kept.pull(0, 1)
    assert found is not None
    assert found.token_ids == [3, 4]
    assert torch.equal(found.states, states[1:])


def test_a_copy_goes_its_own_way() -> None:
    kept, hidden = HiddenStates(), torch.rand(1, WIDTH, SIZE)
    kept.push_rows([0], [0], [[1, 2, 3, 4]], [2], hidden)
    kept.copy(0, 1, [1, 2, 3, 9, 9, 9])
    kept.copy(2, 3, [])  # of nothing
    kept.push_rows([1], [2], [[1, 2, 3, 9, 9, 9]], [3], hidden)
    first, second = kept.pull(0, 0), kept.pull(1, 0)
    assert first is not None
    assert second is not None
    assert 3 not in kept
    assert (first.token_ids, second.token_ids) == ([2, 3], [2, 3, 9, 9, 9])
    assert torch.equal(first.states, hidden[0, :2])
    assert torch.equal(second.states, torch.cat([hidden[0, :2], hidden[0]]))


def test_what_was_taken_or_dropped_is_not_kept_alive() -> None:
    kept, hidden = HiddenStates(), torch.rand(3, WIDTH, SIZE)
    kept.push_rows([0, 1, 2], [0] * 3, [TOKENS] * 3, [1] * 3, hidden)
    alive = weakref.ref(hidden)
    del hidden
    kept.drop([2, 3])
    taken = kept.take([0, 1])
    assert alive() is not None
    del taken
    gc.collect()
    assert alive() is None
