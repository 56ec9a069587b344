"""Rows that are filled, and rows that only seem to be: a list of lists is the model."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.masks.rows import MaskRows
from tests.toys import CPU, row_writer

REQUESTS, DEPTHS, VOCAB_SIZE = 3, 4, 70  # three words a row


FILLS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 99)), max_size=8)
ASKED = st.lists(st.none() | st.integers(0, 3), min_size=3, max_size=3)
STEPS = st.lists(st.tuples(st.integers(1, 3), FILLS, ASKED), min_size=1, max_size=5)


@given(steps=STEPS)
def test_any_steps(steps: list[tuple[int, list[tuple[int, int, int]], list[int | None]]]) -> None:
    rows = MaskRows(REQUESTS, DEPTHS, VOCAB_SIZE, CPU)
    for requests, fills, asked in steps:
        rows.clear(requests)
        model = [[-1] * DEPTHS for _ in range(requests)]
        for request, depth, value in fills:
            if request < requests:
                rows.fill(row_writer(value), request, depth)
                model[request][depth] = value
        at_depths = rows.at_depths(asked[:requests])
        assert at_depths.shape == (requests, 3)
        expected = [-1 if at is None else model[b][at] for b, at in enumerate(asked[:requests])]
        assert at_depths.tolist() == [[value] * 3 for value in expected]
        for depths in range(1, DEPTHS + 1):
            first = rows.first(requests, depths)
            assert first.is_contiguous()
            assert first.tolist() == [[[value] * 3 for value in row[:depths]] for row in model]
        for request, row in enumerate(model):
            for depth, value in enumerate(row):
                assert rows.words(request, depth).tolist() == [value] * 3
                assert rows.allows(request, depth, 64) == bool(value & 1)
                assert not rows.allows(request, depth, 96)


def test_what_was_asked_for_outlives_the_next_fill() -> None:
    rows = MaskRows(2, 2, VOCAB_SIZE, CPU)
    rows.clear()
    rows.fill(row_writer(5), 0, 0)
    before = rows.at_depths([0, 0])
    rows.fill(row_writer(6), 1, 0)
    assert before[:, 0].tolist() == [5, -1]
    torch.testing.assert_close(rows.at_depths([0, 0])[:, 0], torch.tensor([5, 6]).int())
