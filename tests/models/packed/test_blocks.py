"""Tables of blocks against a plain account of who has which, and of what every block holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from guided_spec.errors import ModelError
from guided_spec.models.packed.blocks import BLOCK, Blocks, KeptShape, WholeSlots
from tests.tiers import examples

CPU = torch.device("cpu")
NUM_SLOTS, COLUMNS = 3, 5
LENGTH = COLUMNS * BLOCK - 7  # positions of a slot; the last block is not a whole one
SALTS = [None, "a"]


class Node:
    """A block that is known by its text: its tokens behind those of the node before it."""

    def __init__(self, block: int) -> None:
        self.block = block


class Text:
    """What a slot holds. nodes: of its leading blocks that are known, or were."""

    def __init__(self, salt: str | None = None, token_ids: Sequence[int] = ()) -> None:
        self.salt = salt
        self.token_ids = list(token_ids)
        self.table: list[int] = []
        self.nodes: list[Node] = []
        self.num_read = 0
        self.num_taken = 0

    def key(self, at: int, before: Sequence[Node]) -> tuple[object, ...]:
        """What block ``at`` is known by."""
        return (before[at - 1] if at else self.salt, *self.token_ids[at * BLOCK : (at + 1) * BLOCK])


class Account:
    """A plain model of ``Blocks``."""

    def __init__(self, num_blocks: int, lag: int) -> None:
        self.num_blocks, self.lag = num_blocks, lag
        self.texts = [Text() for _ in range(NUM_SLOTS)]
        self.known: dict[tuple[object, ...], Node] = {}
        self.read: set[int] = set()
        self.idle: list[int] = []  # known blocks that nobody has, the least recently used first

    def holders(self) -> Counter[int]:
        return Counter(block for text in self.texts for block in text.table)

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self.holders())

    def release(self, slot: int) -> None:
        text, self.texts[slot] = self.texts[slot], Text()
        left, known = self.holders(), {node.block for node in self.known.values()}
        # The end of a text is forgotten before its beginning.
        self.idle += [b for b in reversed(text.table) if b in known and not left[b]]

    def longest(self, text: Text) -> list[Node]:
        """The whole blocks of a text's beginning that are known, and whose memory is filled."""
        found: list[Node] = []
        for at in range(len(text.token_ids) // BLOCK):
            node = self.known.get(text.key(at, found))
            if node is None or (self.lag and node.block not in self.read):
                break
            found.append(node)
        return found[:-1] if self.lag else found

    def start(self, slot: int, text: Text) -> int:
        self.release(slot)
        text.nodes = self.longest(text)
        text.table = [node.block for node in text.nodes]
        self.idle = [block for block in self.idle if block not in text.table]
        text.num_read, text.num_taken = len(text.table), len(text.table) * BLOCK
        self.texts[slot] = text
        return text.num_taken

    def took(self, block: int) -> None:
        """A text grew into a block: nobody had it, and what it held is forgotten."""
        unused = self.num_blocks - len(self.holders()) - len(self.idle)
        if block in self.idle:
            assert unused == 0, "a block that is known went before one that holds nothing"
            assert self.idle.pop(0) == block, "not the least recently used"
        else:
            assert unused > 0
        self.known = {key: node for key, node in self.known.items() if node.block != block}
        self.read.discard(block)


words = st.lists(st.integers(0, 1), min_size=1, max_size=COLUMNS)


def spell(word: Sequence[int], more: int) -> list[int]:
    """Tokens of whole blocks that are alike, and some behind them: few texts begin otherwise."""
    return [1000 * at + letter for at, letter in enumerate(word) for _ in range(BLOCK)] + [7] * more


slots = st.integers(0, NUM_SLOTS - 1)


class BlocksMachine(RuleBasedStateMachine):
    """Slots that start, grow, are remembered, shared and released, in any order."""

    lag, num_blocks = 0, 7

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(NUM_SLOTS, LENGTH, CPU, self.num_blocks)
        self.memory = [self.blocks.allocate(KeptShape(1, 2, 2), torch.empty(0), lag=self.lag)]
        self.account = Account(self.blocks.num_blocks, self.lag)
        self.written = 0.0

    def table(self, slot: int) -> list[int]:
        return self.blocks._slots[slot].blocks

    @rule(slot=slots, word=words, more=st.integers(0, BLOCK - 8), salt=st.sampled_from(SALTS))
    def start(self, slot: int, word: list[int], more: int, salt: str | None) -> None:
        text = Text(salt, spell(word, more)[:LENGTH])
        found = self.blocks.start(slot, text.token_ids, salt).taken
        assert found == self.account.start(slot, text) == self.blocks.num_taken(slot)

    @rule(slot=slots, share=st.floats(0, 1.2))
    def grow(self, slot: int, share: float) -> None:
        """Also behind the last position, which needs no block."""
        text = self.account.texts[slot]
        length = int(share * LENGTH)
        missing = -(-min(length, LENGTH) // BLOCK) - len(text.table)
        fits = missing <= self.account.num_free
        assert self.blocks.grow(slot, length) == fits
        if fits:
            for block in self.table(slot)[len(text.table) :]:
                self.account.took(block)
                text.table.append(block)
                for buffer in self.memory[0]:
                    self.written += 1
                    buffer[block] = self.written

    @rule(some=st.lists(slots, unique=True), data=st.data())
    def holds(self, some: list[int], data: st.DataObject) -> None:
        """Exactly where none of the slots would have to grow."""
        sizes = [len(self.account.texts[slot].table) * BLOCK for slot in some]
        ends = [data.draw(st.integers(0, size + 1)) for size in sizes]
        expected = all(min(end, LENGTH) <= size for end, size in zip(ends, sizes, strict=True))
        assert self.blocks.holds(some, np.array(ends, dtype=np.int64)) == expected

    @rule(slot=slots, share=st.floats(0, 1))
    def remember(self, slot: int, share: float) -> None:
        text = self.account.texts[slot]
        length = int(share * min(len(text.token_ids), len(text.table) * BLOCK))
        self.blocks.remember(slot, text.token_ids, length)
        for at in range(len(text.nodes), length // BLOCK):
            key, node = text.key(at, text.nodes), Node(text.table[at])
            text.nodes.append(self.account.known.setdefault(key, node))

    @rule(slot=slots, share=st.floats(0, 1))
    def mark_read(self, slot: int, share: float) -> None:
        text = self.account.texts[slot]
        count = int(share * len(text.table))
        self.blocks.mark_read(slot, count * BLOCK + BLOCK // 2 * (count < len(text.table)))
        if count > text.num_read:
            self.account.read.update(text.table[text.num_read : count])
            text.num_read = count

    @rule(source=slots, slot=slots, share=st.floats(0, 1))
    def share(self, source: int, slot: int, share: float) -> None:
        """The whole blocks are the same ones, and the one in which it ends is a copy."""
        other, length = self.account.texts[source], 0
        length = int(share * min(len(other.table) * BLOCK, LENGTH))
        if source == slot:
            return
        self.account.release(slot)
        whole, has_end = divmod(length, BLOCK)
        text = self.account.texts[slot] = Text(other.salt, other.token_ids[:length])
        text.table = other.table[:whole]
        text.nodes, text.num_read = other.nodes[:whole], min(other.num_read, whole)
        text.num_taken = min(other.num_taken, whole * BLOCK)
        if has_end and self.account.num_free == 0:
            with pytest.raises(ModelError, match=f"slot {slot}: no block is free"):
                self.blocks.share(source, slot, length, self.memory)
            return
        self.blocks.share(source, slot, length, self.memory)
        if has_end:
            self.account.took(self.table(slot)[-1])
            text.table.append(self.table(slot)[-1])
            for buffer in self.memory[0]:
                assert torch.equal(buffer[text.table[-1]], buffer[other.table[whole]])

    @rule(some=st.lists(slots, unique=True))
    def release(self, some: list[int]) -> None:
        self.blocks.release(some)
        for slot in some:
            self.account.release(slot)

    @invariant()
    def every_slot_has_its_blocks(self) -> None:
        for slot, text in enumerate(self.account.texts):
            assert self.table(slot) == text.table
            assert self.blocks.num_taken(slot) == text.num_taken

    @invariant()
    def every_block_is_counted_once(self) -> None:
        held = self.account.holders()
        assert set(held) <= set(range(1, self.num_blocks + 1))
        assert [held[block] for block in range(self.num_blocks + 1)] == self.blocks._holders
        assert self.blocks.num_free == self.num_blocks - len(held)
        unused, idle = self.blocks._unused, self.blocks._idle
        assert sorted([*held, *unused, *idle]) == list(range(1, self.num_blocks + 1))
        assert list(idle) == self.account.idle

    @precondition(lambda self: self.blocks._changes)
    @rule()
    def upload(self) -> None:
        self.blocks.upload()
        expected = [[*text.table, *[0] * COLUMNS][:COLUMNS] for text in self.account.texts]
        assert self.blocks.tables.tolist() == expected


class LaggingMachine(BlocksMachine):
    """A draft head keeps its own memory by the same tables, a position behind."""

    lag = 1


class TightMachine(BlocksMachine):
    """Fewer blocks than one text may need."""

    num_blocks = 4


for machine in (BlocksMachine, LaggingMachine, TightMachine):
    machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30)
TestBlocks = BlocksMachine.TestCase
TestLaggingBlocks = LaggingMachine.TestCase
TestTightBlocks = TightMachine.TestCase


def filled(num_blocks: int | None = None, lag: int = 0) -> Blocks:
    """Blocks of two slots of four blocks each, the first of which holds and remembers a text."""
    blocks = Blocks(2, 4 * BLOCK, CPU, num_blocks)
    blocks.allocate(KeptShape(1, 2, 2), torch.empty(0), lag=lag)
    assert blocks.start(0, TEXT).taken == 0
    assert blocks.grow(0, len(TEXT))
    blocks.remember(0, TEXT, len(TEXT))
    return blocks


TEXT = [at // 5 for at in range(3 * BLOCK + 4)]


@pytest.mark.parametrize(
    ("text", "salt", "found"),
    [
        (TEXT, None, 3),
        (TEXT[: 3 * BLOCK], None, 3),
        (TEXT[: 3 * BLOCK - 1], None, 2),
        ([*TEXT[: 2 * BLOCK - 1], 99, *TEXT[2 * BLOCK :]], None, 1),
        ([99, *TEXT[1:]], None, 0),
        (TEXT[BLOCK:], None, 0),  # the same tokens elsewhere are another text
        (TEXT[: BLOCK - 1], None, 0),
        ([], None, 0),
        (TEXT, "", 0),
        (TEXT, "a", 0),
    ],
)
def test_a_text_takes_the_longest_prefix_that_is_known(
    text: list[int], salt: str | None, found: int
) -> None:
    blocks = filled()
    assert blocks.start(1, text, salt).taken == found * BLOCK
    blocks.upload()
    first, second = blocks.tables.tolist()
    assert second == [*first[:found], *[0] * (5 - found)]


def test_a_memory_that_lags_has_to_be_filled() -> None:
    """Its last block holds what depends on the text behind it."""
    blocks = filled(lag=1)
    assert blocks.start(1, TEXT).taken == 0
    blocks.mark_read(0, 3 * BLOCK - 1)
    assert blocks.start(1, TEXT).taken == BLOCK
    blocks.mark_read(0, 3 * BLOCK)
    assert blocks.start(1, TEXT).taken == 2 * BLOCK
    assert blocks.grow(1, 4 * BLOCK)  # and not the block that it was not given
    assert blocks.start(0, TEXT).taken == 2 * BLOCK


def test_the_least_recently_used_block_goes_first() -> None:
    """Of one text the last; a text that is used again is not the oldest any more."""
    blocks = filled(num_blocks=8)
    other = [-token for token in TEXT[: 3 * BLOCK]]
    other[0] = 5
    assert blocks.start(1, other).taken == 0
    assert blocks.grow(1, 3 * BLOCK)
    blocks.remember(1, other, 3 * BLOCK)
    blocks.release([1])
    blocks.release([0])  # 3 of each are known, 2 hold nothing
    assert blocks.start(0, other[:BLOCK]).taken == BLOCK
    blocks.release([0])  # now its first block is the newest
    assert blocks.grow(1, 4 * BLOCK)  # takes the 2 that hold nothing, and 2 of the others
    assert blocks.start(0, other).taken == BLOCK
    assert blocks.start(0, TEXT).taken == 3 * BLOCK
    assert not blocks.grow(1, 4 * BLOCK + 1) or len(blocks._slots[1].blocks) == 4


def test_blocks_in_use_are_never_taken() -> None:
    blocks = filled(num_blocks=5)
    assert blocks.start(1, TEXT).taken == 3 * BLOCK
    assert blocks.grow(1, 4 * BLOCK)
    assert blocks.num_free == 0
    blocks.release([0])
    assert blocks.num_free == 1
    assert blocks.start(0, TEXT).taken == 3 * BLOCK
    assert blocks.grow(0, 3 * BLOCK + 1)
    assert blocks.num_free == 0
    assert blocks.start(0, [1]).taken == 0
    assert blocks.grow(0, BLOCK)
    assert not blocks.grow(0, BLOCK + 1)


def test_no_more_blocks_than_the_slots_can_fill() -> None:
    assert Blocks(3, 2 * BLOCK, CPU).num_blocks == 9
    assert Blocks(3, 2 * BLOCK - 1, CPU, 100).num_blocks == 6
    blocks = Blocks(3, 2 * BLOCK - 1, CPU, 4)
    memory = blocks.allocate(KeptShape(2, 8, 8), torch.empty(0, dtype=torch.bfloat16))
    assert memory.keys.shape == memory.values.shape == (5, 2, BLOCK, 8)
    assert memory.keys.dtype == torch.bfloat16
    assert memory.keys.data_ptr() != memory.values.data_ptr()


def test_a_copy_is_of_the_blocks_that_differ() -> None:
    blocks = filled()
    memory = [blocks.allocate(KeptShape(1, 1, 1), torch.empty(0)) for _ in range(2)]
    for layer in memory:
        for buffer in layer:
            buffer.copy_(torch.randn(buffer.shape))
    before = [buffer.clone() for layer in memory for buffer in layer]
    assert blocks.start(1, TEXT[: 2 * BLOCK]).taken == 2 * BLOCK
    assert blocks.grow(1, 4 * BLOCK)
    blocks.copy_own(0, 1, 2 * BLOCK + 1, memory)
    blocks.upload()
    first, second = blocks.tables.tolist()
    for buffer, old in zip([one for layer in memory for one in layer], before, strict=True):
        expected = old.clone()
        expected[second[2]] = old[first[2]]
        assert torch.equal(buffer, expected)


def test_whole_slots_have_all_their_positions() -> None:
    whole = WholeSlots(4, 70, CPU)
    assert whole.tables.tolist() == [[0], [1], [2], [3]]
    assert whole.grow(3, 70)
    whole.upload()
    assert whole.tables.dtype == torch.int32
