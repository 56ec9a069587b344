"""Texts that begin in the same blocks: the groups that save the most, and how a kernel is told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.models.packed import packed_lm
from guided_spec.models.packed.blocks import BLOCK, Blocks, SharedPrefix
from guided_spec.models.packed.packed_lm import MOST_GROUPS, Rows, split_index
from tests.tiers import examples

NUM_SLOTS = 5
CPU = torch.device("cpu")
Texts = list[list[int]]  # of each slot, a number for each of its blocks
TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=NUM_SLOTS, max_size=NUM_SLOTS)


def tokens_of(text: Sequence[int]) -> list[int]:
    return [number for number in text for _ in range(BLOCK)]


def fill(texts: Texts) -> Blocks:
    """Slot by slot, each taking what the ones before it left; and one token of its own."""
    blocks = Blocks(NUM_SLOTS, 8 * BLOCK, CPU)
    for slot, text in enumerate(texts):
        tokens = tokens_of(text)
        blocks.start(slot, tokens)
        assert blocks.grow(slot, len(tokens) + 1)
        blocks.remember(slot, tokens, len(tokens))
    return blocks


def agreed(texts: Texts, slots: Sequence[int]) -> int:
    """Leading blocks in which all of these agree."""
    length = 0
    while all(length < len(texts[slot]) for slot in slots) and (
        len({texts[slot][length] for slot in slots}) == 1
    ):
        length += 1
    return length


@settings(max_examples=examples(60))
@given(TEXTS)
def test_the_groups_are_right_and_the_first_is_the_best(texts: Texts) -> None:
    found = fill(texts).shared_prefixes(range(NUM_SLOTS))
    left = set(range(NUM_SLOTS))
    for slots, length in found:
        assert len(slots) > 1
        assert 0 < length == agreed(texts, slots) * BLOCK
        subsets = (some for n in range(2, len(left) + 1) for some in combinations(left, n))
        most = max((len(some) - 1) * agreed(texts, some) for some in subsets)
        assert (len(slots) - 1) * length == most * BLOCK
        assert left >= set(slots)
        left -= set(slots)
    assert not any(agreed(texts, pair) for pair in combinations(left, 2))


def test_groups_follow_the_slots() -> None:
    blocks = fill([[1, 1], [1, 1], [1, 1], [0], [0]])
    assert blocks.shared_prefixes(range(NUM_SLOTS)) == (
        SharedPrefix((0, 1, 2), 2 * BLOCK),
        SharedPrefix((3, 4), BLOCK),
    )
    assert blocks.shared_prefixes([0, 2, 3]) == (SharedPrefix((0, 2), 2 * BLOCK),)
    blocks.release([2])
    assert blocks.shared_prefixes([0, 2, 3]) == ()
    blocks.start(2, tokens_of([0, 1]))
    assert blocks.shared_prefixes([0, 2, 3]) == (SharedPrefix((2, 3), BLOCK),)


def test_only_what_pays_and_stands_before_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = fill([[1] * 4, [1] * 4, [1] * 4, [], []])
    rows = Rows([0, 1, 2], [4 * BLOCK] * 3, [1] * 3)
    monkeypatch.setattr(packed_lm, "WORTH_SHARING", 8 * BLOCK)
    assert rows.shared_prefixes(blocks) == (SharedPrefix((0, 1, 2), 4 * BLOCK),)
    assert rows._replace(starts=[4 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK]).shared_prefixes(blocks) == ()
    monkeypatch.setattr(packed_lm, "WORTH_SHARING", 8 * BLOCK + 1)
    assert rows.shared_prefixes(blocks) == ()


@settings(max_examples=examples(60))
@given(TEXTS, st.data())
def test_what_a_kernel_is_told_is_true(texts: Texts, data: st.DataObject) -> None:
    """Every token of a group stands behind positions that its slot has in the group's blocks."""
    blocks = fill(texts)
    slots = data.draw(st.permutations(range(NUM_SLOTS)))
    slots = [*slots, data.draw(st.sampled_from(slots))]  # two pieces of one text
    starts = [data.draw(st.integers(0, len(texts[slot]) * BLOCK)) for slot in slots]
    rows = Rows(slots, starts, [data.draw(st.integers(0, 3)) for _ in slots])
    total, size = sum(rows.counts), sum(rows.counts) + data.draw(st.integers(0, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_lm, "WORTH_SHARING", 1)
        groups = rows.shared_prefixes(blocks)
    tokens, described = split_index(torch.from_numpy(rows.shared(size, groups)), size)
    order, places = tokens.tolist()
    assert sorted(order) == list(range(size))
    assert [order[place] for place in places] == list(range(size))
    holders, lengths, ends = described.tolist()
    assert len(ends) == MOST_GROUPS
    assert ends == sorted(ends)
    of_token = np.repeat(rows.slots, rows.counts)
    positions = np.repeat(rows.starts, rows.counts) + rows.steps()
    blocks.upload()
    first = 0
    for holder, length, end in zip(holders, lengths, ends, strict=True):
        for token in order[first:end]:
            assert token < total
            assert positions[token] >= length
            columns = length // BLOCK
            table = blocks.tables[of_token[token], :columns]
            assert torch.equal(table, blocks.tables[holder, :columns])
        first = end
