"""Mask rows on their way to a CUDA device, while the host and the device are both busy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guided_spec.masks.rows import MaskRows
from tests.toys import row_writer

pytestmark = pytest.mark.gpu

REQUESTS, DEPTHS, VOCAB_SIZE = 16, 6, 151_936
WORDS = VOCAB_SIZE // 32
STEPS = 40


def new_rows() -> MaskRows:
    return MaskRows(REQUESTS, DEPTHS, VOCAB_SIZE, torch.device("cuda"))


def busy() -> None:
    """Keep the current stream occupied for some milliseconds; the host goes on."""
    torch.cuda._sleep(5_000_000)


def value(step: int, request: int, depth: int) -> int:
    return 1000 * step + 10 * request + depth


def test_many_steps_without_a_wait() -> None:
    rows, found = new_rows(), list[Tensor]()
    for step in range(STEPS):
        requests = 1 + (5 * step) % REQUESTS
        rows.clear(requests)
        busy()  # the forward; its reader of the masks comes behind it
        for request in range(requests):
            for depth in range(DEPTHS - request % 2):
                rows.fill(row_writer(value(step, request, depth)), request, depth)
        found.append(rows.first(requests, DEPTHS).sum(-1) // WORDS)
    for step, sums in enumerate(found):
        expected = [
            [value(step, r, d) if d < DEPTHS - r % 2 else -1 for d in range(DEPTHS)]
            for r in range(len(sums))
        ]
        assert sums.tolist() == expected


@pytest.mark.parametrize("is_even", [True, False])
def test_many_depths_without_a_wait(*, is_even: bool) -> None:
    rows, found = new_rows(), list[Tensor]()
    for step in range(STEPS):
        rows.clear(REQUESTS)
        for depth in range(DEPTHS - 1):
            at = [depth + (0 if is_even else r % 2) for r in range(REQUESTS)]
            for request, row in enumerate(at):
                rows.fill(row_writer(value(step, request, row)), request, row)
            busy()
            found.append(rows.at_depths([*at[:-1], at[-1] if is_even else None]).sum(-1) // WORDS)
    for index, sums in enumerate(found):
        step, depth = divmod(index, DEPTHS - 1)
        at = [depth + (0 if is_even else r % 2) for r in range(REQUESTS)]
        expected = [value(step, r, row) for r, row in enumerate(at)]
        if not is_even:
            expected[-1] = -1
        assert sums.tolist() == expected


def test_rows_stay_where_they_are() -> None:
    rows = new_rows()
    addresses = set()
    for step in range(4):
        rows.clear(3)
        rows.fill(row_writer(step), 0, 0)
        first, following = rows.first(3, 4), rows.at_depths([0, 0, None])
        assert first.is_contiguous()
        addresses.add((first.data_ptr(), following.data_ptr()))
    assert len(addresses) == 1


def test_a_graph_reads_the_rows_of_every_step() -> None:
    rows = new_rows()
    rows.clear(2)
    masks = rows.first(2, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = masks.sum(-1) // WORDS
    for step in range(4):
        rows.clear(2)
        for depth in range(3):
            rows.fill(row_writer(value(step, 1, depth)), 1, depth)
        rows.first(2, 3)
        graph.replay()
        assert sums.tolist() == [[-1] * 3, [value(step, 1, depth) for depth in range(3)]]
