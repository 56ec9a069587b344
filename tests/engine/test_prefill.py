"""Which prompts are read together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guided_spec.engine.target.prompts import WORTH_A_FORWARD, group_prompts

LENGTHS = st.lists(st.integers(1, 400), max_size=40)


@given(lengths=LENGTHS, budget=st.integers(1, 5000))
def test_the_first_prompts_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = group_prompts(lengths, budget)
    members = sorted(at for group in groups for at in group.members)
    assert members == list(range(len(members)))
    assert bool(members) == bool(lengths)
    assert all(group.members == sorted(group.members) for group in groups)
    if len(members) > 1:
        assert sum(len(group.members) * group.width for group in groups) <= budget
    if len(members) < len(lengths):
        widest = max(lengths[: len(members) + 1])
        assert min(widest, budget) * (len(members) + 1) > budget


@given(lengths=LENGTHS)
def test_rows_are_about_as_long_as_each_other(lengths: list[int]) -> None:
    for members, width in group_prompts(lengths, 100_000):
        assert width == max(lengths[at] for at in members)
        assert sum(width - lengths[at] for at in members) <= WORTH_A_FORWARD


def test_prompts_of_one_length_share_a_forward() -> None:
    (group,) = group_prompts([7] * 50, 350)
    assert (group.members, group.width) == (list(range(50)), 7)


def test_a_long_prompt_is_cut_and_alone() -> None:
    assert group_prompts([900, 3], 100) == [([0], 100)]
    assert group_prompts([3, 900], 100) == [([0], 3)]
