"""The masks that one of vLLM's drafters draws its tokens under, position by position.

A token that the host has drafted goes to the drafter as a mask that admits it alone: the drafter
draws it with probability 1 and reads it next, so that its own tokens continue the host's. That
holds inside of a CUDA graph too, and the verifier gets the distribution that was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.integrations.vllm.drafts.tabled_requests import TAIL
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows, TableAdvance
from guided_spec.ops.bitmask import apply_token_bitmask
from guided_spec.ops.host import to_device
from guided_spec.ops.mask_words import ids_of, num_mask_words, row_of

# Words of a row that are read first: most vocabularies begin with common tokens.
_FIRST = 64

Lead = Callable[[Lookahead], None]
"""Drafts on the host, after the tokens that a lookahead holds."""


class DraftMasks:
    """The masks of one drafter.

    rows: [most requests of a batch, K + 1] of the target's vocabulary, on the drafter's device.
    drafted: gives the tokens [B] drafted last, on the device, for the number of those before them
        and B.
    target_ids: int64 [D], the target's token for each token of a smaller draft vocabulary; the
        drafter's logits are over the target's vocabulary all the same, as vLLM has them. None where
        the drafter knows every token.

    own: int32 [W] on the host, the tokens that the drafter knows; None for all.
    """

    def __init__(
        self,
        rows: MaskRows,
        vocab_size: int,
        drafted: Callable[[int, int], Tensor],
        target_ids: Tensor | None = None,
    ) -> None:
        self._rows = rows
        self._drafted = drafted
        self.own = None if target_ids is None else row_of(target_ids.tolist(), vocab_size)
        self._vocab_size = vocab_size
        self._num_words = num_mask_words(vocab_size)
        size = (rows.requests, self._num_words + TAIL)  # rows as of ``drafter_rows``
        self._words = torch.full(size, -1, dtype=torch.int32, device=rows.device)
        self._lookahead: Lookahead | None = None
        self._lead: Lead | None = None
        self._tabled: TableAdvance | None = None
        self._num_requests = 0
        self._has_free = False
        self._position = 0
        self._is_awaited = False
        self._is_ready = False
        self._is_clear = True

    def start(
        self,
        constraints: Sequence[Constraint | None],
        num_draft: int,
        lead: Lead | None = None,
        tabled: TableAdvance | None = None,
    ) -> None:
        """Begin the drafts of a batch [B] with at least one request that is constrained or tabled.

        lead: drafts on the host, first and after each token that the drafter drew. tabled: the
            states of the requests whose rows come from tables; they have no constraint here.
        """
        if any(constraints):
            # Nobody asks what a free request drafts.
            limits = [0 if constraint is None else num_draft for constraint in constraints]
            self._lookahead = Lookahead.fork(constraints, self._rows, limits)
        self._lead, self._tabled = lead, tabled
        self._num_requests = len(constraints)
        self._has_free = None in constraints
        self._position, self._is_ready, self._is_clear = 0, False, False

    @property
    def known(self) -> list[int] | None:
        """[B] the tokens of this position where the host knows the rest of every draft, else None.

        0 after the end of a draft.
        """
        if self._lookahead is None or self._has_free or any(self._lookahead.is_open):
            return None
        return [max(0, token) for token in self._known(self._lookahead)]

    @property
    def position(self) -> int:
        """Tokens that were drawn so far."""
        return self._position

    def turn(self) -> None:
        """Make the masks of the next position, if they are not there.

        Waits for the last token where the host needs it and does not know it.
        """
        lookahead, tabled, count = self._lookahead, self._tabled, self._num_requests
        if self._is_ready or (lookahead is None and tabled is None):
            return
        if tabled is not None and self._position > 0:
            before = self._position - 1
            tabled.append(before, self._drafted(before, count).long().contiguous())
        if lookahead is not None:
            self._fill(lookahead)
        if tabled is not None:
            tabled.mask(self._position, self._words[:count], is_blank=lookahead is None)
        self._is_ready = True

    def _fill(self, lookahead: Lookahead) -> None:
        """The masks that the host makes."""
        count = self._num_requests
        if self._is_awaited:
            depth = self._position - 1
            lookahead.accept_ids(self._drafted(depth, count).tolist(), depth=depth)
        if self._lead is not None and (self._is_awaited or self._position == 0):
            self._lead(lookahead)
        lengths = map(len, lookahead.drafted)
        pairs = zip(lookahead.is_open, lengths, strict=True)
        self._is_awaited = any(is_open and length == self._position for is_open, length in pairs)
        mask = lookahead.next_mask()
        assert mask is not None  # some request is constrained
        self._put(lookahead, mask, self._known(lookahead))

    def see(self, logits: Tensor) -> Tensor:
        """The logits [>= B, V] of a position, masked; the rows of free requests are as they were.

        Reads what is on the device and nothing else, so that it may be captured in a CUDA graph.
        """
        rows = self._words[: len(logits)]
        masked = apply_token_bitmask(logits, rows[:, : self._num_words])
        only = rows[:, self._num_words : self._num_words + 1].long()
        column = only.clamp(min=0)
        value = torch.where(only < 0, masked.gather(1, column), 0.0)
        return masked.scatter_(1, column, value)

    def drawn(self) -> None:
        """A token was drawn from the logits of this position."""
        self._position += 1
        self._is_ready = False

    def finish(self) -> None:
        """The draft is there."""
        self._lookahead = self._lead = self._tabled = None
        self._is_awaited = False

    def clear(self) -> None:
        """Forbid nothing from here on: a graph applies the masks to free requests as well."""
        self.finish()
        if not self._is_clear:
            self._words.fill_(-1)
            self._is_clear = True

    def _known(self, lookahead: Lookahead) -> list[int]:
        """[B] the tokens of this position, -1 where the host knows none."""
        at = self._position
        return [row[at] if len(row) > at else -1 for row in lookahead.drafted]

    def _put(self, lookahead: Lookahead, mask: Tensor, known: Sequence[int]) -> None:
        """mask: int32 [B, W] of the requests without a known token.

        What is asked of single rows is asked of them on the host: a few microseconds, where each
        launch of a kernel costs as much, and batches of one request wait for these.
        """
        count, only, words = len(known), [*known], mask
        lost = list[int]()
        for request, row in self._starved(lookahead, known):
            # If one token alone is legal, that is the draft; else the drafter draws what it likes,
            # which is refused, and the draft is over.
            legal = ids_of(row, self._vocab_size)
            if len(legal) == 1:
                only[request] = legal[0]
            else:
                lost.append(request)
        if lost:
            words = words.index_fill(0, to_device(lost, mask.device), -1)
        rows = self._words[:count]
        if max(only) >= 0:
            given = to_device(only, mask.device)
            words = torch.where(given.unsqueeze(1) < 0, words, 0)
            rows[:, self._num_words] = given
        else:
            rows[:, self._num_words] = -1
        rows[:, : self._num_words] = words

    def _starved(
        self, lookahead: Lookahead, known: Sequence[int]
    ) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """The requests of which the drafter knows no legal token, and their rows, int32 [W]."""
        own = self.own
        if own is None:
            return
        for request, is_open in enumerate(lookahead.is_open):
            row = lookahead.peek(request) if is_open and known[request] < 0 else None
            if row is None or (row[:_FIRST] & own[:_FIRST]).any() or (row & own).any():
                continue
            yield request, row
