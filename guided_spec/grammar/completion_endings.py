"""What has to be known about a grammar to end a text in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.protocol import Matcher

__all__ = ["NEVER", "EndLostError", "Endings", "pack_row"]

NEVER = int(np.iinfo(np.int32).max)
"""The cost of what cannot be."""


class EndLostError(Exception):
    """Following a text takes more memory than it is worth. Never leaves the package."""


class Endings(Protocol):
    """The ways in which the texts of one grammar can end; shared by requests and threads.

    A state is where a text stands, and depends on the text's tokens and its budget alone. Its cost
    is a number of tokens within which the text can be ended, the stop token among them, and some
    legal token leads from each state to one whose cost is smaller by one or more. All but ``start``
    and ``cost`` may raise EndLostError.
    """

    @property
    def is_exact(self) -> bool:
        """Whether costs are the least there are, and every token is judged by them."""
        ...

    @property
    def is_filling_up(self) -> bool:
        """Whether new texts should get endings made anew: there is little room for more states."""
        ...

    @property
    def memory_size_bytes(self) -> int:
        """What is kept for all texts together, roughly."""
        ...

    @property
    def start(self) -> Any:
        """The state of the empty text; of a text of its own at every call."""
        ...

    def cost(self, state: Any) -> int:
        """Tokens within which the text can be ended: at least 1, ``NEVER`` if no way is known."""
        ...

    def stride(self, state: Any, remaining: int) -> int:
        """How many tokens are taken from a state before ``after`` is asked: at least 1.

        ``remaining``, here and below: the tokens that the text may still get.
        """
        ...

    def after(self, state: Any, token_ids: Sequence[int], matcher: Matcher) -> Any:
        """The state behind some tokens, no stop token among them; None where no way is known.

        matcher: stands behind the tokens, and does so again afterwards.
        """
        ...

    def is_free(self, state: Any, remaining: int) -> bool:
        """Whether every legal token leads to a state that costs less than ``remaining``.

        May be False although it is so: the rows are then looked at one by one.
        """
        ...

    def row(self, state: Any, remaining: int, matcher: Matcher) -> NDArray[np.int32]:
        """int32 [W]: tokens that lead to a state that costs less than ``remaining``.

        matcher: stands at the state, and does so again afterwards.
        With the stop tokens where the text may end; a token that the grammar refuses may be there.
        """
        ...

    def admits(self, state: Any, token_id: int, remaining: int, matcher: Matcher) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        ...


def pack_row(is_legal: NDArray[np.bool_]) -> NDArray[np.int32]:
    """bool [V] to int32 [W]: one row of a token bitmask."""
    bits = np.zeros(-(-len(is_legal) // 32) * 32, dtype=np.uint8)
    bits[: len(is_legal)] = is_legal
    row: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
    return row
