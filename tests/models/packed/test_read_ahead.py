"""A packed head that reads tokens before the host knows how many of them count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.packed.graph_pool import CaptureWindow
from guided_spec.models.packed.heads import PackedEagle3
from guided_spec.models.packed.slot_head import PackedSlotHead, ReadAhead
from tests.models.heads.heads import write_eagle3
from tests.models.tiny import build

CPU = torch.device("cpu")
VOCAB = 64
SLOTS, PROMPTS, COUNTS, WIDTH = [2, 0, 3], (3, 7, 1), [1, 4, 2], 4


class Pair:
    """A stock head that is told each token, and a packed one; three slots hold prompts."""

    def __init__(self, folder: Path) -> None:
        target = build("llama")
        write_eagle3(folder, target)
        head = Eagle3Head.from_checkpoint(Checkpoint.open(folder), target)
        room = SlotLimits(4, 100)
        packed = PackedEagle3.of(head, room.max_length)
        assert packed is not None
        self.stock = SlotHead(head, room, device=CPU, dtype=torch.float32)
        self.window = CaptureWindow()
        where: Any = {"device": CPU, "dtype": torch.float32, "window": self.window}
        self.packed = PackedSlotHead(packed, room, **where)
        self.source = torch.Generator().manual_seed(0)
        tokens = [self.tokens(count) for count in PROMPTS]
        states = [self.states(count) for count in PROMPTS]
        for one in (self.stock, self.packed):
            one.read(SLOTS, tokens, states)

    def tokens(self, count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=self.source).tolist()

    def states(self, *shape: int) -> Tensor:
        return torch.randn(*shape, 3 * 32, generator=self.source)

    def check(self) -> None:
        """Both heads think the same of what comes next, and of what comes behind a draft token."""
        for token in (None, torch.randint(VOCAB, (3,), generator=self.source)):
            if token is not None:
                self.stock.append(SLOTS, token)
                self.packed.append(SLOTS, token)
            found, expected = self.packed.logits(SLOTS), self.stock.logits(SLOTS)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def padded(tokens: list[list[int]]) -> Tensor:
    return torch.tensor([[*row, *[-1] * (WIDTH - len(row))] for row in tokens])


# How many tokens a row has at most: as many as the rows are wide, or fewer, and those that count.
@pytest.mark.parametrize("most", [[WIDTH] * 3, [3, 4, 2], COUNTS])
def test_what_is_confirmed_was_read(pair: Pair, most: list[int]) -> None:
    for _ in range(2):
        tokens, states = [pair.tokens(count) for count in COUNTS], pair.states(3, WIDTH)
        pair.stock.read(SLOTS, tokens, [row[:n] for row, n in zip(states, COUNTS, strict=True)])
        pair.packed.append(SLOTS, torch.tensor([1, 2, 3]))  # a draft, to be forgotten
        pair.packed.read_ahead(
            ReadAhead(SLOTS, padded(tokens), states, torch.tensor(COUNTS) - 1, most)
        )
        for slot, count in zip(SLOTS, COUNTS, strict=True):
            pair.packed.commit(slot, count)
        assert [pair.packed.length(s) for s in SLOTS] == [pair.stock.length(s) for s in SLOTS]
        assert [pair.packed.depth(s) for s in SLOTS] == [0, 0, 0]
        pair.check()


def test_what_is_not_confirmed_leaves_no_trace(pair: Pair) -> None:
    wrong = torch.tensor([pair.tokens(WIDTH) for _ in SLOTS])
    last = torch.tensor([3, 3, 3])
    pair.packed.read_ahead(ReadAhead(SLOTS, wrong, pair.states(3, WIDTH), last, [WIDTH] * 3))
    tokens = [pair.tokens(count) for count in COUNTS]
    states = [pair.states(count) for count in COUNTS]
    for head in (pair.stock, pair.packed):
        head.read(SLOTS, tokens, states)
    pair.check()


def test_one_of_several_is_confirmed(pair: Pair) -> None:
    tokens, states = [pair.tokens(count) for count in COUNTS], pair.states(3, WIDTH)
    last = torch.tensor(COUNTS) - 1
    pair.packed.read_ahead(ReadAhead(SLOTS, padded(tokens), states, last, [WIDTH] * 3))
    pair.packed.commit(0, 4)
    pair.stock.read([0], [tokens[1]], [states[1]])
    others, more = [pair.tokens(2), pair.tokens(3)], [pair.states(2), pair.states(3)]
    for head in (pair.stock, pair.packed):
        head.read([2, 3], others, more)
    pair.check()


def test_no_further_than_a_slot_and_a_graph_reach(pair: Pair) -> None:
    assert pair.packed.can_read_ahead(SLOTS, [4, 93, 4])
    assert not pair.packed.can_read_ahead(SLOTS, [4, 94, 4])  # 7 of 100 are there
    pair.packed.read([0], [pair.tokens(90)], [pair.states(90)])  # 97 of 100
    assert pair.packed.can_read_ahead(SLOTS, [4, 3, 4])
    assert not pair.packed.can_read_ahead(SLOTS, [4, 4, 4])
    pair.window.largest = 11
    assert pair.packed.can_read_ahead(SLOTS, [4, 3, 4])
    assert not pair.packed.can_read_ahead(SLOTS, [5, 3, 4])
