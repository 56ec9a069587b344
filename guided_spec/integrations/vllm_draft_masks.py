"""The masks of a vLLM drafter: every draft token is drawn from the legal ones.

Before each position the host looks at what was drafted, leads the forks on, and sends up the next
masks: one download and one upload a position. What is masked are the logits that the drafter
samples from, so that sampled drafts are verified with the distribution they were drawn from.

The masks lie at one address. A CUDA graph that holds the sampling reads them there, and the host
writes them between two replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.grammar.mask_rows import MaskRows
from guided_spec.ops.bitmask import (
    apply_token_bitmask,
    num_mask_words,
    only_legal_token,
    translate_bitmask,
)

__all__ = ["DraftMasks"]


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
        self._forced = torch.full(size[:1], -1, dtype=torch.int64, device=rows.device)
        self._lookahead: Lookahead | None = None
        self._num_requests = 0
        self._position = 0
        self._is_ready = False
        self._is_clear = True

    def start(self, constraints: Sequence[Constraint | None], num_draft: int) -> None:
        """Begin the drafts of a batch [B] in which at least one request is constrained."""
        limits = [num_draft] * len(constraints)
        self._lookahead = Lookahead.fork(constraints, self._rows, limits)
        self._num_requests = len(constraints)
        self._position, self._is_ready, self._is_clear = 0, False, False

    def turn(self) -> None:
        """Make the masks of the next position, if they are not there; waits for its last token."""
        if self._lookahead is None or self._is_ready:
            return
        count = self._num_requests
        if self._position > 0:
            self._lookahead.accept(self._drafted(self._position - 1, count))
        mask = self._lookahead.next_mask()
        assert mask is not None  # some request is constrained
        if self._target_ids is None:
            self._words[:count] = mask
        else:
            # The drafter may know none of the legal tokens. If there is one alone, that is the
            # draft; else it draws what it likes, which is refused, and the draft is over.
            is_starved = (translate_bitmask(mask, self._target_ids) == 0).all(-1)
            forced = torch.where(is_starved, only_legal_token(mask), -1)
            is_lost = is_starved & (forced < 0)
            self._words[:count] = torch.where(is_lost.unsqueeze(1), -1, mask)
            self._forced[:count] = forced
        self._is_ready = True

    def see(self, logits: Tensor) -> Tensor:
        """The logits [>= B, V] of a position, masked; the rows of free requests are as they were.

        Reads what is on the device and nothing else, so that it may be captured in a CUDA graph.
        """
        count = len(logits)
        masked = apply_token_bitmask(logits, self._words[:count])
        if self._target_ids is None:
            return masked
        forced = self._forced[:count].unsqueeze(1)
        column = forced.clamp(min=0)
        value = torch.where(forced < 0, masked.gather(1, column), 0.0)
        return masked.scatter_(1, column, value)

    def drawn(self) -> None:
        """A token was drawn from the logits of this position."""
        self._position += 1
        self._is_ready = False

    def finish(self) -> None:
        """The draft is there."""
        self._lookahead = None

    def clear(self) -> None:
        """Forbid nothing from here on: a graph applies the masks to free requests as well."""
        self._lookahead = None
        if not self._is_clear:
            self._words.fill_(-1)
            self._forced.fill_(-1)
            self._is_clear = True
