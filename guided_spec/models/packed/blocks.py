"""The blocks that hold keys and values, which slot has which, and which prefixes they hold.

A slot has a table of blocks, and takes another one when its text grows into it. Blocks of one text
may stand in many tables: a text that begins as another did takes that one's blocks, as far as whole
blocks agree ("prefix cache", as in vLLM and in SGLang's RadixAttention, arXiv:2312.07104). Every
memory that is kept by the same table, a target's layers and a draft head's, is shared with it.

Blocks in no table keep what they hold until they are needed; the least recently used goes
first. Kwon et al., "Efficient memory management for large language model serving with
PagedAttention" (2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.ops.attention.slot_attention import (
    NONE_AHEAD,
    Ahead,
    KeyValues,
    SharedPositions,
    SlotIndex,
)
from guided_spec.ops.host import to_device, zeros_on_demand
from guided_spec.ops.side_stream import SideStream

BLOCK = 64  # positions, as many as attention reads at a time: a tile is never in two
SINK = 0  # the block that takes what belongs nowhere

Key = tuple[Hashable, tuple[int, ...]]


class Prefix(NamedTuple):
    """How a text begins, as far as blocks hold it; both are multiples of ``BLOCK``.

    taken: positions that the text's slot holds now. known: those that are held for other texts, of
    which the last may have to be read again, because a memory lags.
    """

    taken: int
    known: int


class KeptShape(NamedTuple):
    """What a layer keeps of a token: ``heads`` keys of so many numbers, and as many values."""

    heads: int
    key_size: int
    value_size: int

    @classmethod
    def of_layers(cls, config: Any) -> tuple[KeptShape, ...]:
        """[L]: what layers of a configuration like llama's keep."""
        kept = cls(config.num_key_value_heads, config.head_dim, config.head_dim)
        count: int = config.num_hidden_layers
        return (kept,) * count


class SharedPrefix(NamedTuple):
    """Slots that hold their first ``length`` positions in the same whole blocks."""

    slots: tuple[int, ...]
    length: int

    @property
    def num_saved(self) -> int:
        """Positions that are not read again if they are read once for all of the slots."""
        return (len(self.slots) - 1) * self.length


class Tables(Protocol):
    """What a forward needs of the block tables of its tokens; see ``Blocks``."""

    max_length: int
    tables: Tensor
    axes: SlotAxes | None

    def holds(self, slots: Sequence[int], ends: NDArray[np.int64]) -> bool: ...
    def grow(self, slot: int, length: int) -> bool: ...
    def shared_prefixes(self, slots: Iterable[int]) -> tuple[SharedPrefix, ...]: ...
    def upload(self) -> None: ...


def index_over(  # noqa: PLR0913 - as of ``SlotIndex``
    tables: Tables,
    tokens: Tensor,
    rows: Tensor,
    width: int | None = None,
    *,
    shared: SharedPositions | None = None,
    fits: bool = False,
    ahead: Ahead = NONE_AHEAD,
) -> SlotIndex:
    """A ``SlotIndex`` of texts in these tables."""
    axes = None if tables.axes is None else tables.axes.positions
    where = tokens, rows, tables.tables, tables.max_length, width
    return SlotIndex(*where, shared=shared, fits=fits, axes=axes, ahead=ahead)


class WholeSlots:
    """Tables of buffers in which each slot is one block, [num_slots, heads, max_length + 1, D]."""

    def __init__(
        self, num_slots: int, max_length: int, device: torch.device, axes: SlotAxes | None = None
    ) -> None:
        self.max_length, self.axes = max_length, axes
        self.tables = torch.arange(num_slots, dtype=torch.int32, device=device).unsqueeze(1)

    def holds(self, slots: Sequence[int], ends: NDArray[np.int64]) -> bool:
        """True: every slot has all its positions, as for ``grow``."""
        del slots, ends
        return True

    def grow(self, slot: int, length: int) -> bool:
        """True: every slot has all its positions."""
        del slot, length
        return True

    def shared_prefixes(self, slots: Iterable[int]) -> tuple[SharedPrefix, ...]:
        """No slot has a block of another one."""
        del slots
        return ()

    def upload(self) -> None:
        """The tables never change."""


@dataclass(slots=True)
class _Slot:
    """One slot's table.

    blocks: in the order of the text. chain: of the leading blocks that are known by their text, the
    serial number of each. salt: whose prefixes it shares. num_taken: positions that ``start``
    found. num_read: leading blocks whose every memory is filled.
    """

    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    salt: Hashable = None
    num_taken: int = 0
    num_read: int = 0


