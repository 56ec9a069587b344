"""The host memory that the mask rows of a step are filled into."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.ops.bitmask import num_mask_words

__all__ = ["MaskRows"]


class MaskRows:
    """Rows [requests, depths] of one vocabulary, each int32 [W]; reused from step to step.

    A row that nobody fills in a step reads as all ones: nothing forbidden. The memory is pinned
    when the masks go to a CUDA device, so that the copy does not block the host.
    """

    def __init__(self, requests: int, depths: int, vocab_size: int, device: torch.device) -> None:
        self.requests = requests
        self.depths = depths
        self.device = device
        words = num_mask_words(vocab_size)
        pin = device.type == "cuda"
        # One row more than is ever filled: what a request reads that is not asked for its mask.
        size = (requests * depths + 1, words)
        self._rows = torch.full(size, -1, dtype=torch.int32, pin_memory=pin)
        self._array = self._rows.numpy()
        self._dirty: set[int] = set()
        self.filling: Future[None] | None = None  # whoever fills on another thread says so here

    def clear(self) -> None:
        """Start a step: forget what the last one filled."""
        if self.filling is not None:  # a step that failed half-way may have left it running
            self.filling.exception()
            self.filling = None
        for row in self._dirty:
            self._array[row] = -1
        self._dirty.clear()

    def fill(self, matcher: GrammarMatcher, request: int, depth: int) -> None:
        """Fill one row from the matcher's state."""
        row = request * self.depths + depth
        matcher.fill_next_token_bitmask(self._rows, row)
        self._dirty.add(row)

    def allows(self, request: int, depth: int, token_id: int) -> bool:
        """Whether the row admits the token; ids outside the vocabulary are never admitted."""
        row = self._array[request * self.depths + depth]
        if not 0 <= token_id < len(row) * 32:
            return False
        return bool((int(row[token_id >> 5]) >> (token_id & 31)) & 1)

    def words(self, request: int, depth: int) -> NDArray[np.int32]:
        """One row, int32 [W], on the host: a view."""
        row: NDArray[np.int32] = self._array[request * self.depths + depth]
        return row

    def at_depths(self, depths: list[int | None]) -> Tensor:
        """int32 [B, W] on the device: for request b its row at ``depths[b]``; all ones at None."""
        rows = [-1 if at is None else b * self.depths + at for b, at in enumerate(depths)]
        index = torch.tensor([row % len(self._rows) for row in rows])
        return self._rows.index_select(0, index).to(self.device)

    def first(self, requests: int, depths: int) -> Tensor:
        """int32 [requests, depths, W] on the device: the first rows of the first requests."""
        rows = self._rows[:-1].view(self.requests, self.depths, -1)[:requests, :depths]
        return rows.to(self.device, non_blocking=True)
