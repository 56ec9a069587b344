"""Blocks of a head as CUDA graphs: from where texts end to the outputs of the places behind.

Or to a whole draft: the places are scored by one forward, and their tokens picked one after another
inside of the same graph, as a head picks them that makes a forward for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from guided_spec.models.heads.block.transitions import Transition
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.packed.graph_pool import (
    NOTHING,
    ROW_SIZES,
    GraphPool,
    Inputs,
    bucket,
    pack_places,
    pad_rows,
    upload,
)
from guided_spec.models.packed.packed_lm import LARGEST_GRAPH
from guided_spec.models.packed.whole_drafts import Picker

__all__ = ["BlockForward", "BlockGraphs", "BlockRows"]

Pick = Callable[[int, Tensor], Tensor]
"""A depth and its logits [R, D] to the tokens there, int64 [R] target ids."""


class BlockForward(Protocol):
    """What a graph holds; nothing in it waits for the device.

    vocabulary: what the logits score; None: the target's own tokens. transition: how a place
    depends on the one before; None: it does not.
    """

    @property
    def vocabulary(self) -> DraftVocabulary | None: ...
    @property
    def transition(self) -> Transition | None: ...
    def outputs(self, slots: Tensor, starts: Tensor, last: Tensor, width: int) -> Tensor:
        """The outputs [R, width, H] of the places behind ``last``, which stand at ``starts``.

        All int64 [R] on the device; slot -1: an unused row.
        """
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D]."""
        ...


class BlockRows(NamedTuple):
    """slots, starts: of R texts, and where their last tokens stand. last: int64 [R] on the
    device, these tokens."""

    slots: Sequence[int]
    starts: Sequence[int]
    last: Tensor


Others = Callable[[Hashable, int], Inputs]
_Body = Callable[[int, Inputs], Any]


def _nothing(*_: Any) -> Inputs:
    return NOTHING


class _Whole(NamedTuple):
    """A whole draft. length: its tokens. given, ticket, beside: see ``PackedSlotHead.draft_by``."""

    rows: BlockRows
    length: int
    given: Tensor | None
    ticket: int = 0
    beside: Callable[[], None] | None = None

    @classmethod
    def blank(cls, length: int, given: int, size: int) -> _Whole:
        """Of ``size`` unused rows, which are given ``given`` tokens; 0: none."""
        tokens = torch.full((size, given), -1) if given else None
        return cls(BlockRows([-1] * size, [0] * size, torch.zeros(size).long()), length, tokens)

    @property
    def size(self) -> int:
        return bucket(len(self.rows.slots), ROW_SIZES)

    def key(self, name: Hashable) -> Hashable:
        given = [] if self.given is None else [self.given.shape[1]]
        return (name, self.length, *given, self.size)

    def inputs(self) -> dict[str, Tensor]:
        found = {"last": pad_rows(self.rows.last, self.size)}
        if self.given is not None:
            found["given"] = pad_rows(self.given, self.size)
        return found

    def places(self, *, is_still: bool = False) -> Tensor:
        """Where the rows stand; is_still: nowhere, so that nothing is kept or waited for."""
        slots, starts, _ = self.rows
        rows = [[], [], []] if is_still else [slots, starts, [self.ticket] * len(slots)]
        return pack_places(rows, self.size)


