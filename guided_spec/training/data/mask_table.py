"""The mask rows of one batch: every row is kept once, however many places it belongs to."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.mask_rows import row_allows
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.ops.bitmask import num_mask_words

__all__ = ["MaskTable"]


class MaskTable:
    """Rows of int32 [W] words in host memory; row 0 is all ones and forbids nothing.

    capacity: ``add`` calls at most. Memory that is not filled costs nothing but addresses.
    """

    def __init__(self, capacity: int, vocab_size: int) -> None:
        words = num_mask_words(vocab_size)
        self._memory = torch.empty((capacity + 1, words), dtype=torch.int32)
        self._memory[0] = -1
        self._rows: NDArray[np.int32] = self._memory.numpy()
        self._keys = [0]
        self._known: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, matcher: GrammarMatcher) -> int:
        """The row of what may come next; does not move the matcher, which must not be terminated.

        It is filled in place: a row that turns out to be there already is filled over next time.
        """
        slot = len(self._keys)
        if not matcher.fill_next_token_bitmask(self._memory, slot):
            return 0
        row = self._rows[slot]
        key = zlib.crc32(row)
        known = self._known.setdefault(key, [])
        for other in known:
            if np.array_equal(self._rows[other], row):
                return other
        known.append(slot)
        self._keys.append(key)
        return slot

    def allows(self, slot: int, token_id: int) -> bool:
        """Whether a row admits the token; ids outside the vocabulary are never admitted."""
        return row_allows(self._rows[slot], token_id)

    def truncate(self, length: int) -> None:
        """Forget the rows from ``length`` on, which is at least 1."""
        for slot in range(length, len(self._keys)):
            self._known[self._keys[slot]].remove(slot)
        del self._keys[length:]

    def rows(self) -> Tensor:
        """int32 [len(self), W]: a view."""
        return self._memory[: len(self._keys)]
