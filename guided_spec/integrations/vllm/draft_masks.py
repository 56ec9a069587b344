"""The masks that one of vLLM's drafters draws its tokens under, position by position.

A token that the host has drafted goes to the drafter as a mask that admits it alone: the drafter
draws it with probability 1 and reads it next, so that its own tokens continue the host's. That
holds inside of a CUDA graph too, and the verifier gets the distribution that was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.bitmask import apply_token_bitmask, only_legal_token, translate_bitmask
from guided_spec.ops.host import to_device
from guided_spec.ops.mask_words import num_mask_words

__all__ = ["DraftMasks", "Lead"]

Lead = Callable[[Lookahead], None]
"""Drafts on the host, behind what a lookahead holds."""


class DraftMasks:
    """The masks of one drafter.

    rows: [most requests of a batch, K + 1] of the target's vocabulary, on the drafter's device.
    drafted: gives the tokens [B] drafted last, on the device, for the number of those before them
        and B.
    target_ids: int64 [D], the target's token for each token of a smaller draft vocabulary, on the
        device; the drafter's logits are over the target's vocabulary all the same, as vLLM has
        them. None where the drafter knows every token.
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
        self._target_ids = target_ids
        size = (rows.requests, num_mask_words(vocab_size))
        self._words = torch.full(size, -1, dtype=torch.int32, device=rows.device)
        self._only = torch.full(size[:1], -1, dtype=torch.int64, device=rows.device)
        self._lookahead: Lookahead | None = None
        self._lead: Lead | None = None
        self._num_requests = 0
        self._has_free = False
        self._position = 0
        self._is_awaited = False
        self._is_ready = False
        self._is_clear = True

    def start(
        self, constraints: Sequence[Constraint | None], num_draft: int, lead: Lead | None = None
    ) -> None:
        """Begin the drafts of a batch [B] in which at least one request is constrained.

        lead: drafts on the host, first and behind each token that the drafter drew.
        """
        # Nobody asks what a free request drafts.
        limits = [0 if constraint is None else num_draft for constraint in constraints]
        self._lookahead = Lookahead.fork(constraints, self._rows, limits)
        self._lead = lead
        self._num_requests = len(constraints)
        self._has_free = None in constraints
        self._position, self._is_ready, self._is_clear = 0, False, False

    @property
    def known(self) -> list[int] | None:
        """[B] the tokens of this position where the host knows the rest of every draft, else None.

        0 behind the end of a draft.
        """
        if self._lookahead is None or self._has_free or any(self._lookahead.is_open):
            return None
        return [max(0, token) for token in self._known()]

    @property
    def position(self) -> int:
        """Tokens that were drawn so far."""
        return self._position

    def turn(self) -> None:
        """Make the masks of the next position, if they are not there.

        Waits for the last token where the host does not know it.
        """
        lookahead, count = self._lookahead, self._num_requests
        if lookahead is None or self._is_ready:
            return
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
        self._put(mask, self._known())
        self._is_ready = True

    def see(self, logits: Tensor) -> Tensor:
        """The logits [>= B, V] of a position, masked; the rows of free requests are as they were.

        Reads what is on the device and nothing else, so that it may be captured in a CUDA graph.
        """
        count = len(logits)
        masked = apply_token_bitmask(logits, self._words[:count])
        only = self._only[:count].unsqueeze(1)
        column = only.clamp(min=0)
        value = torch.where(only < 0, masked.gather(1, column), 0.0)
        return masked.scatter_(1, column, value)

    def drawn(self) -> None:
        """A token was drawn from the logits of this position."""
        self._position += 1
        self._is_ready = False

    def finish(self) -> None:
        """The draft is there."""
        self._lookahead = self._lead = None
        self._is_awaited = False

    def clear(self) -> None:
        """Forbid nothing from here on: a graph applies the masks to free requests as well."""
        self.finish()
        if not self._is_clear:
            self._words.fill_(-1)
            self._only.fill_(-1)
            self._is_clear = True

    def _known(self) -> list[int]:
        """[B] the tokens of this position, -1 where the host knows none."""
        assert self._lookahead is not None
        at = self._position
        return [row[at] if len(row) > at else -1 for row in self._lookahead.drafted]

    def _put(self, mask: Tensor, known: Sequence[int]) -> None:
        """mask: int32 [B, W] of the requests without a known token."""
        count = len(known)
        words, only = mask, None
        if self._target_ids is not None:
            # The drafter may know none of the legal tokens. If there is one alone, that is the
            # draft; else it draws what it likes, which is refused, and the draft is over.
            is_starved = (translate_bitmask(mask, self._target_ids) == 0).all(-1)
            only = torch.where(is_starved, only_legal_token(mask), -1)
            is_lost = is_starved & (only < 0)
            words = torch.where(is_lost.unsqueeze(1), -1, mask)
        if any(token >= 0 for token in known):
            given = to_device(known, mask.device)
            only = given if only is None else torch.where(given < 0, only, given)
            words = torch.where(given.unsqueeze(1) < 0, words, 0)
        self._words[:count] = words
        self._only[:count] = -1 if only is None else only
