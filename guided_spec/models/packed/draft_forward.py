"""What a head computes inside of the CUDA graph of a whole draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from guided_spec.models.packed.graph_pool import GraphPool, Inputs

Pick = Callable[[int, Tensor], Tensor]
"""A depth and its logits [R, D] to the next tokens of the draft, int64 [R] target ids."""


class DraftForward(Protocol):
    """A head's part of whole drafts.

    graphs: where its drafts are captured. scores_at_once: whether all forwards of a draft come
    before its first token.
    """

    @property
    def graphs(self) -> GraphPool: ...
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
