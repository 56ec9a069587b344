"""How the tokens of a draft are picked inside of the graph that makes it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from guided_spec.models.graph_pool import Inputs

__all__ = ["Picker"]


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
