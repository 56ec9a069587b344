"""Filters: what forbids tokens that a grammar allows, as a pure function of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.tables.token_table import UNBOUND


class Probe(Protocol):
    """A text that may be moved to look ahead, and has to be moved back: see ``GrammarMatcher``."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The text so far. Read only."""
        ...

    @property
    def unfiltered(self) -> Probe:
        """The same text without filters: its rows cost less, and may hold tokens refused here."""
        ...

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens."""
        ...

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        ...

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything."""
        ...

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether all these tokens are accepted, no stop token before the last; does not move."""
        ...

    def takes_each(self, texts: Sequence[Sequence[int]]) -> list[bool]:
        """``takes`` of each of them."""
        ...

    def interchangeable(self, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [W]: of some legal tokens those that others like them may stand for."""
        ...

    def forced_bytes(self) -> bytes:
        """What must come next in every text, as far as that is known; does not move."""
        ...


class Mark(NamedTuple):
    """What a filter knows of a text.

    at: tokens of the text when the filter last looked at it. state: of the filter; immutable.
    until: as long as the text has fewer tokens, its rows are not filtered, and the filter need not
        see its tokens, but for those in ``wakes``. ``at``: the next row may be filtered.
    """

    at: int
    state: Any
    until: int = UNBOUND


class RowFilter(Protocol):
    """Forbids tokens that a grammar allows. What it forbids depends on the text alone.

    wakes: tokens after which the filter has to look at the text again.

    ``text`` stands at the end of the text. A filter may move it, and moves it back.
    """

    @property
    def wakes(self) -> frozenset[int]: ...

    def start(self, length: int) -> Mark:
        """The mark at the start of the grammar, before which the text has ``length`` tokens."""
        ...

    def admits(self, mark: Mark, token_id: int, text: Probe) -> bool:
        """Whether a token may come next, as far as that is known before the grammar has it."""
        ...

    def after(self, mark: Mark, text: Probe) -> Mark | None:
        """The mark after the last token of ``text``; None where the filter refuses that token."""
        ...

    def restrict(self, mark: Mark, row: NDArray[np.int32], text: Probe) -> bool:
        """Clear bits of the next row, int32 [W]; returns whether any legal token was cleared."""
        ...

    def tokens_left(self, mark: Mark, length: int) -> int | None:
        """For so many tokens after ``length`` a table's rows may be used; None: not at all."""
        ...

    def fork(self) -> RowFilter:
        """The same filter for another text, which may run on another thread."""
        ...


class LookaheadFilter(RowFilter, Protocol):
    """A filter of the grammar itself, which a budget has to respect when it looks ahead."""

    def takes(self, mark: Mark, token_ids: Sequence[int]) -> bool:
        """Whether the filter allows tokens that the grammar accepts, one after another."""
        ...

    def interchangeable(self, mark: Mark, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [W]: of some legal tokens those that the filter treats like others of their kind.

        The rest may begin or complete a key that is there already.
        """
        ...

    def fork(self) -> LookaheadFilter: ...


def clear_refused(
    row: NDArray[np.int32], suspects: Iterable[int], takes: Callable[[int], bool]
) -> bool:
    """Clear the legal tokens of a row, int32 [W], that ``takes`` refuses; whether there were any.

    suspects: the tokens to ask about, each once.
    """
    bits, is_less = row.view(np.uint32), False
    for token in suspects:
        word, bit = token >> 5, np.uint32(1 << (token & 31))
        if bits[word] & bit and not takes(token):
            bits[word] &= ~bit
            is_less = True
    return is_less
