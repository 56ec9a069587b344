"""The device side of a mailbox as kernels, which read the host's memory while they run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch
from guided_spec.ops.mailbox import Report
from guided_spec.ops.table_rows_triton import copy_rows, step

ROWS = 256  # replies of a program
LEAST_BLOCK = 64  # rows of a look: with fewer there would be more kernels to compile


def fetch_rows(
    order: Tensor, ticket: Tensor, out: Tensor, patience: int, sources: Tensor | None = None
) -> None:
    """``guided_spec.ops.mailbox.fetch_rows``; ``order`` is pinned, the others on one device.

    patience: polls of the order before it continues without it.
    """
    count = len(out)
    found = torch.empty(count, dtype=torch.int64, device=out.device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        # One program looks, and reads the addresses for all others: reads of the same word of the
        # host's memory come one after another, each a microsecond long.
        launch(_await, (1,))(
            *(order, ticket, found if sources is None else sources, patience, found, count),
            has_sources=sources is not None,
            block=max(triton.next_power_of_2(count), LEAST_BLOCK),
            num_warps=1,
        )
    copy_rows(found, out, is_blank=True)


def reply(
    token_ids: Tensor,
    starved: Tensor | None,
    report: Report,
    cursors: Tensor | None = None,
    sources: Tensor | None = None,
) -> None:
    """``guided_spec.ops.mailbox.reply``; ``words`` is pinned, the others on one device."""
    count = len(token_ids)
    # An argument that a kernel leaves alone is any tensor: a pointer has to have a type.
    tensors = (token_ids if one is None else one for one in (starved, cursors, sources))
    with torch.cuda.device_of(token_ids):
        launch(_reply, (triton.cdiv(count, ROWS),))(
            *(
                token_ids,
                *tensors,
                report.ticket,
                report.words,
                report.ids,
                report.ids.stride(0),
                count,
            ),
            has_starved=starved is not None,
            has_cursors=cursors is not None,
            block=ROWS,
        )


# Triton reads annotations as its own, so the arguments have none. Volatile loads are not moved
# before one another.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["patience", "count"],
    do_not_specialize_on_alignment=["order", "ticket", "sources"],
)
def _await(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    order, ticket, sources, patience, found, count,
    has_sources: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Look until the order shows the ticket, and keep its addresses.

    The host's memory is microseconds away: it is not read where all rows are known here.
    """
    row = tl.arange(0, block)
    inside = row < count
    own = tl.zeros([block], tl.int64)
    if has_sources:
        own = tl.load(sources + row, mask=inside, other=0)
    asked = inside & (own == 0)
    is_asked = tl.max(asked.to(tl.int32), 0) != 0
    wanted = tl.where(is_asked, tl.load(ticket), 0)
    seen = tl.load(order, mask=is_asked, other=0, volatile=True)
    left = patience
    while (seen != wanted) & (wanted != 0) & (left > 0):
        seen = tl.load(order, volatile=True)
        left -= 1
    addresses = tl.load(order + 1 + row, mask=asked, other=0, volatile=True)
    tl.store(found + row, tl.where(asked, addresses, own), mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["stride", "count"],
    do_not_specialize_on_alignment=["cursors", "sources", "ticket", "words", "ids"],
)
def _reply(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    token_ids, starved, cursors, sources, ticket, words, ids, stride, count,
    has_starved: tl.constexpr, has_cursors: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A word for each token, its id for the model, and the state of its text after it."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < count
    token = tl.load(token_ids + row, mask=inside, other=-1)
    word = (tl.load(ticket) << 32) | (token + 1)
    if has_starved:
        flag = tl.load(starved + row, mask=inside, other=0).to(tl.int64)
        word |= flag << 31
    # Written through: the host looks while later kernels run.
    tl.store(words + row, word, mask=inside, cache_modifier=".wt")
    tl.store(ids + row * stride, tl.maximum(token, 0), mask=inside)
    if has_cursors:
        step(token, cursors, sources, row, inside)
