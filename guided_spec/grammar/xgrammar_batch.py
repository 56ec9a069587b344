"""Rows of many of xgrammar's own matchers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

__all__ = ["XGrammarBatch"]


class XGrammarBatch:
    """One native loop instead of one of Python's. Used by one thread at a time.

    The interpreter is free for other threads until the last row is filled. xgrammar's own threads
    stay out of it: it starts them anew for every call, and hands out single rows under a lock.
    """

    def __init__(self) -> None:
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)

    @staticmethod
    def takes(matcher: object) -> bool:
        """Whether the matcher is xgrammar's own."""
        return isinstance(matcher, xgrammar.GrammarMatcher)

    def fill(
        self, matchers: Sequence[Any], bitmask: NDArray[np.int32], rows: Sequence[int]
    ) -> None:
        """Write row ``rows[i]`` of a contiguous int32 [rows, W] bitmask from matcher i, for all i.

        The matchers stay where they are. Raises RuntimeError where one of them is terminated: rows
        of any of them may be left unwritten then.
        """
        self._batch.batch_fill_next_token_bitmask(list(matchers), bitmask, list(rows))
