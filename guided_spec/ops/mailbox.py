"""Memory through which the host and a running CUDA graph hand each other mask rows and tokens.

A draft under masks goes back and forth: a token needs the mask after the token before it, which
only the host can fill. Launching every piece of the draft when its mask is there leaves the device
waiting for launches. So all of it is launched at once: it waits on the device for each mask, and
reports each token by writing it where the host looks.

Every draft has a ticket. An order and a reply count only with the ticket of their draft, so that
nothing has to be cleared between two drafts. A reply is one word with its ticket inside. An order
is its rows' addresses first and its ticket last: x86 processors show their writes in that order
(``can_share``).

The device waits for a limited time, and goes on with whatever rows it finds. What it draws from
them has the probabilities that it reports: the draft is poor, and the text exact. So the host
serves the mailbox before it waits for the device: see ``DraftInFlight.serve_mailbox``.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.ops.host import yield_cpu
from guided_spec.ops.kernels import has_triton, kernels_of
from guided_spec.ops.table_rows import advance, copy_rows

UNTICKETED = 0  # with it, a fetch does not wait
LAST_TICKET = 2**31 - 1
# Polls of an order before the device continues without it, a microsecond or more each. Where
# rows are slow, a host takes tens of milliseconds for a position.
PATIENCE = 300_000
IMPATIENCE = 1.0  # seconds without a reply before the host asks the device what is wrong
TOKEN_BITS = 31
TOKEN_MASK = 2**TOKEN_BITS - 1


class Reply(NamedTuple):
    """What was drawn at one position, [B] each.

    token_ids: -1 where there is none. starved: 1 where the drafter's vocabulary had no legal token.
    """

    token_ids: list[int]
    starved: list[int]


class Report(NamedTuple):
    """Where a reply is written.

    ticket: int64 [1]. words: int64 [R or more], of ``Mailbox.replies``. ids: int64 [R], gets the
    tokens as ids that a model can read, 0 where there is none; its elements may lie apart.
    """

    ticket: Tensor
    words: Tensor
    ids: Tensor


class Mailbox:
    """Orders to the device and replies from it, for ``depths`` positions of a draft.

    rows: requests at most. device: that reads and writes here; the memory is pinned where it is a
    CUDA device.

    orders: int64 [depths, 1 + rows], a ticket and addresses; 0 is a row that forbids nothing.
    replies: int64 [depths, rows].
    """

    def __init__(self, depths: int, rows: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.orders = torch.zeros(depths, 1 + rows, dtype=torch.int64, pin_memory=pin)
        self.replies = torch.zeros(depths, rows, dtype=torch.int64, pin_memory=pin)
        self._orders: NDArray[np.int64] = self.orders.numpy()
        # Python reads its own integers from it: a handful of them in a fifth of numpy's time.
        self._replies: memoryview[int] = memoryview(self.replies.numpy().reshape(-1))  # type: ignore[arg-type]
        self._is_blank = True  # no order has other rows
        self.ticket = UNTICKETED

    def begin(self) -> int:
        """The ticket of the next draft, 1 to ``LAST_TICKET``."""
        self.ticket = self.ticket % LAST_TICKET + 1
        return self.ticket

    def post(self, depth: int, addresses: Sequence[int]) -> None:
        """The rows of one position are filled, int32 [W] in pinned memory at [R] addresses.

        0: the row forbids nothing.
        """
        self._is_blank = False
        self._orders[depth, 1 : 1 + len(addresses)] = addresses
        self._orders[depth, 0] = self.ticket

    def release(self) -> None:
        """The device waits for no position any more: it finds rows that forbid nothing."""
        waits = self._orders[:, 0] != self.ticket
        if not self._is_blank:
            self._orders[waits, 1:] = 0
            self._is_blank = bool(waits.all())
        self._orders[waits, 0] = self.ticket

    def wait(self, depth: int, count: int, check: Callable[[], None]) -> Reply:
        """The first ``count`` replies of one position, once all are there.

        check: called where they are late, and has to wait for the device. Raises what it raises,
        and RuntimeError where there is still no reply afterwards.
        """
        words = self._read(depth, count)
        late = 0.0 if words else time.monotonic() + IMPATIENCE
        while not words:
            yield_cpu()  # other threads have work to do
            is_late = time.monotonic() > late
            if is_late:
                check()
            words = self._read(depth, count)
            if is_late and not words:
                raise RuntimeError(f"the device drafted no token {depth}")
        tokens = [(word & TOKEN_MASK) - 1 for word in words]
        return Reply(tokens, [word >> TOKEN_BITS & 1 for word in words])

    def _read(self, depth: int, count: int) -> list[int]:
        """The first replies of a position, none where any of them is missing."""
        start = depth * self.replies.shape[1]
        words = self._replies[start : start + count].tolist()
        least = self.ticket << 32
        return words if min(words) >= least and max(words) < least + 2**32 else []


def can_run(device: torch.device) -> bool:
    """Whether the functions of this module run on a device, where nobody waits."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return device.type == "cpu" or (is_nvidia and has_triton())


def can_share(device: torch.device) -> bool:
    """Whether a CUDA device can take part.

    It has to be NVIDIA's, with Triton, and to see the host's writes in the order they were made in.
    """
    is_ordered = platform.machine().lower() in ("x86_64", "amd64")
    return device.type == "cuda" and is_ordered and can_run(device)


def fetch_rows(order: Tensor, ticket: Tensor, out: Tensor, sources: Tensor | None = None) -> None:
    """Wait for an order, unless the device knows all rows itself, and copy the rows.

    order: int64 [1 + R or more], of ``Mailbox.orders``. ticket: int64 [1] that it will show;
        ``UNTICKETED`` does not wait. out: int32 [R, W] on the device of ``ticket``.
    sources: int64 [R] there, where the device itself knows rows; 0 leaves one to the order, as None
        leaves all. A row that is 0 in the order too forbids nothing.
    """
    if out.is_cuda:
        kernels_of(__name__).fetch_rows(order, ticket, out, PATIENCE, sources)
        return
    for _ in range(PATIENCE):
        if int(ticket) in (UNTICKETED, int(order[0])):
            break
        yield_cpu()
    addresses = order[1 : 1 + len(out)]
    found = addresses if sources is None else torch.where(sources != 0, sources, addresses)
    copy_rows(found, out, is_blank=True)


def reply(
    token_ids: Tensor,
    starved: Tensor | None,
    report: Report,
    cursors: Tensor | None = None,
    sources: Tensor | None = None,
) -> None:
    """Report what was drawn, and advance texts in their tables.

    token_ids: int64 [R], -1 where there is none. starved: bool [R], None for nowhere.
    cursors, sources: as of ``table_rows.advance``; None moves none.
    """
    if token_ids.is_cuda:
        kernels_of(__name__).reply(token_ids, starved, report, cursors, sources)
        return
    flags = torch.zeros_like(token_ids) if starved is None else starved.to(torch.int64)
    report.ids.copy_(token_ids.clamp_min(0))
    words = (report.ticket << 32) | (flags << TOKEN_BITS) | (token_ids + 1)
    report.words[: len(token_ids)] = words
    if cursors is not None and sources is not None:
        advance(token_ids, cursors, sources)
