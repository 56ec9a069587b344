"""The mailbox's kernels do what torch does; here in Triton's interpreter, one launch at a time."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from guided_spec.ops import mailbox, mailbox_triton as kernels
from tests.ops.table_walks import cases, start

torch.manual_seed(0)
for words in (1, 31, 1024, 1500):
    rows = torch.randint(-2**31, 2**31, (5, words)).to(torch.int32)
    for order in ([3], [1, 1, 4], [0, 1, 2, 3, 4]):
        box = mailbox.Mailbox(2, 8, torch.device("cpu"))
        box.begin()
        box.post(1, [rows[row].data_ptr() for row in order])
        for ticket, depth in ((box.ticket, 1), (0, 1), (box.ticket, 0)):
            found, expected = (torch.zeros(len(order), words, dtype=torch.int32) for _ in range(2))
            kernels.fetch_rows(box.orders[depth], torch.tensor([ticket]), found, 2)
            box.release() if depth == 0 else None
            mailbox.fetch_rows(box.orders[depth], torch.tensor([ticket]), expected)
            assert torch.equal(found, expected), (words, order, ticket, depth)
    known = torch.tensor([row.data_ptr() for row in rows])
    for none, expected in (([0, 3], rows[[4, 1, 2, 4, 4]]), ([], rows)):
        ticket = box.begin()
        if none:  # the order is not looked at where every row is known
            box.post(1, [rows[4].data_ptr()] * 5)
        known[none], found = 0, torch.zeros(5, words, dtype=torch.int32)
        kernels.fetch_rows(box.orders[1], torch.tensor([ticket]), found, 2, known)
        assert torch.equal(found, expected)
        known = torch.tensor([row.data_ptr() for row in rows])

tables, drawn = cases(0, 64, 9)
kept, first = start(tables, torch.device("cpu"))
cursors, sources = first.expand(2, -1, -1).clone(), torch.zeros(2, 9, dtype=torch.int64)
for token_ids in drawn:
    for at, ops in enumerate((kernels, mailbox)):
        where = mailbox.Report(torch.ones(1).long(), torch.zeros(9).long(), torch.zeros(9).long())
        ops.reply(token_ids, None, where, cursors[at], sources[at])
    assert torch.equal(cursors[0], cursors[1])
    assert torch.equal(sources[0], sources[1])
assert sources.any()

for count in (1, 7, 300):
    tokens, flags = torch.randint(-1, 2**31 - 2, (count,)), torch.rand(count) < 0.5
    for starved in (None, flags):
        words, out = torch.zeros(2, count + 1, dtype=torch.int64), torch.zeros(2, count, 3).long()
        for at, ops in enumerate((kernels, mailbox)):
            where = mailbox.Report(torch.tensor([2**31 - 1]), words[at], out[at, :, 1])
            ops.reply(tokens, starved, where)
        assert torch.equal(words[0], words[1])
        assert torch.equal(out[0], out[1])
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_do_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
