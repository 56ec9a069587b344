"""Whole drafts by one graph: who makes them, and who picks their tokens inside of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from torch import Tensor

from guided_spec.models.packed.graph_pool import Inputs

__all__ = ["Picker", "WholeDrafts"]


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


class WholeDrafts(Protocol):
    """A head that makes a whole draft by one graph; see ``PackedSlotHead``."""

    @property
    def row_sizes(self) -> list[int]: ...
    def depth(self, slot: int) -> int: ...
    def rewind(self, slots: Sequence[int]) -> None: ...
    def draft_greedily(
        self, slots: Sequence[int], count: int, given: Tensor | None = None
    ) -> Tensor: ...
    def draft_by(
        self,
        picker: Picker,
        slots: Sequence[int],
        count: int,
        given: Tensor | None = None,
        beside: Callable[[], None] | None = None,
    ) -> None: ...
    def capture_by(self, picker: Picker, count: int, given: int, size: int) -> None: ...
