"""Host memory for mask rows, whose untouched rows forbid nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.xgrammar_batch import XGrammarBatch

__all__ = ["MaskBlock"]


class MaskBlock:
    """int32 [rows, W], cleared and filled again in every step; row ``rows`` is never filled.

    words: W. is_pinned: whether a CUDA device can copy from it while the host goes on.

    ``clear`` writes nothing: a row that is not filled again is set to all ones when it is read.
    """

    def __init__(self, rows: int, words: int, *, is_pinned: bool) -> None:
        self._rows = torch.full((rows + 1, words), -1, dtype=torch.int32, pin_memory=is_pinned)
        self._array: NDArray[np.int32] = self._rows.numpy()
        # Single words are read in a quarter of the time.
        self._words: memoryview[int] = memoryview(self._array)  # type: ignore[arg-type]
        self._num_ids = words * 32
        self._is_filled = np.zeros(rows + 1, dtype=np.bool_)
        self._is_stale = np.zeros(rows + 1, dtype=np.bool_)  # holds what an earlier step filled
        self._copies: list[torch.cuda.Event] = []

    def clear(self) -> None:
        """Forget what was filled. Waits for the copies that are still under way."""
        for copied in self._copies:
            copied.synchronize()
        self._copies.clear()
        self._is_stale |= self._is_filled
        self._is_filled[:] = False

    def hold(self, copied: torch.cuda.Event) -> None:
        """A copy from here is under way: the next ``clear`` waits for its event."""
        self._copies.append(copied)

    def fill(self, matcher: GrammarMatcher, row: int) -> None:
        """Fill one row from the matcher's state."""
        self._is_filled[row] = True  # first: a matcher that fails may have written a part of it
        matcher.fill_next_token_bitmask(self._rows, row)

    def fill_many(self, batch: XGrammarBatch, matchers: Sequence[Any], rows: list[int]) -> None:
        """Fill ``rows`` from as many matchers that ``batch`` takes, in one call."""
        self._is_filled[rows] = True
        batch.fill(matchers, self._array, rows)

    def is_filled(self, rows: Sequence[int]) -> bool:
        """Whether any of these rows is filled."""
        return bool(self._is_filled[rows].any())

    def allows(self, row: int, token_id: int) -> bool:
        """Whether a row admits a token; it admits no ids that it has no bit for."""
        if not 0 <= token_id < self._num_ids:
            return False
        if not self._is_filled[row]:
            self._restore(row, row + 1)
        return bool((self._words[row, token_id >> 5] >> (token_id & 31)) & 1)

    def row(self, row: int) -> NDArray[np.int32]:
        """One row, int32 [W]: a view."""
        if self._is_stale[row] and not self._is_filled[row]:
            self._restore(row, row + 1)
        found: NDArray[np.int32] = self._array[row]
        return found

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop - 1``, int32 [stop - start, W]: a view, contiguous."""
        self._restore(start, stop)
        return self._rows[start:stop]

    def addresses(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Where rows in any order lie in memory, int64 [len(rows)]."""
        at = np.array(rows, dtype=np.int64)
        for row in at[self._is_stale[at] & ~self._is_filled[at]].tolist():
            self._restore(row, row + 1)
        return self._rows.data_ptr() + at * self._array.strides[0]

    def gather(self, rows: Sequence[int], out: Tensor | None = None) -> Tensor:
        """A copy of rows in any order, int32 [len(rows), W] on the host; in ``out`` if given."""
        for row in rows:
            self.row(row)
        return torch.index_select(self._rows, 0, torch.tensor(rows), out=out)

    def _restore(self, start: int, stop: int) -> None:
        is_left = self._is_stale[start:stop] & ~self._is_filled[start:stop]
        if is_left.any():
            self._array[start:stop][is_left] = -1
            self._is_stale[start:stop] &= ~is_left