class Blocks:
    """Tables of blocks for the texts in ``num_slots`` slots.

    max_length: positions of a text. num_blocks: of ``BLOCK`` positions each; None: as many as all
    slots can fill. device: of the tables.

    tables: int32 [num_slots, P] on the device, see ``SlotIndex``; up to date after ``upload``.
    axes: positions of the texts in the slots, where these have three axes.
    side: the stream on which they are always written: else an older change might come last. Users
        of memory that goes by them may run there.
    lag: positions at the end of a prefix that some memory holds for the text that went on from it.
    """

    def __init__(
        self, num_slots: int, max_length: int, device: torch.device, num_blocks: int | None = None
    ) -> None:
        self.max_length = max_length
        self.axes: SlotAxes | None = None
        self.lag = 0
        self._columns = max_length // BLOCK + 1
        most = num_slots * self._columns
        self.num_blocks = most if num_blocks is None else min(num_blocks, most)
        self.tables = torch.zeros(num_slots, self._columns, dtype=torch.int32, device=device)
        self.side = SideStream(device)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._capacity = np.zeros(num_slots, dtype=np.int64)  # positions that each has blocks for
        self._unused = list(range(self.num_blocks, 0, -1))
        self._holders = [0] * (self.num_blocks + 1)  # slots whose table has the block
        self._keys: dict[int, Key] = {}  # of the blocks that are known by their text
        self._known: dict[Key, tuple[int, int]] = {}  # their block, and serial number
        # Known and unused, the least recently used first. No LRUCache: any may be taken back, and
        # none is forgotten but where its block is needed. A dict would search for its first one
        # past all that were taken out.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._read: set[int] = set()  # blocks that a memory that lags has been filled for
        self._serial = 0
        self._changes: dict[tuple[int, int], int] = {}
        self._shared: tuple[frozenset[int], tuple[SharedPrefix, ...]] | None = (
            None  # of the last ``shared_prefixes``
        )

    @classmethod
    def full(cls, num_slots: int, max_length: int, device: torch.device) -> Blocks:
        """Tables in which every slot keeps blocks for all its positions."""
        blocks = cls(num_slots, max_length, device)
        for slot in range(num_slots):
            blocks.grow(slot, max_length)
        return blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._unused) + len(self._idle)

    def allocate(self, kept: KeptShape, like: Tensor, *, lag: int = 0) -> KeyValues:
        """Memory that these tables keep: [num_blocks + 1, heads, BLOCK, size] each, zeros.

        like: of its dtype and device. lag: how many of a position's successors what is kept for it
            depends on.
        """
        self.lag = max(self.lag, lag)
        heads, *sizes = kept
        shape = (self.num_blocks + 1, heads, BLOCK)
        return KeyValues(*(zeros_on_demand(like, (*shape, size)) for size in sizes))

    def num_taken(self, slot: int) -> int:
        """Positions that ``start`` found for the slot's text."""
        return self._slots[slot].num_taken

    def holds(self, slots: Sequence[int], ends: NDArray[np.int64]) -> bool:
        """Whether each slot has blocks for its first so many positions, int64 [B], already.

        Asked about all slots of a step at once, most of whose texts end inside of their last block.
        """
        found: np.bool_ = (np.minimum(ends, self.max_length) <= self._capacity[[*slots]]).all()
        return bool(found)

    def grow(self, slot: int, length: int) -> bool:
        """Give the slot blocks for its first ``length`` positions; False where too few are free.

        Positions beyond ``max_length`` need none.
        """
        table = self._slots[slot].blocks
        missing = -(-min(length, self.max_length) // BLOCK) - len(table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            self._append(slot, self._take())
        return True

    def release(self, slots: Iterable[int]) -> None:
        """Empty the slots; what is known by its text stays until its block is needed."""
        self._shared = None
        for slot in slots:
            blocks = self._slots[slot].blocks
            for block in reversed(blocks):  # so that the end of a text is forgotten before it
                self._drop(block)
            # What is fed after the next text's blocks must not find these.
            self._changes |= {(slot, at): SINK for at in range(len(blocks))}
            self._slots[slot] = _Slot()
            self._capacity[slot] = 0

    def start(self, slot: int, token_ids: Sequence[int], salt: Hashable = None) -> Prefix:
        """Empty the slot, and give it the blocks that hold how a text begins.

        token_ids: of the text that may be shared. salt: texts share with those of the same one.
        """
        self.release([slot])
        held = self._slots[slot]
        held.salt = salt
        found: list[tuple[int, int]] = []
        before: Hashable = ("", salt)
        for at in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            known = self._known.get((before, tuple(token_ids[at : at + BLOCK])))
            if known is None or (self.lag and known[0] not in self._read):
                break
            found.append(known)
            before = known[1]
        for block, serial in found[: len(found) - -(-self.lag // BLOCK)] if found else ():
            self._idle.pop(block, None)
            self._append(slot, block)
            held.chain.append(serial)
        held.num_read = len(held.blocks)
        held.num_taken = len(held.blocks) * BLOCK
        return Prefix(held.num_taken, len(found) * BLOCK)

    def remember(self, slot: int, token_ids: Sequence[int], length: int) -> None:
        """Others may take the slot's whole blocks of its first ``length`` positions.

        token_ids: of the text. What the blocks hold of them is final.
        """
        held = self._slots[slot]
        for at in range(len(held.chain) * BLOCK, length - BLOCK + 1, BLOCK):
            before: Hashable = held.chain[-1] if held.chain else ("", held.salt)
            key = (before, tuple(token_ids[at : at + BLOCK]))
            found = self._known.get(key)
            if found is None:
                self._serial += 1
                found = held.blocks[at // BLOCK], self._serial
                self._known[key] = found
                self._keys[found[0]] = key
            held.chain.append(found[1])

    def mark_read(self, slot: int, length: int) -> None:
        """The memory that lags holds the slot's first ``length`` positions."""
        held = self._slots[slot]
        if length // BLOCK > held.num_read:
            self._read.update(held.blocks[held.num_read : length // BLOCK])
            held.num_read = length // BLOCK

    def can_share(self, length: int) -> bool:
        """Whether there is a block for what an empty slot would not share of so many positions."""
        return length % BLOCK == 0 or self.num_free > 0

    def share(self, source: int, slot: int, length: int, memory: Iterable[KeyValues]) -> None:
        """Make ``slot`` hold the first ``length`` positions of ``source``.

        Whole blocks are shared, and the one in which it ends is copied in ``memory``. Raises
        ModelError where no block is free for it.
        """
        self.release([slot])
        held, other = self._slots[slot], self._slots[source]
        whole = length // BLOCK
        held.salt, held.chain = other.salt, other.chain[:whole]
        held.num_read = min(other.num_read, whole)
        held.num_taken = min(other.num_taken, whole * BLOCK)
        for block in other.blocks[:whole]:
            self._append(slot, block)
        if length % BLOCK and not self.grow(slot, length):
            raise ModelError(f"slot {slot}: no block is free for {length} positions")
        self.copy_own(source, slot, length, memory)

    def copy_own(self, source: int, slot: int, length: int, memory: Iterable[KeyValues]) -> None:
        """Copy the first ``length`` positions of ``source`` that ``slot`` has other blocks for."""
        columns = range(-(-length // BLOCK))
        pairs = [(self._slots[source].blocks[at], self._slots[slot].blocks[at]) for at in columns]
        for old, new in pairs:
            if old != new:
                for layer in memory:
                    for buffer in layer:
                        buffer[new].copy_(buffer[old])

    def shared_prefixes(self, slots: Iterable[int]) -> tuple[SharedPrefix, ...]:
        """Groups of the slots, each in one at most: first the one that saves most, and so on."""
        asked = frozenset(slots)
        if self._shared is None or self._shared[0] != asked:
            self._shared = asked, tuple(self._groups(asked))
        return self._shared[1]

    def _groups(self, slots: frozenset[int]) -> Iterator[SharedPrefix]:
        left = set(slots)
        while True:
            # A slot that has a block of another one has all before it, too.
            holders: dict[tuple[int, int], list[int]] = {}
            for slot in sorted(left):
                for at, block in enumerate(self._slots[slot].blocks, start=1):
                    if self._holders[block] > 1:
                        holders.setdefault((at, block), []).append(slot)
            found = [SharedPrefix(tuple(of), at * BLOCK) for (at, _), of in holders.items()]
            best = max(found, key=lambda group: group.num_saved, default=SharedPrefix((), 0))
            if len(best.slots) < 2:
                return
            yield best
            left -= set(best.slots)

    def upload(self) -> None:
        """Bring ``tables`` up to date; nothing waits for the device."""
        if not self._changes:
            return
        rows = [[*entry, block] for entry, block in self._changes.items()]
        self._changes.clear()
        self.side.after_current()  # work on the current stream reads them as they are
        with self.side.use():
            found = to_device(rows, self.tables.device)
            self.tables[found[:, 0], found[:, 1]] = found[:, 2].int()
        self.side.join()

    def _append(self, slot: int, block: int) -> None:
        table = self._slots[slot].blocks
        self._changes[slot, len(table)] = block
        table.append(block)
        self._capacity[slot] += BLOCK
        self._holders[block] += 1

    def _take(self) -> int:
        if self._unused:
            block = self._unused.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._known[self._keys.pop(block)]
        self._read.discard(block)
        return block

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._keys:
                self._idle[block] = None
            else:
                self._unused.append(block)
