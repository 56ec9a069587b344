"""A block head over slots: it reads verified tokens, and drafts by one forward.

``BlockRunner`` keeps the outputs of each slot's block, and goes along it. Who reads the text, and
computes a block behind it, is a ``BlockReader``: ``ContextReader`` for heads that see the target's
hidden states as keys and values, over the target's tables, and ``MaskedReader`` for P-EAGLE, whose
equations are in ``guided_spec.models.heads.eagle3``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.heads.block.candidates import Block, Transition
from guided_spec.models.heads.block.model import BlockContext, BlockHead
from guided_spec.models.heads.draft_head import MASK
from guided_spec.models.heads.eagle3 import Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.packed.blocks import BLOCK, Blocks
from guided_spec.models.packed.packed_lm import Rows, split_places
from guided_spec.ops.host import host_integers
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces, store_keys_values

__all__ = ["BlockReader", "BlockRunner", "ContextReader", "MaskedReader"]


class BlockReader(Protocol):
    """Reads verified tokens, and computes the places behind them; see ``HeadRunner``.

    max_length: tokens of a text. width: tokens of a whole block. size: H, of its outputs.
    transition: how a place depends on the one before; None: it does not.
    """

    @property
    def max_length(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transition(self) -> Transition | None: ...
    def length(self, slot: int) -> int: ...
    def release(self, slots: Sequence[int]) -> None: ...
    def adopt(self, slot: int) -> None: ...
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None: ...
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None: ...
    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the places behind ``last``, int64 [R]; nothing is kept."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each place by itself."""
        ...


