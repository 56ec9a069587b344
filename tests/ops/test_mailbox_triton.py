"""The mailbox's kernels do what torch does; here in Triton's interpreter, one launch at a time."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from guided_spec.ops import mailbox, mailbox_triton as kernels

torch.manual_seed(0)
for words in (1, 31, 1024, 1500):
    rows = torch.randint(-2**31, 2**31, (5, words)).to(torch.int32)
    for order in ([3], [1, 1, 4], [0, 1, 2, 3, 4]):
        box = mailbox.Mailbox(2, 8, words, torch.device("cpu"))
        box.begin()
        box.post(1, [rows[row].data_ptr() for row in order])
        for ticket, depth in ((box.ticket, 1), (0, 1), (box.ticket, 0)):
            found, expected = (torch.zeros(len(order), words, dtype=torch.int32) for _ in range(2))
            kernels.fetch_rows(box.orders[depth], torch.tensor([ticket]), found, 2)
            box.release() if depth == 0 else None
            mailbox.fetch_rows(box.orders[depth], torch.tensor([ticket]), expected)
            assert torch.equal(found, expected), (words, order, ticket, depth)

for count in (1, 7, 300):
    tokens, flags = torch.randint(-1, 2**31 - 2, (count,)), torch.rand(count) < 0.5
    for starved in (None, flags):
        given = [tokens, starved, torch.tensor([2**31 - 1])]
        told, out = torch.zeros(2, count + 1, dtype=torch.int64), torch.zeros(2, count, 3).long()
        kernels.answer(*given, told[0], out[0, :, 1])
        mailbox.answer(*given, told[1], out[1, :, 1])
        assert torch.equal(told[0], told[1])
        assert torch.equal(out[0], out[1])
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_do_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
