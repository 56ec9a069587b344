"""A packed EAGLE-3 head over KV slots: its steps, and whole drafts, as CUDA graphs.

The forward of an EAGLE-3 head over KV slots, in few kernels; see ``packed.decoder``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from guided_spec.models.heads.eagle3 import Eagle3Head
from guided_spec.models.heads.slot_head import SlotLimits
from guided_spec.models.packed.blocks import Blocks
from guided_spec.models.packed.decoder import has_static_rope, has_whole_rope
from guided_spec.models.packed.graph_pool import (
    NOTHING,
    ROW_SIZES,
    SIZES,
    CaptureWindow,
    GraphPool,
    Inputs,
    bucket,
    pack_places,
    pad_rows,
    pad_to,
    upload,
)
from guided_spec.models.packed.layer import PackedLayer, rotation_table
from guided_spec.models.packed.packed_lm import (
    LARGEST_GRAPH,
    UNCAPTURED,
    LineShape,
    Rows,
    split_places,
)
from guided_spec.models.packed.whole_drafts import Picker
from guided_spec.ops.host import host_integers, to_device
from guided_spec.ops.pointwise import add_rms_norm, rms_norm
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces

__all__ = [
    "PackedEagle3",
    "PackedSlotHead",
]


class PackedEagle3:
    """What ``Eagle3Head`` computes, up to rounding; made by ``of``.

    head: on one device, with plain weights, which become views of packed ones.
    max_length: tokens of a text.
    """

    def __init__(self, head: Eagle3Head, max_length: int) -> None:
        self.head = head
        stock: list[Any] = list(head.layers)
        self._layers = [PackedLayer(layer.self_attn, layer.mlp) for layer in stock]
        self._stock = stock
        self._eps: float = head.norm.variance_epsilon
        weight: Tensor = head.norm.weight
        self._rotation = rotation_table(head.rotary_emb, weight.view(1, 1, -1), max_length)

    @classmethod
    def of(cls, head: Eagle3Head, max_length: int) -> PackedEagle3 | None:
        """The packed form of ``head``; None where its layers are not of a kind that this serves."""
        return cls(head, max_length) if _is_served(head) else None

    @property
    def kv_shape(self) -> tuple[int, int]:
        """(heads, size) of the keys and values of a layer."""
        return self._layers[0].shape.keys, self._layers[0].shape.size

    def forward(
        self, token_ids: Tensor, hidden: Tensor, places: SlotPlaces, memory: Sequence[KeyValues]
    ) -> Tensor:
        """As of ``DraftHead.forward``: int64 [N] and [N, H] to the recycled [N, H].

        memory: the layers' blocks.
        """
        first, layers = self._stock[0], zip(self._layers, self._stock, memory, strict=True)
        embedded = self.head.embed(token_ids).to(hidden.dtype)
        embedded = rms_norm(embedded, first.input_layernorm.weight, self._eps)
        normed = rms_norm(hidden, first.hidden_norm.weight, self._eps)
        residual = normed if first.norm_before_residual else hidden
        normed = torch.cat([embedded, normed], -1)
        for index, (layer, stock, kept) in enumerate(layers):
            if index > 0:
                normed = rms_norm(residual, stock.input_layernorm.weight, self._eps)
            change = layer.attend(normed, self._rotation, kept, places)
            inner = stock.post_attention_layernorm.weight
            residual, normed = add_rms_norm(change, residual, inner, self._eps)
            residual = residual + layer.feed(normed)
        if self.head.norm_output:
            return rms_norm(residual, self.head.norm.weight, self._eps)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., D]."""
        head = self.head
        normed = hidden if head.norm_output else rms_norm(hidden, head.norm.weight, self._eps)
        return head.score(normed)


def _is_served(head: Eagle3Head) -> bool:
    if not (has_static_rope(head.config) and has_whole_rope(head.config)):
        return False
    layers: list[Any] = list(head.layers)
    if any(getattr(layer.self_attn, "sliding_window", None) for layer in layers):
        return False
    return all(PackedLayer.fits(layer.self_attn) for layer in layers)


class Scored(NamedTuple):
    """Where a forward left its rows: hidden [R, H] and logits [R, D]."""

    hidden: Tensor
    logits: Tensor


