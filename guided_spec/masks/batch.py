"""The rows of many matchers in one native call of the library that they belong to."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from guided_spec.home import Home

if TYPE_CHECKING:  # it loads transformers
    from guided_spec.grammar.backends.llguidance import LLGuidanceMatcher


class RowBatch:
    """One native loop instead of one of Python's. Used by one thread at a time.

    The interpreter is free for other threads until the last row is filled. Row by row, a thread
    that runs Python all the time would delay each of llguidance's by a turn of 1 to 5 ms. Neither
    library's own threads are used: xgrammar starts new ones for every call, and takes a lock for
    each row; llguidance's matchers of one grammar wait for each other.
    """

    def __init__(self) -> None:
        import xgrammar  # only here, as the other: they load transformers

        from guided_spec.grammar.backends.llguidance import LLGuidanceMatcher

        self._xgrammar = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._of_xgrammar, self._of_llguidance = xgrammar.GrammarMatcher, LLGuidanceMatcher
        self._llguidance: Any = None  # made where it is needed: it has a thread
        self._home = Home("RowBatch")

    def takes(self, matcher: object) -> bool:
        """Whether the matcher is one of the libraries' own."""
        return isinstance(matcher, (self._of_xgrammar, self._of_llguidance))

    def fill(
        self, matchers: Sequence[Any], bitmask: NDArray[np.int32], rows: Sequence[int]
    ) -> None:
        """Write row ``rows[i]`` of a contiguous int32 [rows, W] bitmask from matcher i, for all i.

        The matchers stay where they are. Raises RuntimeError where one of them is terminated: rows
        of any of them may be left unwritten then.
        """
        others: list[tuple[LLGuidanceMatcher, int]] = []
        own: list[tuple[Any, int]] = []
        for cell in zip(matchers, rows, strict=True):
            (others if isinstance(cell[0], self._of_llguidance) else own).append(cell)
        if own:
            listed, places = zip(*own, strict=True)
            self._xgrammar.batch_fill_next_token_bitmask(list(listed), bitmask, list(places))
        if others:
            self._fill_llguidance(others, bitmask)

    def _fill_llguidance(
        self, cells: Sequence[tuple[LLGuidanceMatcher, int]], bitmask: NDArray[np.int32]
    ) -> None:
        natives = [(matcher.native, row) for matcher, row in cells]
        if self._llguidance is None or not self._home.is_here:
            self._home = Home("RowBatch")  # a fork has none of the threads
            self._llguidance = importlib.import_module("llguidance").LLExecutor(1)
        row_bytes = bitmask.strides[0]
        self._llguidance.unsafe_compute_mask_ptr(
            natives, bitmask.ctypes.data, row_bytes, len(bitmask)
        )
        for matcher, row in cells:
            matcher.finish(bitmask[row])
