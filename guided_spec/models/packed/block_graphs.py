"""Blocks of a head as CUDA graphs: from where texts end to the outputs of the places behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from guided_spec.models.heads.block.transitions import Transition
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.packed.graph_pool import (
    ROW_SIZES,
    GraphPool,
    Inputs,
    bucket,
    pack_places,
    pad_rows,
    upload,
)
from guided_spec.models.packed.packed_lm import LARGEST_GRAPH

__all__ = ["BlockForward", "BlockGraphs", "BlockRows", "has_graph"]


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


class BlockGraphs:
    """See the module's docstring. num_slots: rows of a batch at most."""

    def __init__(self, graphs: GraphPool, forward: BlockForward, num_slots: int) -> None:
        self._graphs, self._forward = graphs, forward
        most = bucket(num_slots, ROW_SIZES)
        self._row_sizes = [size for size in reversed(ROW_SIZES) if size <= most]

    def outputs(self, rows: BlockRows, width: int) -> Tensor:
        """[R, width, H]; on CUDA the next graph overwrites them."""
        size = bucket(len(rows.slots), ROW_SIZES)
        inputs = {
            "places": pack_places((rows.slots, rows.starts), size),
            "last": pad_rows(rows.last, size),
        }
        compute = partial(self._compute, width)
        if has_graph(size, width):
            found: Tensor = self._graphs.run((width, size), inputs, compute)
        else:
            found = compute(upload(inputs, self._graphs.device))
        return found[: len(rows.slots)]

    def capture(self, width: int) -> Iterator[None]:
        """Capture the graphs of ``outputs``."""
        for size in self._row_sizes:
            inputs = {
                "places": pack_places([[], []], size),
                "last": torch.zeros(size, dtype=torch.int64),
            }
            if has_graph(size, width):
                self._graphs.prepare((width, size), inputs, partial(self._compute, width))
                yield
            else:
                self._compute(width, upload(inputs, self._graphs.device))

    def _compute(self, width: int, inputs: Inputs) -> Tensor:
        slots, starts = inputs["places"].unbind(0)
        return self._forward.outputs(slots, starts, inputs["last"], width)


def has_graph(size: int, width: int) -> bool:
    """Whether ``size`` blocks are few enough tokens: more take longer than their launches."""
    return size * (width + 1) <= LARGEST_GRAPH
