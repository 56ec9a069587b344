"""The mask rows of a step: filled on the host, read where the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.mask_block import MaskBlock
from guided_spec.grammar.mask_upload import MaskUpload
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.xgrammar_batch import XGrammarBatch
from guided_spec.ops.bitmask import num_mask_words
from guided_spec.ops.mailbox import answer_later

__all__ = ["MaskRows", "row_allows"]


class MaskRows:
    """Rows [requests, depths] of one vocabulary, each int32 [W]; reused from step to step.

    A row that nobody fills in a step reads as all ones: nothing forbidden.

    In memory all requests' rows of one depth lie together, so that both what a drafter asks for
    (one depth) and what the verifier asks for (the first depths) is one contiguous piece. For a
    CUDA device the memory is pinned, the copies do not block the host, and there are two blocks of
    it in turn: a step begins while the last one's rows may still be on their way.
    """

    def __init__(self, requests: int, depths: int, vocab_size: int, device: torch.device) -> None:
        self.requests = requests
        self.depths = depths
        self.device = device
        words = num_mask_words(vocab_size)
        is_cuda = device.type == "cuda"
        self._block, *self._blocks = (
            MaskBlock(requests * depths, words, is_pinned=is_cuda) for _ in range(1 + is_cuda)
        )
        self._none = requests * depths  # the row of a block that forbids nothing
        self._upload = MaskUpload(requests, depths, words, device) if is_cuda else None
        self._active = requests
        self._filling: Future[None] | None = None

    def clear(self, requests: int | None = None) -> None:
        """Start a step with this many requests, all of them by default; nothing is filled.

        What ``first`` and ``at_depths`` returned in the step before may change from here on, for
        whatever is launched later.
        """
        if self._filling is not None:  # a step that failed half-way may have left it running
            self._filling.exception()
            self._filling = None
        answer_later(None)  # so may a draft that this thread should have walked
        self._active = self.requests if requests is None else requests
        assert self._active <= self.requests
        self._blocks.append(self._block)
        self._block = self._blocks.pop(0)
        self._block.clear()
        if self._upload is not None:
            self._upload.begin()

    def fill_beside(self, fill: Callable[[], None]) -> Future[None]:
        """Run ``fill``, which fills rows of this step, on another thread."""
        self._filling = _beside().submit(fill)
        return self._filling

    def fill(self, matcher: GrammarMatcher, request: int, depth: int) -> None:
        """Fill one row from the matcher's state."""
        self._block.fill(matcher, self._at(request, depth))

    def fill_many(
        self, batch: XGrammarBatch, matchers: Sequence[Any], places: Sequence[tuple[int, int]]
    ) -> None:
        """Fill the row at ``places[i]``, (request, depth), from matcher i, for all i, in one call.

        All the matchers are xgrammar's own.
        """
        rows = [depth * self._active + request for request, depth in places]
        self._block.fill_many(batch, matchers, rows)

    def allows(self, request: int, depth: int, token_id: int) -> bool:
        """Whether the row admits the token; ids outside the vocabulary are never admitted."""
        return self._block.allows(self._at(request, depth), token_id)

    def words(self, request: int, depth: int) -> NDArray[np.int32]:
        """One row, int32 [W], on the host: a view."""
        return self._block.row(self._at(request, depth))

    def at_depths(self, depths: Sequence[int | None]) -> Tensor:
        """int32 [B, W] on the device: for request b its row at ``depths[b]``; all ones at None.

        On a CUDA device it is the same memory at every call: whoever needs the rows for longer
        copies them.
        """
        assert len(depths) == self._active
        depth = self._common(depths)
        if depth is not None:
            rows = self._block.rows(self._at(0, depth), self._at(0, depth + 1))
            if self._upload is None:
                return rows.clone()
            sent = self._upload.next_rows(rows)
            self._block.hold(sent.copied)
            return sent.rows
        places = [self._none if at is None else self._at(b, at) for b, at in enumerate(depths)]
        if self._upload is None:
            return self._block.gather(places)
        staged = self._upload.stage(len(depths))
        self._block.gather(places, staged)
        return self._upload.next_rows(staged).rows

    def addresses(self, depths: Sequence[int | None], count: int) -> NDArray[np.int64]:
        """Where the rows of ``at_depths`` lie on the host, int64 [count]; the rest forbids nothing.

        Whoever reads there has to be done before the next ``clear`` but one.
        """
        places = [self._none if at is None else self._at(b, at) for b, at in enumerate(depths)]
        return self._block.addresses([*places, *[self._none] * (count - len(places))])

    def first(self, requests: int, depths: int) -> Tensor:
        """int32 [requests, depths, W] on the device: the first rows of the step's requests.

        Contiguous; on a CUDA device at the same address for the same two numbers.
        """
        assert requests == self._active
        rows = self._block.rows(0, depths * requests)
        if self._upload is None:
            return rows.view(depths, requests, -1).transpose(0, 1).contiguous()
        sent = self._upload.verify_rows(rows, requests)
        self._block.hold(sent.copied)
        return sent.rows

    def _at(self, request: int, depth: int) -> int:
        return depth * self._active + request

    def _common(self, depths: Sequence[int | None]) -> int | None:
        """The one depth asked for, if the rows of all who ask for none are untouched there."""
        asked = {depth for depth in depths if depth is not None}
        if len(asked) != 1:
            return None
        (depth,) = asked
        others = [self._at(b, depth) for b, at in enumerate(depths) if at is None]
        return None if self._block.is_filled(others) else depth


def row_allows(row: NDArray[np.int32], token_id: int) -> bool:
    """Whether a row, int32 [W] on the host, admits the token; it admits no other ids."""
    return 0 <= token_id < len(row) * 32 and bool((int(row[token_id >> 5]) >> (token_id & 31)) & 1)


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="guided-spec-masks")
