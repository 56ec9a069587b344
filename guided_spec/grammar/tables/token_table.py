"""A bounded automaton over tokens: the mask row of every state, and the state after each token."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.ops.mask_words import full_row

REFUSED = -1
"""The token is illegal."""
ENDED = -2
"""After a stop token."""
OUTSIDE = -3
"""The token is legal, and the table does not hold what follows it."""

MOST_AHEAD = 131
"""Nobody asks about so many tokens: a draft has 64."""
ANY_NUMBER = 255
UNBOUND = 2**40
"""More tokens than any text has."""


class Steps(NamedTuple):
    """``TokenTable.classes`` and ``then``, C numbers a state: Python reads its own integers there,
    in half of numpy's time."""

    classes: memoryview[int]
    then: memoryview[int]
    width: int


@dataclass(frozen=True, eq=False)
class TokenTable:
    """States 0 to N - 1, of which 0 is the start; immutable, shared by requests and processes.

    classes: int32 [V], of each token; tokens of a class lead from every state to the same one.
    then: int16 [N, C], the state after a token of a class, or ``REFUSED``, ``ENDED``, ``OUTSIDE``.
    rows: int32 [R, W], mask rows that differ. row_of: int32 [N], of each state.
    margins: uint8 [N], tokens that may follow before a text can leave the table; ``ANY_NUMBER`` for
    ``MOST_AHEAD`` or more.
    ends: int32 [N], bytes of the shortest path to the end, from the state or from one that may
    follow it and needs more.
    """

    classes: NDArray[np.int32]
    then: NDArray[np.int16]
    rows: NDArray[np.int32]
    row_of: NDArray[np.int32]
    margins: NDArray[np.uint8]
    ends: NDArray[np.int32]

    @property
    def num_states(self) -> int:
        """N, the number of states."""
        return len(self.then)

    @property
    def is_whole(self) -> bool:
        """Whether every text of the grammar stays inside."""
        return not bool((self.then == OUTSIDE).any())

    @property
    def memory_size_bytes(self) -> int:
        """Bytes of all arrays."""
        parts = (self.classes, self.then, self.rows, self.row_of, self.margins, self.ends)
        return sum(part.nbytes for part in parts)

    @cached_property
    def forbids(self) -> NDArray[np.bool_]:
        """bool [R]: whether a row forbids any token."""
        found: NDArray[np.bool_] = (self.rows != full_row(len(self.classes))).any(axis=1)
        return found

    def after(self, state: int, token_id: int) -> int:
        """The state after a token, or ``REFUSED``, ``ENDED``, ``OUTSIDE``."""
        then: int = self.then.item(state, self.classes.item(token_id))
        return then

    def states(self, state: int, token_ids: Sequence[int]) -> list[int]:
        """The states after each of the tokens, up to one that leaves the table or ends the text."""
        found: list[int] = []  # to call ``list[int]`` takes as long as to follow three tokens
        classes, then, width = self.steps
        size = len(classes)
        for token_id in token_ids:
            if not 0 <= token_id < size:
                break
            state = then[state * width + classes[token_id]]
            if state < 0:
                break
            found.append(state)
        return found

    @cached_property
    def stops(self) -> frozenset[int]:
        """The tokens that end a text."""
        ending = (self.then == ENDED).any(axis=0)
        return frozenset(np.flatnonzero(ending[self.classes]).tolist())

    def row(self, state: int) -> NDArray[np.int32]:
        """int32 [W]: the mask row of a state. Read only."""
        row: NDArray[np.int32] = self.rows[self.row_of[state]]
        return row

    @cached_property
    def fingerprint(self) -> int:
        """A positive number of 33 bits; tables with different states or rows have different
        fingerprints, but for one chance in billions."""
        found = 0
        for part in (self.classes, self.then, self.rows, self.row_of):
            found = zlib.crc32(part.data, found)
        return found + 1

    @cached_property
    def steps(self) -> Steps:
        """The arrays that Python looks up token by token, as memoryviews."""
        classes: Any = self.classes
        then: Any = self.then.reshape(-1)
        return Steps(memoryview(classes), memoryview(then), self.then.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        """The arrays; another process computes the rest again."""
        return {field.name: self.__dict__[field.name] for field in fields(self)}


@dataclass(slots=True)
class TableState:
    """The state of a text in a table. The caller may advance it.

    spare: tokens that a budget leaves to the text, or fewer. A row is the table's own if, after the
    next token, enough of them are left for ``ends`` and a stop token.
    reach: the number of next tokens after which the rows are known to be the table's, or fewer.
    """

    table: TokenTable
    state: int
    spare: int = UNBOUND
    reach: int = -1

    def reaches(self, ahead: int) -> bool:
        """Whether the rows after up to ``ahead`` more tokens are the table's own."""
        if self.reach < ahead:  # of an earlier state, and less than this one's
            table, state = self.table, self.state
            # A budget looks at what is after the last row, too.
            within = self.spare - table.ends.item(state) - 2
            self.reach = min(min(table.margins.item(state), MOST_AHEAD) - 1, within)
        return self.reach >= ahead

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Advance by some tokens; False, and no change, if they leave the table or end the text."""
        count, states = len(token_ids), self.table.states(self.state, token_ids)
        if len(states) < count:
            return False
        if states:
            self.state = states[-1]
        self.spare -= count
        self.reach -= count
        return True