class BlockRunner:
    """A ``HeadRunner`` whose drafts are blocks.

    width: tokens of a draft at most; there are no more than the reader's. Behind the block's last
    place every logit is -inf: a draft is no longer than that.
    """

    @torch.inference_mode()
    def __init__(
        self,
        reader: BlockReader,
        num_slots: int,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._reader, self._device = reader, device
        self.max_length = reader.max_length
        self.width = min(width, reader.width)
        self._depths, self._marks, self._last = ([0] * num_slots for _ in range(3))
        # Of each slot's block, where it has been computed since the last read.
        columns = max(self.width, 1)
        self._outputs = torch.zeros(num_slots, columns, reader.size, device=device, dtype=dtype)
        self._is_drafted = [False] * num_slots
        # The last verified token, and the draft behind it, where a place depends on it.
        self._trail = torch.zeros(num_slots, columns + 1, device=device, dtype=torch.int64)

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._reader.length(slot)

    def depth(self, slot: int) -> int:
        """Draft tokens behind the verified ones."""
        return self._depths[slot]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        self._reader.release(slots)
        for slot in slots:
            self._begin_draft(slot)

    def adopt(self, slot: int) -> None:
        """Where nothing was read into the slot: it holds what its blocks hold of another text."""
        self._reader.adopt(slot)

    def mark(self, slots: Sequence[int]) -> None:
        """Remember where the slots' drafts stand, for ``rewind``; ``read`` does so too."""
        for slot in slots:
            self._marks[slot] = self._depths[slot]

    def rewind(self, slots: Sequence[int]) -> None:
        """Take the slots' drafts back to their marks."""
        for slot in slots:
            self._depths[slot] = self._marks[slot]

    @torch.inference_mode()
    def append(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Append one draft token, int64 [R], to each slot's draft; the block stays the same."""
        for slot in slots:
            self._depths[slot] += 1
        if self._reader.transition is not None:
            places = [min(self._depths[slot], self.width) for slot in slots]
            index, place = host_integers([[*slots], places]).to(self._device, non_blocking=True)
            self._trail[index, place] = token_ids

    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens; see ``SlotHead.read``."""
        self._reader.read(slots, tokens, states)
        for slot, row in zip(slots, tokens, strict=True):
            self._last[slot] = row[-1]
            self._begin_draft(slot)

    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """See ``SlotHead.copy_slot``."""
        self._reader.copy_slot(source, destinations)
        for slot in destinations:
            self._last[slot] = self._last[source]
            self._begin_draft(slot)

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> Tensor:
        """[R, D]: the scores of the token that follows each slot's draft."""
        self._draft_missing(slots)
        depths = [self._depths[slot] for slot in slots]
        most = max(self.width - 1, 0)
        places = host_integers([[*slots], [min(depth, most) for depth in depths]])
        slot, place = places.to(self._device, non_blocking=True)
        outputs = self._outputs[slot, place]
        scores = self._reader.logits(outputs)
        if (transition := self._reader.transition) is not None:
            scores = transition.step(scores, outputs, self._trail[slot, place])
        if max(depths) >= self.width:
            is_behind = torch.tensor([depth >= self.width for depth in depths])
            is_behind = is_behind.to(self._device, non_blocking=True)
            scores = scores.masked_fill(is_behind.unsqueeze(1), -torch.inf)
        return scores

    @property
    def transition(self) -> Transition | None:
        """How a place depends on the one before it; None: it does not."""
        return self._reader.transition

    @torch.inference_mode()
    def block(self, slots: Sequence[int]) -> Block:
        """All places behind each slot's verified tokens, W = ``width``."""
        self._draft_missing(slots)
        index = host_integers([*slots]).to(self._device, non_blocking=True)
        outputs = self._outputs[index, : self.width]
        return Block(self._reader.logits(outputs), outputs, self._trail[index, 0])

    def _begin_draft(self, slot: int) -> None:
        self._depths[slot] = self._marks[slot] = 0
        self._is_drafted[slot] = False

    def _draft_missing(self, slots: Sequence[int]) -> None:
        missing = [slot for slot in slots if not self._is_drafted[slot]]
        if not missing or not self.width:
            return
        rows = host_integers([missing, [self._last[slot] for slot in missing]])
        index, last = rows.to(self._device, non_blocking=True)
        self._outputs[index] = self._reader.draft(missing, last, self.width)
        self._trail[index, 0] = last
        for slot in missing:
            self._is_drafted[slot] = True


class _Line(NamedTuple):
    """Positions of texts, one behind another: which, and the states [N, X] there."""

    rows: Rows
    states: Tensor


class ContextReader:
    """A ``BlockReader``. blocks: the target's tables, by which the head keeps its own keys and
    values; None: tables of its own.

    What it keeps of a position depends on the target's hidden states there and on nothing else.
    """

    @torch.inference_mode()
    def __init__(
        self,
        head: BlockHead,
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
    ) -> None:
        self.head, self.max_length = head, limits.max_length
        self.width, self.size = head.layout.width, head.hidden_size
        self._piece, self._device, self._dtype = limits.piece, device, dtype
        self.blocks = blocks or Blocks.full(limits.num_slots, limits.max_length, device)
        config = head.config
        like = torch.empty(0, device=device, dtype=dtype)
        self._memory = tuple(
            # A position is read with its successor, as by heads that depend on it.
            self.blocks.allocate(config.num_key_value_heads, config.head_dim, like, lag=1)
            for _ in range(config.num_hidden_layers)
        )
        self._lengths = [0] * limits.num_slots

    @property
    def transition(self) -> Transition | None:
        """The head's."""
        return self.head.transition

    def length(self, slot: int) -> int:
        """See ``HeadRunner``."""
        return self._lengths[slot]

    def release(self, slots: Sequence[int]) -> None:
        """See ``HeadRunner``."""
        for slot in slots:
            self._lengths[slot] = 0

    def adopt(self, slot: int) -> None:
        """See ``HeadRunner``."""
        if self._lengths[slot] == 0:
            self._lengths[slot] = self.blocks.num_taken(slot)

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """See ``HeadRunner``."""
        del tokens
        for line in self._lines(slots, states):
            self._read_line(line)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """See ``HeadRunner``."""
        length, count = self._lengths[source], len(destinations)
        Rows(destinations, [0] * count, [length] * count).grow(self.blocks)
        for slot in destinations:
            self.blocks.copy_own(source, slot, length, self._memory)
            self._lengths[slot] = length

    def logits(self, outputs: Tensor) -> Tensor:
        """See ``BlockReader``."""
        return self.head.logits(outputs)

    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """See ``BlockReader``."""
        self.blocks.upload()
        lengths = [self._lengths[slot] for slot in slots]
        index, length = host_integers([[*slots], lengths]).to(self._device, non_blocking=True)
        longest = max(lengths)
        tables = self.blocks.tables[index, : -(-longest // BLOCK)].long()
        held = torch.arange(longest, device=self._device) < length.unsqueeze(1)
        layers = [
            KeyValues(*(_gather(buffer, tables, held) for buffer in kept)) for kept in self._memory
        ]
        outputs: Tensor = self.head(last, width, BlockContext(layers, length))
        return outputs

    def _lines(self, slots: Sequence[int], states: Sequence[Tensor]) -> Iterator[_Line]:
        """The rows' new positions in lines of ``piece`` at most."""
        starts = [self._lengths[slot] for slot in slots]
        counts = [len(row) for row in states]
        done = [0] * len(slots)
        while any(have < count for have, count in zip(done, counts, strict=True)):
            left, cuts = self._piece, list[int]()
            for have, count in zip(done, counts, strict=True):
                cuts.append(min(left, count - have))
                left -= cuts[-1]
            begins = [start + have for start, have in zip(starts, done, strict=True)]
            parts = [
                row[have : have + cut] for row, have, cut in zip(states, done, cuts, strict=True)
            ]
            yield _Line(Rows(slots, begins, cuts), torch.cat(parts))
            done = [have + cut for have, cut in zip(done, cuts, strict=True)]

    def _read_line(self, line: _Line) -> None:
        rows, count = line.rows, len(line.states)
        rows.grow(self.blocks)
        found = torch.from_numpy(rows.places(count, len(rows.slots)))
        of_tokens, of_rows = split_places(found.to(self._device, non_blocking=True), count)
        places = SlotPlaces(of_tokens, of_rows, self.blocks.tables, self.blocks.max_length)
        features = self.head.features(line.states.to(self._device, self._dtype))
        for new, kept in zip(self.head.context(features, of_tokens[1]), self._memory, strict=True):
            store_keys_values(new, kept, places)
        for slot, cut in zip(rows.slots, rows.counts, strict=True):
            self._lengths[slot] += cut
            self.blocks.mark_read(slot, self._lengths[slot])


def _gather(buffer: Tensor, tables: Tensor, held: Tensor) -> Tensor:
    """[R, Hkv, L, D]: the positions ``held``, bool [R, L], of rows of blocks, int64 [R, P].

    Zeros elsewhere: there may be anything, even what is no number.
    """
    found = buffer[tables].transpose(1, 2).flatten(2, 3)[:, :, : held.shape[1]]
    return found.masked_fill(~held[:, None, :, None], 0)


class MaskedReader:
    """A ``BlockReader``: masks behind the last verified position, all by one forward.

    width: tokens of a draft at most.

    Raises ModelError for an EAGLE-3 head that has nothing to put at the places behind a text.
    """

    transition = None

    def __init__(
        self,
        head: Eagle3Head,
        limits: SlotLimits,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if head.mask_hidden is None:
            raise ModelError(f"proposer='p_eagle': expected a head with a {MASK}, found none")
        self.head, self.width, self.size = head, width, head.hidden_size
        self._slots = SlotHead(head, limits, device=device, dtype=dtype)
        self.max_length = self._slots.max_length
        self.length, self.release = self._slots.length, self._slots.release
        self.adopt, self.read = self._slots.adopt, self._slots.read
        self.copy_slot = self._slots.copy_slot

    def logits(self, outputs: Tensor) -> Tensor:
        """See ``BlockReader``."""
        return self.head.logits(outputs)

    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """See ``BlockReader``; the last token has been read already."""
        head = self.head
        assert head.mask_hidden is not None
        assert head.layout.mask_token_id is not None
        masks = last.new_full((len(slots), width - 1), head.layout.mask_token_id)
        hidden = head.features(head.mask_hidden).expand(*masks.shape, -1)
        return self._slots.masked(slots, masks, hidden)