class _Rows(NamedTuple):
    """The rows of a draft.

    places: as of ``pack_places``. given: see ``PackedSlotHead.draft_greedily``. beside: see
    ``GraphPool.run``.
    """

    places: Sequence[Sequence[int]]
    given: Tensor | None
    beside: Callable[[], None] | None = None


class PackedSlotHead:
    """What ``SlotHead`` is, for the heads that ``PackedEagle3`` serves.

    limits: how much it can hold. blocks: the target's, by whose tables the head keeps its own keys
    and values: who takes a prefix of another text takes both. None: tables of its own.
    window: in which CUDA graphs are captured; None never closes.
    """

    @torch.inference_mode()
    def __init__(
        self,
        packed: PackedEagle3,
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
        window: CaptureWindow | None = None,
    ) -> None:
        self._packed, self.max_length = packed, limits.max_length
        self._limits, self._device, self._dtype = limits, device, dtype
        self.blocks = blocks or Blocks.full(limits.num_slots, limits.max_length, device)
        heads, size = packed.kv_shape
        like = torch.empty(0, device=device, dtype=dtype)
        self._memory = tuple(
            self.blocks.allocate(heads, size, like, lag=1)  # a position is read with its successor
            for _ in range(packed.head.config.num_hidden_layers)
        )
        self.graphs = GraphPool(device, window)
        self._lengths, self._depths, self._marks = ([0] * limits.num_slots for _ in range(3))
        width = packed.head.hidden_size
        # The last row is for the unused places of a graph, whose slot is -1.
        self._hidden = torch.zeros(limits.num_slots + 1, width, device=device, dtype=dtype)
        self._marked = torch.zeros_like(self._hidden)
        self._indexed: tuple[tuple[int, ...], Tensor] | None = None  # the last slots, on the device
        self._scored: tuple[tuple[int, ...], Scored] | None = None  # the last rows, if still valid
        self._has_appended = False  # whether the graph that appends stands where these rows do

    @property
    def num_slots(self) -> int:
        """Texts at a time."""
        return self._limits.num_slots

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._lengths[slot]

    def depth(self, slot: int) -> int:
        """Draft tokens behind the verified ones."""
        return self._depths[slot]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self._lengths[slot] = self._depths[slot] = self._marks[slot] = 0

    def adopt(self, slot: int) -> None:
        """Where nothing was read into the slot: it holds what its blocks hold of another text."""
        if self._lengths[slot] == 0:
            self._lengths[slot] = self.blocks.num_taken(slot)

    @torch.inference_mode()
    def mark(self, slots: Sequence[int]) -> None:
        """Remember where the slots' drafts stand, for ``rewind``; ``read`` does so too."""
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
        begins = [0] * len(slots)
        while any(begin < len(row) for begin, row in zip(begins, tokens, strict=True)):
            self._read_line(slots, tokens, states, begins)
        self._begin_draft(slots)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """See ``SlotHead.copy_slot``."""
        length = self._lengths[source]
        count = len(destinations)
        Rows(destinations, [0] * count, [length] * count).grow(self.blocks)
        for slot in destinations:
            self.blocks.copy_own(source, slot, length, self._memory)
        self._hidden[self._index(destinations)] = self._hidden[source].clone()
        self._scored = None
        for slot in destinations:
            self._lengths[slot] = length
        self._begin_draft(destinations)

    def can_read_ahead(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so many more tokens fit each slot, and one graph."""
        pairs = zip(slots, counts, strict=True)
        longest = max(self._lengths[slot] + count for slot, count in pairs)
        return sum(counts) <= LARGEST_GRAPH and longest <= self._limits.max_length

    @torch.inference_mode()
    def read_ahead(
        self,
        slots: Sequence[int],
        token_ids: Tensor,
        states: Tensor,
        last: Tensor,
        counts: Sequence[int],
    ) -> None:
        """Read verified tokens of which the host does not know yet how many there are.

        token_ids: int64 [R, T] on the device. states: [R, T, X] that go with them. last: int64 [R],
        in [0, T), where each row ends; what is behind is any. counts: [R] tokens of each row at
        most, on the host.

        A slot holds them once ``commit`` says how many they were; otherwise it is as before, but
        for the draft, which is forgotten.
        """
        rows = Rows(slots, [self._lengths[slot] for slot in slots], counts)
        begins = np.cumsum(counts) - np.array(counts)
        placed = np.concatenate([rows.places_in(token_ids.shape[1]), begins])
        index = torch.from_numpy(placed).to(self._device, non_blocking=True)
        index, first = index.split([len(index) - len(counts), len(counts)])
        fed = token_ids.clamp_min(0).flatten()[index], states.flatten(0, 1)[index]
        self._read_rows(rows, *fed, first + last)
        self._begin_draft(slots)

    def commit(self, slot: int, count: int) -> None:
        """The slot holds ``count`` of the tokens that were read ahead."""
        self._lengths[slot] += count
        self.blocks.mark_read(slot, self._lengths[slot])

    @torch.inference_mode()
    def append(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Append one draft token, int64 [R] on the head's device, to each slot's draft."""
        size = bucket(len(slots), ROW_SIZES)
        self.blocks.upload()  # the slots may have grown since anything was read
        inputs = {"token_ids": pad_rows(token_ids, size)}
        is_scored = self._scored is not None and self._scored[0] == tuple(slots)
        if not is_scored or not self._has_appended:
            inputs["hidden"] = pad_rows(self._hidden[self._index(slots)], size)
            inputs["places"] = pack_places((slots, self._ends(slots)), size)
        self._keep(slots, self.graphs.run(("append", size), inputs, self._append_one))
        self._has_appended = True
        for slot in slots:
            self._depths[slot] += 1

    @torch.inference_mode()
    def draft_greedily(
        self, slots: Sequence[int], count: int, given: Tensor | None = None
    ) -> Tensor:
        """int64 [R, count] target ids, each the best behind the ones before: one graph for all.

        given: int64 [R, G], G at most ``count``: tokens that each row begins with, -1 behind them.
            What the result holds in their places is any.

        All but the last are appended. On CUDA the next such draft overwrites the result.
        """
        body = partial(self._draft_best, count)
        rows = _Rows((slots, self._ends(slots)), given)
        best: Tensor = self._run_draft("best", count, rows, body)
        return best[: len(slots)]

    @torch.inference_mode()
    def draft_by(
        self,
        picker: Picker,
        slots: Sequence[int],
        count: int,
        given: Tensor | None = None,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Draft ``count`` tokens that ``picker`` picks: one graph for all.

        given: as of ``draft_greedily``. All but the last are appended. beside: what the picker
        waits for while it is launched.
        """
        places = (slots, self._ends(slots), [picker.ticket] * len(slots))
        rows = _Rows(places, given, beside)
        body = partial(self._draft_by, picker, count)
        self._run_draft(picker.key, count, rows, body, picker.inputs)

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> Tensor:
        """[R, D]: the scores of the token that follows each slot's draft."""
        if self._scored is not None and self._scored[0] == tuple(slots):
            return self._scored[1].logits
        return self._packed.logits(self._hidden[self._index(slots)])

    def masked(
        self, slots: Tensor, token_ids: Tensor, hidden: Tensor, places: SlotPlaces
    ) -> Tensor:
        """As of ``SlotHead.masked``, for a graph. slots: int64 [R] on the device, -1 for an unused
        row. places: of the R rows of T tokens."""
        first = self._hidden[slots].unsqueeze(1)
        if token_ids.shape[1] == 0:
            return first
        fed = token_ids.flatten(), hidden.flatten(0, 1)
        found = self._packed.forward(*fed, places, self._memory)
        return torch.cat([first, found.view(*token_ids.shape, -1)], 1)

    @torch.inference_mode()
    def capture(self, count: int) -> Iterator[None]:
        """Capture the graphs of reading, of single steps, and of greedy drafts of ``count``."""
        yield from self.capture_reads()
        head = self._packed.head
        for size in self.row_sizes:
            places = pack_places([[], []], size)
            fed = {"hidden": self._hidden.new_zeros(size, head.hidden_size), "places": places}
            fed["token_ids"] = torch.zeros(size, dtype=torch.int64)
            self.graphs.prepare(("append", size), fed, self._append_one)
            yield
            body = partial(self._draft_best, count)
            for given in (0, count):
                self._capture_draft(("best", count), given, (2, size), body)
                yield

    @torch.inference_mode()
    def capture_reads(self) -> Iterator[None]:
        """Capture the graphs of reading."""
        fc, head = self._packed.head.fc, self._packed.head
        width = head.hidden_size if fc is None else fc.in_features
        for size in (*UNCAPTURED, *reversed(SIZES)):
            shape = LineShape.of(size, 0, self._slots_and_width)
            inputs = {
                "token_ids": torch.zeros(size, dtype=torch.int64),
                "states": self._hidden.new_zeros(size, width),
                "places": torch.from_numpy(Rows((), (), ()).places(size, shape.num_rows)),
                "last": torch.zeros(shape.num_rows, dtype=torch.int64),
            }
            read = partial(self._read, shape.width)
            if not shape.has_graph:
                read(upload(inputs, self._device))
                continue
            self.graphs.prepare(("read", shape), inputs, read)
            yield

    @torch.inference_mode()
    def capture_by(self, picker: Picker, count: int, given: int, size: int) -> None:
        """Capture the graph of ``draft_by`` for ``size`` rows, ``given`` tokens among ``count``."""
        body = partial(self._draft_by, picker, count)
        self._capture_draft((picker.key, count), given, (3, size), body, picker.inputs)

    @property
    def row_sizes(self) -> list[int]:
        """Sizes of the batches that drafts are captured for, the largest first."""
        most = bucket(self._limits.num_slots, ROW_SIZES)
        return [size for size in reversed(ROW_SIZES) if size <= most]

    def _capture_draft(
        self,
        kind: tuple[Hashable, int],
        given: int,
        places: tuple[int, int],
        body: Callable[[Inputs], tuple[Any, Scored]],
        others: Callable[[Hashable, int], Inputs] = lambda *_: NOTHING,
    ) -> None:
        """places: how many lines they have, and their size."""
        lines, size = places
        key = (*kind, *([given] if given else []), size)
        logits = self._packed.logits(self._hidden[:1])
        inputs = {**others(key, size), "logits": logits.new_zeros(size, logits.shape[1])}
        if given:
            inputs["given"] = torch.full((size, given), -1)
        inputs["places"] = pack_places([[] for _ in range(lines)], size)
        self.graphs.prepare(key, inputs, body)

    def _ends(self, slots: Sequence[int]) -> list[int]:
        """Where the next token of each slot's draft goes."""
        return [self._lengths[slot] + self._depths[slot] for slot in slots]

    def _begin_draft(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._depths[slot] = 0
        self.mark(slots)

    def _read_line(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        begins: list[int],
    ) -> None:
        """One forward over the next tokens of the rows, as many as a forward may hold."""
        left, chosen = self._limits.piece, []
        for row, (row_tokens, begin) in enumerate(zip(tokens, begins, strict=True)):
            count = min(left, len(row_tokens) - begin)
            left -= count
            if count:
                chosen.append((row, slice(begin, begin + count)))
                begins[row] += count
        of = [slots[row] for row, _ in chosen]
        counts = [cut.stop - cut.start for _, cut in chosen]
        rows = Rows(of, [self._lengths[slot] for slot in of], counts)
        token_ids = host_integers([one for row, cut in chosen for one in tokens[row][cut]])
        fed = torch.cat([states[row][cut] for row, cut in chosen])
        self._read_rows(rows, token_ids, fed, host_integers(counts).cumsum(0) - 1)
        for slot, count in zip(of, counts, strict=True):
            self.commit(slot, count)

    def _read_rows(self, rows: Rows, token_ids: Tensor, states: Tensor, last: Tensor) -> None:
        """Tokens int64 [N] in one line, the states [N, X] before them, and where rows end, [R]."""
        rows.grow(self.blocks)
        shape = LineShape.of(len(token_ids), len(rows.slots), self._slots_and_width)
        inputs = {
            "token_ids": pad_to(token_ids, (shape.size,)),
            "states": pad_to(states, (shape.size, states.shape[1])),
            "places": torch.from_numpy(rows.places(shape.size, shape.num_rows)),
            "last": pad_to(last, (shape.num_rows,)),
        }
        body = partial(self._read, shape.width)
        if shape.has_graph:
            self._keep(rows.slots, self.graphs.run(("read", shape), inputs, body))
        else:
            self._keep(rows.slots, body(upload(inputs, self._device)))

    @property
    def _slots_and_width(self) -> tuple[int, int]:
        return self._limits.num_slots, self._limits.width

    def _read(self, width: int, inputs: Inputs) -> Scored:
        token_ids = inputs["token_ids"]
        tokens, rows = split_places(inputs["places"], len(token_ids))
        hidden = self._packed.head.features(inputs["states"].to(self._dtype))
        places = self._places(tokens, rows, width)
        hidden = self._packed.forward(token_ids, hidden, places, self._memory)
        return self._score(rows[0], hidden[inputs["last"]])

    def _places(self, tokens: Tensor, rows: Tensor, width: int) -> SlotPlaces:
        return SlotPlaces(tokens, rows, self.blocks.tables, self.blocks.max_length, width)

    def _append_one(self, inputs: Inputs) -> Scored:
        """One step; the inputs are left as the next one needs them."""
        hidden, places = inputs["hidden"], inputs["places"]
        output = self._step(inputs["token_ids"], hidden, places[0], places[1])
        hidden.copy_(output)
        places[1] += 1
        return self._score(places[0], output)

    def _run_draft(
        self,
        name: Hashable,
        count: int,
        rows: _Rows,
        body: Callable[[Inputs], tuple[Any, Scored]],
        others: Callable[[Hashable, int], Inputs] = lambda *_: NOTHING,
    ) -> Any:
        """Returns the first of what ``body`` does."""
        slots, size = rows.places[0], bucket(len(rows.places[0]), ROW_SIZES)
        self.blocks.upload()  # the slots may have grown since anything was read
        given = {} if rows.given is None else {"given": pad_rows(rows.given, size)}
        widths = tuple(one.shape[1] for one in given.values())
        # What the last forward left; computed here where it is of other slots, so that a graph of
        # each size serves both.
        scores = pad_rows(self.logits(slots), size)
        key = (name, count, *widths, size)
        inputs = {**others(key, size), **given, "logits": scores}
        if key not in self.graphs:
            # A draft moves its slots on, and may wait for the host: no slots, and no ticket.
            still = pack_places([[] for _ in rows.places], size)
            self.graphs.prepare(key, {**inputs, "places": still}, body)
        inputs["places"] = pack_places(rows.places, size)
        found, last = self.graphs.run(key, inputs, body, beside=rows.beside)
        self._keep(slots, last)
        for slot in slots:
            self._depths[slot] += count - 1
        return found

    def _draft_best(self, count: int, inputs: Inputs) -> tuple[Tensor, Scored]:
        vocabulary, picked = self._packed.head.vocabulary, list[Tensor]()

        def pick(_: int, logits: Tensor) -> Tensor:
            best = logits.argmax(-1)
            picked.append(best if vocabulary is None else vocabulary.to_target(best))
            return picked[-1]

        last = self._draft(inputs, count, pick)
        return torch.stack(picked, 1), last

    def _draft_by(self, picker: Picker, count: int, inputs: Inputs) -> tuple[None, Scored]:
        ticket = inputs["places"][2, :1]
        return None, self._draft(inputs, count, partial(picker.pick, ticket, inputs))

    def _draft(self, inputs: Inputs, count: int, pick: Callable[[int, Tensor], Tensor]) -> Scored:
        """pick: a depth and its logits [R, D] to the tokens there, int64 [R] target ids."""
        slots, starts = inputs["places"][:2].unbind(0)
        hidden, logits = self._hidden[slots], inputs["logits"]
        given = inputs.get("given", slots.new_empty(len(slots), 0))
        for depth in range(count):
            token_ids = pick(depth, logits)
            if depth < given.shape[1]:
                token_ids = torch.where(given[:, depth] < 0, token_ids, given[:, depth])
            if depth < count - 1:
                hidden = self._step(token_ids, hidden, slots, starts + depth)
                logits = self._packed.logits(hidden)
        self._hidden[slots] = hidden
        return Scored(hidden, logits)

    def _step(self, token_ids: Tensor, hidden: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """One token a row, [R] each and hidden [R, H]."""
        ends = torch.arange(1, len(slots) + 1, device=slots.device)
        rows = torch.stack([slots, starts, ends])
        return self._packed.forward(
            token_ids, hidden, self._places(rows[:2], rows, width=1), self._memory
        )

    def _score(self, slots: Tensor, hidden: Tensor) -> Scored:
        self._hidden[slots] = hidden
        return Scored(hidden, self._packed.logits(hidden))

    def _keep(self, slots: Sequence[int], scored: Scored) -> None:
        rows = Scored(*(part[: len(slots)] for part in scored))
        self._scored, self._has_appended = (tuple(slots), rows), False

    def _index(self, slots: Sequence[int]) -> Tensor:
        key = tuple(slots)
        if self._indexed is None or self._indexed[0] != key:
            self._indexed = (key, to_device(key, self._device))
        return self._indexed[1]
