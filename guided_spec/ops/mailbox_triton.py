"""A mailbox's device side as kernels, which look into the host's memory while they run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import launch
from guided_spec.ops.table_rows_triton import copy_rows

__all__ = ["answer", "fetch_rows"]

ROWS = 256  # answers of a program
LEAST_BLOCK = 64  # rows of a look: with fewer there would be more kernels to compile


def fetch_rows(
    order: Tensor, ticket: Tensor, out: Tensor, patience: int, sources: Tensor | None = None
) -> None:
    """See ``guided_spec.ops.mailbox.fetch_rows``; ``order`` is pinned, the others on one device.

    patience: looks at the order before it goes on all the same.
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
    copy_rows(found, out)


def answer(
    token_ids: Tensor, starved: Tensor | None, ticket: Tensor, told: Tensor, out: Tensor
) -> None:
    """See ``guided_spec.ops.mailbox.answer``; ``told`` is pinned, the others on one device."""
    count = len(token_ids)
    with torch.cuda.device_of(token_ids):
        launch(_answer, (triton.cdiv(count, ROWS),))(
            token_ids,
            token_ids if starved is None else starved,
            *(ticket, told, out, out.stride(0), count),
            has_starved=starved is not None,
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
    """Look until the order shows the ticket, and keep its addresses."""
    wanted = tl.load(ticket)
    seen = tl.load(order, volatile=True)
    left = patience
    while (seen != wanted) & (wanted != 0) & (left > 0):
        seen = tl.load(order, volatile=True)
        left -= 1
    row = tl.arange(0, block)
    addresses = tl.load(order + 1 + row, mask=row < count, other=0, volatile=True)
    if has_sources:
        own = tl.load(sources + row, mask=row < count, other=0)
        addresses = tl.where(own != 0, own, addresses)
    tl.store(found + row, addresses, mask=row < count)


@triton.jit(do_not_specialize=["stride", "count"])  # type: ignore[untyped-decorator]
def _answer(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    token_ids, starved, ticket, told, out, stride, count,
    has_starved: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A word for each token, and its id for the model."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < count
    token = tl.load(token_ids + row, mask=inside, other=0)
    word = (tl.load(ticket) << 32) | (token + 1)
    if has_starved:
        flag = tl.load(starved + row, mask=inside, other=0).to(tl.int64)
        word |= flag << 31
    # Written through: the host looks while later kernels run.
    tl.store(told + row, word, mask=inside, cache_modifier=".wt")
    tl.store(out + row * stride, tl.maximum(token, 0), mask=inside)