class BlockGraphs:
    """See the module's docstring. num_slots: rows of a batch at most."""

    def __init__(self, graphs: GraphPool, forward: BlockForward, num_slots: int) -> None:
        self._graphs, self._forward = graphs, forward
        most = bucket(num_slots, ROW_SIZES)
        self.row_sizes = [size for size in reversed(ROW_SIZES) if size <= most]

    def outputs(self, rows: BlockRows, width: int) -> Tensor:
        """[R, width, H]; on CUDA the next graph overwrites them."""
        size = bucket(len(rows.slots), ROW_SIZES)
        inputs = {
            "places": pack_places((rows.slots, rows.starts), size),
            "last": pad_rows(rows.last, size),
        }
        compute = partial(self._compute, width)
        if _has_graph(size, width):
            found: Tensor = self._graphs.run((width, size), inputs, compute)
        else:
            found = compute(upload(inputs, self._graphs.device))
        return found[: len(rows.slots)]

    def draft_greedily(self, rows: BlockRows, count: int, given: Tensor | None) -> Tensor:
        """See ``PackedSlotHead``; ``count`` is a block's width at most."""
        found: Tensor = self._draft("best", _Whole(rows, count, given), self._best)
        return found[: len(rows.slots)]

    def draft_by(
        self,
        picker: Picker,
        rows: BlockRows,
        count: int,
        given: Tensor | None,
        beside: Callable[[], None] | None,
    ) -> None:
        """See ``PackedSlotHead``; ``count`` is a block's width at most."""
        draft = _Whole(rows, count, given, picker.ticket, beside)
        self._draft(picker.key, draft, partial(self._picked, picker), picker.inputs)

    def capture_by(self, picker: Picker, count: int, given: int, size: int) -> None:
        """See ``PackedSlotHead``."""
        draft = _Whole.blank(count, given, size)
        self._prepare(picker.key, draft, partial(self._picked, picker), picker.inputs)

    def capture_best(self, count: int) -> Iterator[None]:
        """Capture the graphs of ``draft_greedily``."""
        for size in self.row_sizes:
            for given in (0, count):
                self._prepare("best", _Whole.blank(count, given, size), self._best)
                yield

    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of ``outputs``."""
        for size in self.row_sizes:
            inputs = {
                "places": pack_places([[], []], size),
                "last": torch.zeros(size, dtype=torch.int64),
            }
            if _has_graph(size, width):
                self._graphs.prepare((width, size), inputs, partial(self._compute, width))
                yield
            else:
                self._compute(width, upload(inputs, self._graphs.device))

    def _compute(self, width: int, inputs: Inputs) -> Tensor:
        slots, starts = inputs["places"].unbind(0)
        return self._forward.outputs(slots, starts, inputs["last"], width)

    def _draft(self, name: Hashable, draft: _Whole, body: _Body, others: Others = _nothing) -> Any:
        key, inputs = draft.key(name), draft.inputs()
        inputs |= others(key, draft.size)
        if key not in self._graphs:
            # A draft may wait for the host: no ticket.
            still = {**inputs, "places": draft.places(is_still=True)}
            self._graphs.prepare(key, still, partial(body, draft.length))
        inputs["places"] = draft.places()
        return self._graphs.run(key, inputs, partial(body, draft.length), beside=draft.beside)

    def _prepare(
        self, name: Hashable, draft: _Whole, body: _Body, others: Others = _nothing
    ) -> None:
        """Its graph, or where it would be too large only its kernels."""
        key = draft.key(name)
        inputs = {**draft.inputs(), **others(key, draft.size)}
        inputs["places"] = draft.places(is_still=True)
        if _has_graph(draft.size, draft.length):
            self._graphs.prepare(key, inputs, partial(body, draft.length))
        else:
            body(draft.length, upload(inputs, self._graphs.device))

    def _picked(self, picker: Picker, count: int, inputs: Inputs) -> None:
        self._pick_all(count, inputs, partial(picker.pick, inputs["places"][2, :1], inputs))

    def _best(self, count: int, inputs: Inputs) -> Tensor:
        vocabulary = self._forward.vocabulary

        def pick(_: int, logits: Tensor) -> Tensor:
            best = logits.argmax(-1)
            return best if vocabulary is None else vocabulary.to_target(best)

        return torch.stack(self._pick_all(count, inputs, pick), 1)

    def _pick_all(self, count: int, inputs: Inputs, pick: Pick) -> list[Tensor]:
        """The tokens that were picked, and not those that were given."""
        slots, starts, _ = inputs["places"].unbind(0)
        forward, before = self._forward, inputs["last"]
        outputs = forward.outputs(slots, starts, before, count)
        given = inputs.get("given", before.new_empty(len(before), 0))
        picked = list[Tensor]()
        for depth, logits in enumerate(forward.logits(outputs).unbind(1)):
            if forward.transition is not None:
                logits = forward.transition.step(logits, outputs[:, depth], before)
            before = pick(depth, logits)
            picked.append(before)
            if depth < given.shape[1]:
                before = torch.where(given[:, depth] < 0, before, given[:, depth])
        return picked


def _has_graph(size: int, width: int) -> bool:
    """Whether ``size`` blocks are few enough tokens: more take longer than their launches."""
    return size * (width + 1) <= LARGEST_GRAPH
