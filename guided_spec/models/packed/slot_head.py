"""Packed heads over KV slots: what they keep of texts, and the steps of one layer or more as CUDA
graphs.

What is kept are keys and values of verified positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.heads.slot_head import HeadRunner, SlotLimits
from guided_spec.models.packed.blocks import Blocks, KeptShape, index_over
from guided_spec.models.packed.draft_forward import DraftForward, Pick
from guided_spec.models.packed.graph_pool import (
    ROW_SIZES,
    CaptureWindow,
    GraphPool,
    Inputs,
    bucket,
    pack_index,
    pad_rows,
    pad_to,
    row_sizes,
)
from guided_spec.models.packed.packed_lm import LineShape, Rows, split_index
from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex
from guided_spec.ops.host import host_integers, to_device


class HeadLine(NamedTuple):
    """Positions of texts, concatenated. rows: where they go. cuts: of which of the texts each row
    is, and of which of its new positions."""

    rows: Rows
    cuts: Sequence[tuple[int, slice]]

    def of(self, states: Sequence[Tensor]) -> Tensor:
        """[N, X]: these positions of the texts' new states [n, X]."""
        return torch.cat([states[row][cut] for row, cut in self.cuts])


class ReadAhead(NamedTuple):
    """Verified tokens of R texts; the host does not know yet how many each of them has.

    token_ids: int64 [R, T] on the device. states: [R, T, X] of these tokens. last: int64 [R], in
    [0, T), where each row ends; later entries are arbitrary. counts: [R] tokens of a row at most.
    """

    slots: Sequence[int]
    token_ids: Tensor
    states: Tensor
    last: Tensor
    counts: Sequence[int]

    def rows(self, slots: HeadSlots) -> Rows:
        """The slots and positions that the tokens are written to."""
        return Rows(self.slots, slots.lengths(self.slots), self.counts)


