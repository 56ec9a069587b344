"""A CUDA device that waits for the host inside of a graph, and is answered."""

from __future__ import annotations

import time

import pytest
import torch

from guided_spec.ops import mailbox, mailbox_triton
from guided_spec.ops.mailbox import Mailbox, Report, can_share, fetch_rows, reply

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROUNDS = 300


@pytest.mark.parametrize("words", [1, 13, 4008, 4741])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_rows_filled_while_it_waits(words: int, count: int) -> None:
    """The same memory is filled anew for every draft: nothing of it may be read from a cache."""
    assert can_share(CUDA)
    box = Mailbox(2, 64, CUDA)
    rows = torch.zeros(2, count, words, dtype=torch.int32, pin_memory=True)
    addresses = [[row.data_ptr() for row in part] for part in rows]
    ticket = torch.zeros(1, dtype=torch.int64, device=CUDA)
    masks = torch.zeros(2, count, words, dtype=torch.int32, device=CUDA)
    ids = torch.zeros(2, count, dtype=torch.int64, device=CUDA)

    def body() -> None:
        for depth in range(2):
            fetch_rows(box.orders[depth], ticket, masks[depth])
            tokens = masks[depth, :, -1].long()
            reply(tokens, tokens > 0, Report(ticket, box.replies[depth], ids[depth]))

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    generator = torch.Generator().manual_seed(words)
    for turn in range(ROUNDS):
        ticket.fill_(box.begin())
        graph.replay()
        drawn = torch.randint(-1, 2**31 - 2, (2, count, words), generator=generator)
        for depth in range(2):
            if turn % 50 == 0:
                time.sleep(0.002)  # it waits
            rows[depth].copy_(drawn[depth])
            box.post(depth, addresses[depth])
            found = box.wait(depth, count, torch.cuda.synchronize)
            assert found.token_ids == drawn[depth, :, -1].tolist()
            assert found.starved == [int(token > 0) for token in found.token_ids]
        assert torch.equal(masks.cpu(), rows)  # not before: this waits for all of the graph
        assert torch.equal(ids.cpu(), drawn[:, :, -1].clamp_min(0))


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PATIENCE", 1000)
    box, out = Mailbox(1, 4, CUDA), torch.zeros(3, 40, dtype=torch.int32, device=CUDA)
    fetch_rows(box.orders[0], torch.tensor([box.begin()], device=CUDA), out)
    torch.cuda.synchronize()
    assert bool((out == -1).all())


@pytest.mark.parametrize("words", [1, 13, 4008])
def test_the_kernels_do_what_torch_does(words: int) -> None:
    box, host = Mailbox(1, 8, CUDA), Mailbox(1, 8, torch.device("cpu"))
    rows = torch.randint(-(2**31), 2**31, (3, words)).to(torch.int32).pin_memory()
    addresses = [row.data_ptr() for row in rows]
    for one in (box, host):
        one.begin()
        one.post(0, addresses)
    found, expected = (torch.zeros(3, words, dtype=torch.int32, device=d) for d in ("cuda", "cpu"))
    ticket = torch.tensor([box.ticket])
    mailbox_triton.fetch_rows(box.orders[0], ticket.cuda(), found, 10)
    fetch_rows(host.orders[0], ticket, expected)
    assert torch.equal(found.cpu(), expected)
    tokens, starved = torch.tensor([7, -1, 2**31 - 3]), torch.tensor([False, True, True])
    outs = [torch.zeros(3, 2, dtype=torch.int64, device=d)[:, 1] for d in ("cuda", "cpu")]
    reply(tokens.cuda(), starved.cuda(), Report(ticket.cuda(), box.replies[0], outs[0]))
    reply(tokens, starved, Report(ticket, host.replies[0], outs[1]))
    torch.cuda.synchronize()
    assert torch.equal(box.replies, host.replies)
    assert torch.equal(outs[0].cpu(), outs[1])
