"""States wait by slot and in order, and are made when they are taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guided_spec.proposers.learned_head import UnreadStates


class Lazy(Sequence[Tensor | None]):
    """Counts how often a row is asked for."""

    def __init__(self, *rows: Tensor | None) -> None:
        self.rows, self.asked = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Tensor | None:  # type: ignore[override]
        self.asked += 1
        return self.rows[at]


def test_they_wait_and_are_made_once() -> None:
    one, other = Lazy(torch.ones(2, 3), None), Lazy(torch.zeros(1, 3))
    unread = UnreadStates()
    unread.add(4, one, 0, 2)
    unread.add(4, other, 0, 1)
    unread.add(7, one, 1, 1)
    assert [unread.count(slot) for slot in (4, 7, 1)] == [3, 1, 0]
    assert one.asked == other.asked == 0
    assert unread.take(4).tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert (one.asked, other.asked) == (1, 1)
    assert unread.count(4) == 0
    assert len(unread.take(4)) == 0
    assert len(unread.take(7)) == 0  # nobody kept them: fewer than were expected


def test_another_text_of_the_slot_finds_none() -> None:
    unread = UnreadStates()
    unread.add(0, [torch.ones(5, 2)], 0, 5)
    unread.forget(0)
    assert unread.count(0) == 0
    unread.forget(0)
