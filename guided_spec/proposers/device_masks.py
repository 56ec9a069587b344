"""The masks of a draft that is one CUDA graph, which waits for each of them while it runs.

The host fills a mask when it has seen the token before it, and launches nothing in between: see
``guided_spec.ops.mailbox``. Rows of tables, and rows that forbid nothing, are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import TabledTexts
from guided_spec.ops.host import pad_ids, to_device
from guided_spec.ops.mailbox import Mailbox, Reply
from guided_spec.proposers.draft_session import DraftRows, DrawnFrom, DrawnTokens


class DraftPrefix(NamedTuple):
    """What the drafts hold before a head continues.

    token_ids: int64 [B, K] on the host, -1 after each row's end. counts: int64 [B] on the head's
    device.
    """

    token_ids: Tensor
    counts: Tensor

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[int]], width: int, device: torch.device
    ) -> DraftPrefix:
        """rows: [B] tokens, fewer than ``width`` each."""
        return cls(pad_ids(rows, width, -1), to_device([len(row) for row in rows], device))

    def after(self, drawn: Tensor) -> Tensor:
        """[K, B, ...]: ``drawn`` shifted to what comes after each row's tokens; then arbitrary."""
        steps = torch.arange(len(drawn), device=drawn.device).unsqueeze(1)
        indices = (self.counts + steps).clamp_max(len(drawn) - 1)
        return drawn[indices, torch.arange(len(self.counts), device=drawn.device)]


class DraftBuffers(NamedTuple):
    """Where graphs leave what they drew, in the first rows; the next draft overwrites it.

    ids: int64 [K, R], 0 where there is none. sources: int64 [K + 1, R], where the rows of tables
    lie, see ``Lookahead.leave``. probs: float32 [K, R, D], None where all are greedy. rescued:
    int64 [K, R], see ``DraftChoice``; None without a reduced vocabulary, and where all are greedy.
    """

    ids: Tensor
    sources: Tensor
    probs: Tensor | None
    rescued: Tensor | None


class DeviceMasks:
    """Fills the masks that a draft of the device waits for; a ``MaskSource``.

    buffers: where the draft comes to lie. size: rows of its graph. prefix: None where no draft
    holds anything before; a request that drafts nothing has none. texts: whose rows the device
    takes from tables; None where there are none.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        rows: DraftRows,
        buffers: DraftBuffers,
        size: int,
        prefix: DraftPrefix | None = None,
        texts: TabledTexts | None = None,
    ) -> None:
        self._mailbox, self._rows, self._size = mailbox, rows, size
        self._buffers, self._prefix = buffers, prefix
        self._count = rows.batch.num_draft_tokens
        self._replies = dict[int, Reply]()  # by depth, as far as anybody has waited
        waits = bool(rows.masked) and (texts is None or not texts.is_alone)
        self._depth = self._first() if waits else self._count  # the next position to accept
        if texts is not None:
            rows.lookahead.leave(texts, buffers.sources[: self._count + 1])
        if not waits:
            mailbox.release()

    @property
    def needs_host(self) -> bool:
        """Whether the device waits for the host before the draft is made."""
        return self._depth < self._count

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        """``accept_masked`` while the device waits for masks; None where it does not."""
        return self.accept_masked if self.needs_host else None

    @property
    def ids(self) -> Tensor:
        """What is drawn, int64 [B, K] target ids, 0 where there is none."""
        return self._own(self._buffers.ids)

    @property
    def drawn_from(self) -> DrawnFrom | None:
        """What the tokens were drawn from; None where every request is greedy."""
        _, _, probs, rescued = self._buffers
        if probs is None:
            return None
        return DrawnFrom(self._own(probs), None if rescued is None else self._own(rescued))

    def begin(self) -> None:
        """Fill the first mask. Positions before it are of prefix tokens only."""
        with self._advancing() as lookahead:
            for depth in range(self._depth + 1):
                self._post(lookahead, depth)

    def accept_masked(self) -> None:
        """Accept the masked tokens as they come, to the last, and fill the mask after each.

        Does nothing once all are accepted.
        """
        self.accept_up_to(self._count)

    def accept_up_to(self, count: int) -> None:
        """``accept_masked`` of the first ``count`` positions of the draft."""
        if self._depth >= count:
            return
        try:
            with self._advancing() as lookahead:
                while self._depth < count:
                    self._accept_next(lookahead)
        except BaseException:
            self._end()
            raise

    def begin_report(self) -> None:
        """Does nothing: the device reports each token as it draws it."""

    def report(self) -> DrawnTokens:
        """Wait for all that was drawn."""
        replies = [self._wait(depth) for depth in range(self._count)]
        token_ids, starved = zip(*replies, strict=True)
        return DrawnTokens(token_ids, starved, [0] * len(self._rows.starts))

    def _accept_next(self, lookahead: Lookahead) -> None:
        drawn = self._wait(self._depth)
        # A draft that holds more is still being read there.
        lookahead.accept_ids(drawn.token_ids, drawn.starved, self._depth)
        self._depth += 1
        if self._depth >= self._count or not lookahead.can_draft(1):  # no mask is needed any more
            self._end()
        else:
            self._post(lookahead, self._depth)

    def _first(self) -> int:
        """The first position at which any request draws under a mask."""
        if self._prefix is None:
            return 0
        return min(self._rows.starts[row] for row in self._rows.masked)

    def _own(self, drawn: Tensor) -> Tensor:
        """[B, K, ...]: a copy of what is in the buffers that each request drew itself."""
        own = drawn[: self._count, : len(self._rows.starts)]
        own = own if self._prefix is None else self._prefix.after(own)
        return own.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def _wait(self, depth: int) -> Reply:
        found = self._replies.get(depth)
        if found is None:
            found = self._mailbox.wait(depth, len(self._rows.starts), self._check)
            self._replies[depth] = found
        return found

    def _post(self, lookahead: Lookahead, depth: int) -> None:
        self._mailbox.post(depth, lookahead.next_rows(self._size, depth))

    def _end(self) -> None:
        self._depth = self._count
        self._mailbox.release()

    def _check(self) -> None:
        if self._buffers.ids.is_cuda:
            torch.cuda.current_stream(self._buffers.ids.device).synchronize()

    @contextmanager
    def _advancing(self) -> Iterator[Lookahead]:
        """Inside, the requests are open that draft under masks. No turn ends before the draft."""
        lookahead = self._rows.lookahead
        with lookahead.pausing(None), lookahead.until(self._rows.masked_ends):
            yield lookahead