class AheadRunner(HeadRunner, Protocol):
    """A ``HeadRunner`` whose forwards are graphs: it reads what the host does not know yet.

    sources: whose outputs ``logits`` returns, where they lie; None: they are no graph's.
    """

    @property
    def sources(self) -> GraphPool | None: ...
    def draft_forward(self, longest: int) -> DraftForward | None:
        """What computes drafts of ``longest`` tokens in one graph, if anything does."""
        ...

    def capture(self) -> Iterator[None]:
        """Capture the graphs of reading and of single steps, one at each ``next``."""
        ...

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens of each slot can be read before the host knows them."""
        ...

    def read_ahead(self, new: ReadAhead) -> None:
        """A slot holds them once ``commit`` says how many they were.

        Otherwise it is as before, but for the draft, which is forgotten.
        """
        ...

    def commit(self, slot: int, count: int) -> None:
        """The slot holds ``count`` of the tokens that were read ahead."""
        ...


class HeadSlots:
    """The memory of a head's layers, and how much of each slot's text it holds.

    kept: by each of the head's layers. blocks: the target's, by whose tables the head keeps its
    own keys and values: a text that takes a prefix of another one takes both. None: tables of its
    own.

    memory: the layers' blocks.
    """

    @torch.inference_mode()
    def __init__(
        self,
        kept: Sequence[KeptShape],
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
    ) -> None:
        self.max_length, self._piece = limits.max_length, limits.piece
        self.blocks = blocks or Blocks.full(limits.num_slots, limits.max_length, device)
        like = torch.empty(0, device=device, dtype=dtype)
        # A position is read with its successor.
        self.memory = tuple(self.blocks.allocate(one, like, lag=1) for one in kept)
        self._lengths = [0] * limits.num_slots

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._lengths[slot]

    def lengths(self, slots: Sequence[int]) -> list[int]:
        """[R] the ``length`` of each slot."""
        return [self._lengths[slot] for slot in slots]

    def starts(self, slots: Sequence[int], count: int) -> list[int]:
        """``lengths``; each slot then has blocks for so many positions more."""
        starts = self.lengths(slots)
        Rows(slots, starts, [count] * len(slots)).grow(self.blocks)
        return starts

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self._lengths[slot] = 0

    def adopt(self, slot: int) -> None:
        """Where nothing was read into the slot: it holds what its blocks hold of another text."""
        if self._lengths[slot] == 0:
            self._lengths[slot] = self.blocks.num_taken(slot)

    def commit(self, slot: int, count: int) -> None:
        """So many positions more are in the slot's memory."""
        self._lengths[slot] += count
        self.blocks.mark_read(slot, self._lengths[slot])

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """Copy the text of ``source`` to the other slots; see ``SlotHead.copy_slot``."""
        length, count = self._lengths[source], len(destinations)
        Rows(destinations, [0] * count, [length] * count).grow(self.blocks)
        for slot in destinations:
            self.blocks.copy_own(source, slot, length, self.memory)
            self._lengths[slot] = length

    def fit(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens fit each slot."""
        pairs = zip(self.lengths(slots), counts, strict=True)
        return max(length + count for length, count in pairs) <= self.max_length

    def lines(self, slots: Sequence[int], counts: Sequence[int]) -> Iterator[HeadLine]:
        """``counts`` new positions in lines of at most ``piece``, each committed afterwards."""
        done = [0] * len(slots)
        while any(have < count for have, count in zip(done, counts, strict=True)):
            left, cuts = self._piece, list[tuple[int, slice]]()
            for row, (have, count) in enumerate(zip(done, counts, strict=True)):
                done[row] = have + min(left, count - have)
                left -= done[row] - have
                if done[row] > have:
                    cuts.append((row, slice(have, done[row])))
            of = [slots[row] for row, _ in cuts]
            sizes = [cut.stop - cut.start for _, cut in cuts]
            yield HeadLine(Rows(of, self.lengths(of), sizes), cuts)
            for slot, size in zip(of, sizes, strict=True):
                self.commit(slot, size)


class PackedHead(Protocol):
    """What a head computes, up to rounding, in few kernels; see ``packed.heads``.

    head: on one device, with plain weights, which become views of packed ones. width: of the states
    that it reads. kept: by each of its layers.
    """

    @property
    def head(self) -> DraftHead: ...
    @property
    def width(self) -> int: ...
    @property
    def kept(self) -> Sequence[KeptShape]: ...
    def forward(
        self, token_ids: Tensor, hidden: Tensor, index: SlotIndex, memory: Sequence[KeyValues]
    ) -> Tensor:
        """One pass: tokens int64 [N] and hidden states [N, H] to the recycled [N, H].

        memory: the layers' blocks.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., D]."""
        ...


class PackedSlotHead:
    """What ``SlotHead`` is, for heads in packed form.

    limits: how much it can hold. blocks: see ``HeadSlots``. window: in which CUDA graphs are
    captured; None never closes.

    slots: what it holds.
    """

    scores_at_once = False

    @torch.inference_mode()
    def __init__(
        self,
        packed: PackedHead,
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
        window: CaptureWindow | None = None,
    ) -> None:
        self._packed = packed
        self.num_slots, self.max_length = limits.num_slots, limits.max_length
        self._limits, self._device, self._dtype = limits, device, dtype
        self.slots = HeadSlots(packed.kept, limits, device=device, dtype=dtype, blocks=blocks)
        self.length, self.adopt = self.slots.length, self.slots.adopt
        self.graphs = self.sources = GraphPool(device, window, is_on_side_stream=True)
        self._depths, self._marks = ([0] * limits.num_slots for _ in range(2))
        width = packed.head.hidden_size
        # The last row is for the unused entries of a graph, whose slot is -1.
        self._hidden = torch.zeros(limits.num_slots + 1, width, device=device, dtype=dtype)
        self._marked = torch.zeros_like(self._hidden)
        self._indexed: tuple[tuple[int, ...], Tensor] | None = None  # the last slots, on the device
        # The slots where the graph stands that appends, and their logits [R, D].
        self._scored: tuple[tuple[int, ...], Tensor] | None = None

    def depth(self, slot: int) -> int:
        """Draft tokens after the verified ones."""
        return self._depths[slot]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        self.slots.release(slots)
        for slot in slots:
            self._depths[slot] = self._marks[slot] = 0

    @torch.inference_mode()
    def mark(self, slots: Sequence[int]) -> None:
        """Save the positions of the slots' drafts for ``rewind``; ``read`` does so too."""
        index = self._index(slots)
        self._marked.index_copy_(0, index, self._hidden[index])
        for slot in slots:
            self._marks[slot] = self._depths[slot]

    @torch.inference_mode()
    def rewind(self, slots: Sequence[int]) -> None:
        """Take the slots' drafts back to their marks."""
        slots = [slot for slot in slots if self._depths[slot] != self._marks[slot]]
        if not slots:
            return
        index = self._index(slots)
        self._hidden.index_copy_(0, index, self._marked[index])
        self._scored = None
        for slot in slots:
            self._depths[slot] = self._marks[slot]

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens; a draft made before is forgotten. See ``SlotHead.read``."""
        for line in self.slots.lines(slots, [len(row) for row in tokens]):
            fed = host_integers([one for row, cut in line.cuts for one in tokens[row][cut]])
            last = host_integers(line.rows.counts).cumsum(0) - 1
            self._read_rows(line.rows, fed, line.of(states), last)
        self._begin_draft(slots)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """Copy the text of ``source`` to the other slots; see ``SlotHead.copy_slot``."""
        self.slots.copy_slot(source, destinations)
        self._hidden[self._index(destinations)] = self._hidden[source].clone()
        self._scored = None
        self._begin_draft(destinations)

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens of each slot can be read before the host knows them."""
        return self.graphs.has(sum(counts)) and self.slots.fit(slots, counts)

    def commit(self, slot: int, count: int) -> None:
        """The slot holds ``count`` of the tokens that were read ahead; see ``AheadRunner``."""
        self.slots.commit(slot, count)

    @torch.inference_mode()
    def read_ahead(self, new: ReadAhead) -> None:
        """Read tokens that the host does not know yet; see ``AheadRunner``."""
        rows, count = new.rows(self.slots), len(new.counts)
        begins = np.cumsum(new.counts) - np.array(new.counts)
        placed = np.concatenate([rows.token_index(new.token_ids.shape[1]), begins])
        index, first = to_device(placed, self._device).split([len(placed) - count, count])
        fed = new.token_ids.clamp_min(0).flatten()[index], new.states.flatten(0, 1)[index]
        self._read_rows(rows, *fed, first + new.last)
        self._begin_draft(new.slots)

    @torch.inference_mode()
    def append(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Append one draft token, int64 [R] on the head's device, to each slot's draft."""
        size = bucket(len(slots), ROW_SIZES)
        self.slots.blocks.upload()  # the slots may have grown since anything was read
        inputs = {"token_ids": pad_rows(token_ids, size)}
        if self._scored is None or self._scored[0] != tuple(slots):
            inputs["hidden"] = pad_rows(self._hidden[self._index(slots)], size)
            inputs["index"] = pack_index((slots, self._ends(slots)), size)
        logits: Tensor = self.graphs.run(("append", size), inputs, self._append_one)
        self._scored = (tuple(slots), logits[: len(slots)])
        for slot in slots:
            self._depths[slot] += 1

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> Tensor:
        """[R, D]: the scores of the token that follows each slot's draft."""
        if self._scored is not None and self._scored[0] == tuple(slots):
            return self._scored[1]
        return self._packed.logits(self._hidden[self._index(slots)])

    def masked(self, slots: Tensor, token_ids: Tensor, hidden: Tensor, index: SlotIndex) -> Tensor:
        """``SlotHead.masked`` for a graph: the outputs [R, T + 1, H].

        slots: int64 [R] on the device, -1 for an unused row. index: of the R rows of T tokens.
        """
        first = self._hidden[slots].unsqueeze(1)
        if token_ids.shape[1] == 0:
            return first
        fed = token_ids.flatten(), hidden.flatten(0, 1)
        found = self._packed.forward(*fed, index, self.slots.memory)
        return torch.cat([first, found.view(*token_ids.shape, -1)], 1)

    def has_graph(self, size: int, count: int) -> bool:
        """True: a step has no more tokens than rows, and each number of rows has a graph."""
        del size, count
        return True

    def begin_draft(self, slots: Sequence[int], count: int) -> Sequence[int]:
        """[R]: where a draft begins in each slot; see ``DraftForward``."""
        del count
        self.slots.blocks.upload()  # the slots may have grown since anything was read
        return self._ends(slots)

    def draft(self, inputs: Inputs, count: int, pick: Pick) -> None:
        """Draft ``count`` tokens that ``pick`` picks, inside the graph; see ``DraftForward``."""
        slots, starts, _ = inputs["index"].unbind(0)
        hidden = self._hidden[slots]
        for depth in range(count):
            token_ids = pick(depth, self._packed.logits(hidden))
            if depth < count - 1:
                hidden = self._step(token_ids, hidden, slots, starts + depth)
        self._hidden[slots] = hidden

    def end_draft(self, slots: Sequence[int], count: int) -> None:
        """Append all but the last token to the slots' drafts; see ``DraftForward``."""
        self._scored = None
        for slot in slots:
            self._depths[slot] += count - 1

    def draft_forward(self, longest: int) -> DraftForward:
        """The head itself: it computes drafts of any length; see ``AheadRunner``."""
        del longest
        return self

    @torch.inference_mode()
    def capture(self) -> Iterator[None]:
        """Capture the graphs of reading and of single steps."""
        yield from self.capture_reads()
        head = self._packed.head
        for size in row_sizes(self.num_slots):
            index = pack_index([[], []], size)
            fed = {"hidden": self._hidden.new_zeros(size, head.hidden_size), "index": index}
            fed["token_ids"] = torch.zeros(size, dtype=torch.int64)
            self.graphs.prepare(("append", size), fed, self._append_one)
            yield

    @torch.inference_mode()
    def capture_reads(self) -> Iterator[None]:
        """Capture the graphs of reading."""
        for size in (*self.graphs.beyond, *reversed(self.graphs.sizes)):
            shape = LineShape.of(size, 0, self._capacity, self.graphs.sizes)
            inputs = {
                "token_ids": torch.zeros(size, dtype=torch.int64),
                "states": self._hidden.new_zeros(size, self._packed.width),
                "index": torch.from_numpy(Rows((), (), ()).packed_index(size, shape.num_rows)),
                "last": torch.zeros(shape.num_rows, dtype=torch.int64),
            }
            key = ("read", shape) if self.graphs.has(size) else None
            if self.graphs.prepare(key, inputs, partial(self._read, shape.width)):
                yield

    def _ends(self, slots: Sequence[int]) -> list[int]:
        """Where the next token of each slot's draft goes."""
        return [self.slots.length(slot) + self._depths[slot] for slot in slots]

    def _begin_draft(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._depths[slot] = 0
        self.mark(slots)

    def _read_rows(self, rows: Rows, token_ids: Tensor, states: Tensor, last: Tensor) -> None:
        """Tokens int64 [N] in one line, the states [N, X] before them, and where rows end, [R]."""
        rows.grow(self.slots.blocks)
        shape = LineShape.of(len(token_ids), len(rows.slots), self._capacity, self.graphs.sizes)
        inputs = {
            "token_ids": pad_to(token_ids, (shape.size,)),
            "states": pad_to(states, (shape.size, states.shape[1])),
            "index": torch.from_numpy(rows.packed_index(shape.size, shape.num_rows)),
            "last": pad_to(last, (shape.num_rows,)),
        }
        key = ("read", shape) if self.graphs.has(shape.size) else None
        self.graphs.run(key, inputs, partial(self._read, shape.width))
        self._scored = None

    @property
    def _capacity(self) -> tuple[int, int]:
        return self._limits.num_slots, self._limits.width

    def _read(self, width: int, inputs: Inputs) -> None:
        token_ids = inputs["token_ids"]
        tokens, rows = split_index(inputs["index"], len(token_ids))
        hidden = self._packed.head.features(inputs["states"].to(self._dtype))
        index = self._slot_index(tokens, rows, width)
        hidden = self._packed.forward(token_ids, hidden, index, self.slots.memory)
        self._hidden[rows[0]] = hidden[inputs["last"]]

    def _slot_index(self, tokens: Tensor, rows: Tensor, width: int) -> SlotIndex:
        return index_over(self.slots.blocks, tokens, rows, width)

    def _append_one(self, inputs: Inputs) -> Tensor:
        """One step's logits; the inputs are left as the next one needs them."""
        hidden, index = inputs["hidden"], inputs["index"]
        output = self._step(inputs["token_ids"], hidden, index[0], index[1])
        hidden.copy_(output)
        index[1] += 1
        self._hidden[index[0]] = output
        return self._packed.logits(output)

    def _step(self, token_ids: Tensor, hidden: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """One token a row, [R] each and hidden [R, H]."""
        ends = torch.arange(1, len(slots) + 1, device=slots.device)
        rows = torch.stack([slots, starts, ends])
        return self._packed.forward(
            token_ids, hidden, self._slot_index(rows[:2], rows, width=1), self.slots.memory
        )

    def _index(self, slots: Sequence[int]) -> Tensor:
        key = tuple(slots)
        if self._indexed is None or self._indexed[0] != key:
            self._indexed = (key, to_device(key, self._device))
        return self._indexed[1]
