"""Whole drafts of a head, each by one graph, inside of which their tokens are picked one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.packed.graph_pool import (
    NOTHING,
    ROW_SIZES,
    GraphPool,
    Inputs,
    bucket,
    pack_index,
    pad_rows,
    row_sizes,
)

Pick = Callable[[int, Tensor], Tensor]
"""A depth and its logits [R, D] to the next tokens of the draft, int64 [R] target ids."""


class Picker(Protocol):
    """Picks the tokens of a draft inside of its graph.

    key: says all that ``pick`` depends on besides its arguments. ticket: of this draft, see
    ``Mailbox``.
    """

    @property
    def key(self) -> Hashable: ...
    @property
    def ticket(self) -> int: ...

    def inputs(self, graph: Hashable, size: int) -> Inputs:
        """What ``pick`` reads, for ``size`` rows; see ``GraphPool.run``.

        graph: the same for calls with the same key; it keeps what is left out.
        """
        ...

    def pick(self, ticket: Tensor, inputs: Inputs, depth: int, logits: Tensor) -> Tensor:
        """int64 [R] target ids from logits [R, D]; ticket: int64 [1].

        Nothing is waited for where the ticket is ``UNTICKETED``.
        """
        ...

    def found(self, picked: list[Tensor]) -> Tensor | None:
        """What of the tokens, [R] each, the graph returns to its caller."""
        ...


class _Best(NamedTuple):
    """Picks the best tokens. vocabulary: what the logits score; None: the target's own tokens."""

    vocabulary: DraftVocabulary | None
    key: Hashable = "best"
    ticket: int = 0

    def inputs(self, graph: Hashable, size: int) -> Inputs:
        del graph, size
        return NOTHING

    def pick(self, ticket: Tensor, inputs: Inputs, depth: int, logits: Tensor) -> Tensor:
        del ticket, inputs, depth
        best = logits.argmax(-1)
        return best if self.vocabulary is None else self.vocabulary.to_target(best)

    def found(self, picked: list[Tensor]) -> Tensor:
        return torch.stack(picked, 1)


class DraftForward(Protocol):
    """A head's part of whole drafts.

    vocabulary: what its logits score; None: the target's own tokens. scores_at_once: whether all
    forwards of a draft come before its first token.
    """

    @property
    def vocabulary(self) -> DraftVocabulary | None: ...
    @property
    def scores_at_once(self) -> bool: ...
    def has_graph(self, size: int, count: int) -> bool:
        """Whether a draft of ``count`` tokens for ``size`` rows is captured beforehand."""
        ...

    def begin_draft(self, slots: Sequence[int], count: int) -> Sequence[int]:
        """Before a draft of ``count`` tokens: where it begins, [R]; the slots then can hold it."""
        ...

    def draft(self, inputs: Inputs, count: int, pick: Pick) -> None:
        """Inside of the graph: tokens that ``pick`` picks.

        inputs: "index", int64 [3, R]: the slots, -1 for an unused row, and their starts first.
        """
        ...

    def end_draft(self, slots: Sequence[int], count: int) -> None:
        """All but the last token are appended to the slots' drafts."""
        ...


class WholeDrafts:
    """Drafts, each by one graph. row_sizes: of the batches that drafts are captured for, the
    largest first. scores_at_once: see ``DraftForward``."""

    def __init__(self, graphs: GraphPool, forward: DraftForward, num_slots: int) -> None:
        self._graphs, self._forward = graphs, forward
        self.row_sizes = row_sizes(num_slots)
        self.scores_at_once = forward.scores_at_once
        self._lengths = set[int]()  # of the drafts that were captured beforehand

    def length(self, count: int) -> int:
        """Tokens that the graph for a draft of ``count`` tokens makes.

        One for each number of them would take seconds to capture, where a step of a head takes a
        quarter of a millisecond.
        """
        return min((one for one in self._lengths if one >= count), default=count)

    @torch.inference_mode()
    def draft_greedily(
        self, slots: Sequence[int], count: int, prefix: Tensor | None = None
    ) -> Tensor:
        """int64 [R, count] target ids, each the best after the ones before.

        prefix: int64 [R, G], G at most ``count``: tokens that each row begins with, then -1.
            The result is undefined at their positions.

        On CUDA the next such draft overwrites the result.
        """
        best: Tensor = self._run(_Best(self._forward.vocabulary), slots, count, prefix)
        return best[: len(slots), :count]

    @torch.inference_mode()
    def draft_by(
        self,
        picker: Picker,
        slots: Sequence[int],
        count: int,
        prefix: Tensor | None,
        overlapped: Callable[[], None] | None,
    ) -> None:
        """Draft ``count`` tokens that ``picker`` picks, or as many as ``length`` says.

        prefix: as of ``draft_greedily``. overlapped: as of ``GraphPool.run``.
        """
        self._run(picker, slots, count, prefix, overlapped)

    @torch.inference_mode()
    def capture_best(self, count: int) -> Iterator[None]:
        """Capture the graphs of ``draft_greedily``."""
        for size in self.row_sizes:
            for num_prefix in (0, count):
                self.capture_by(_Best(self._forward.vocabulary), count, num_prefix, size)
                yield

    @torch.inference_mode()
    def capture_by(self, picker: Picker, count: int, num_prefix: int, size: int) -> None:
        """Capture the graph of ``draft_by`` for ``size`` rows; prefixes have ``num_prefix`` tokens.

        Where it would be too large, only its kernels are made ready.
        """
        self._lengths.add(count)
        key = (picker.key, count, *([num_prefix] if num_prefix else []), size)
        inputs = {**picker.inputs(key, size), "index": _still(size)}
        if num_prefix:
            inputs["prefix"] = torch.full((size, num_prefix), -1)
        kept = key if self._forward.has_graph(size, count) else None
        self._graphs.prepare(kept, inputs, partial(self._draft, picker, count))

    def _run(
        self,
        picker: Picker,
        slots: Sequence[int],
        count: int,
        prefix: Tensor | None,
        overlapped: Callable[[], None] | None = None,
    ) -> Any:
        size, count = bucket(len(slots), ROW_SIZES), self.length(count)
        body = partial(self._draft, picker, count)
        starts = self._forward.begin_draft(slots, count)
        key = (picker.key, count, *(() if prefix is None else (count,)), size)
        inputs = dict(picker.inputs(key, size))
        if prefix is not None:
            prefix = functional.pad(prefix, (0, count - prefix.shape[1]), value=-1)
            inputs["prefix"] = pad_rows(prefix, size)
        if key not in self._graphs:
            # A draft moves its slots on, and may wait for the host: no slots, and no ticket.
            self._graphs.prepare(key, {**inputs, "index": _still(size)}, body)
        index = (slots, starts, [picker.ticket] * len(slots))
        inputs["index"] = pack_index(index, size)
        found = self._graphs.run(key, inputs, body, overlapped=overlapped)
        self._forward.end_draft(slots, count)
        return found

    def _draft(self, picker: Picker, count: int, inputs: Inputs) -> Tensor | None:
        ticket, prefix, picked = inputs["index"][2, :1], inputs.get("prefix"), list[Tensor]()

        def pick(depth: int, logits: Tensor) -> Tensor:
            picked.append(picker.pick(ticket, inputs, depth, logits))
            if prefix is None:
                return picked[-1]
            return torch.where(prefix[:, depth] < 0, picked[-1], prefix[:, depth])

        self._forward.draft(inputs, count, pick)
        return picker.found(picked)


def _still(size: int) -> Tensor:
    """The index of ``size`` unused rows."""
    return pack_index([[], [], []], size)
