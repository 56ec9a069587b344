"""Texts that walk along tables inside of a CUDA graph, and the rows of a step from there."""

from __future__ import annotations

import pytest
import torch

from guided_spec.integrations.vllm.drafts.tabled_requests import drafter_rows
from guided_spec.masks.rows import DeviceTables, MaskRows
from guided_spec.models.packed.decoder import refusing_waits
from guided_spec.ops import table_rows
from guided_spec.ops.mailbox import UNTICKETED, Mailbox, Report, fetch_rows, reply
from guided_spec.ops.table_rows import SOURCE
from tests.ops.table_walks import STEPS, cases, compare, host_walk, random_table, start
from tests.toys import row_writer

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_the_kernels_go_where_the_tables_say() -> None:
    compare(table_rows, CUDA)


def test_the_host_waits_for_no_upload() -> None:
    table = random_table(3, 4100)
    own = torch.full((table.rows.shape[1],), 5, dtype=torch.int32, device=CUDA)
    placed = DeviceTables(CUDA, len(own), 2**24, lambda rows: drafter_rows(rows, own))
    with refusing_waits():
        cursor = placed.cursor(table, 2, ())
    assert cursor is not None
    found = torch.zeros(1, len(own), dtype=torch.int32, device=CUDA)
    table_rows.copy_rows(torch.tensor([cursor[SOURCE]], device=CUDA), found)
    row = torch.from_numpy(table.row(2)).to(CUDA).unsqueeze(0)
    assert torch.equal(found, drafter_rows(row, own)[:, : len(own)])


def test_a_graph_that_knows_no_table_walks_along_any() -> None:
    """One graph, replayed for texts of other tables, beside texts whose rows the host fills."""
    texts, vocab_size = 9, 4100
    words = -(-vocab_size // 32)
    box = Mailbox(STEPS, 16, CUDA)
    host = torch.full((words,), 5, dtype=torch.int32, pin_memory=True)
    address = [host.data_ptr()] * texts
    ticket = torch.full((1,), UNTICKETED, device=CUDA)
    cursors = torch.zeros(texts, table_rows.CURSOR, dtype=torch.int64, device=CUDA)
    token_ids = torch.zeros(STEPS, texts, dtype=torch.int64, device=CUDA)
    masks = torch.zeros(STEPS, texts, words, dtype=torch.int32, device=CUDA)
    sources = torch.zeros(STEPS + 1, texts, dtype=torch.int64, device=CUDA)
    ids = torch.zeros(texts, dtype=torch.int64, device=CUDA)

    def body() -> None:
        sources[0].copy_(cursors[:, SOURCE])
        for step in range(STEPS):
            fetch_rows(box.orders[step], ticket, masks[step], sources[step])
            report = Report(ticket, box.replies[step], ids)
            reply(token_ids[step], None, report, cursors, sources[step + 1])

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for seed in range(4):
        tables, drawn = cases(seed, vocab_size, texts)
        kept, first = start(tables, CUDA)
        cursors.copy_(first)
        token_ids.copy_(drawn)
        ticket.fill_(box.begin())
        for step in range(STEPS):
            box.post(step, address)
        graph.replay()
        expected = host_walk(tables, drawn, words).masks[:STEPS]
        expected[expected == 7] = 5  # no row of a table: what the host fills
        assert torch.equal(masks.cpu(), expected)
        seen = [box.wait(step, texts, torch.cuda.synchronize).token_ids for step in range(STEPS)]
        assert seen == drawn.tolist()
        del kept


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_rows_of_a_step(*, is_alone: bool) -> None:
    requests, depths, vocab_size = 5, 4, 4100
    words = -(-vocab_size // 32)
    rows = MaskRows(requests, depths + 2, vocab_size, CUDA, 2**24)
    tables = torch.arange(depths * requests * words, dtype=torch.int32, device=CUDA)
    tables = tables.view(depths, requests, words)
    sources = tables[:, :, 0].new_zeros(depths, requests, dtype=torch.int64)
    from_tables = range(requests) if is_alone else (0, 2, 3)
    for request in from_tables:
        for depth in range(depths - 1):
            sources[depth, request] = tables[depth, request].data_ptr()
    for _ in range(3):
        rows.clear(requests)
        expected = torch.full((requests, depths + 1, words), -1, dtype=torch.int32)
        for request in range(requests):
            for depth in range(depths - 1):
                if request in from_tables:
                    expected[request, depth] = tables[depth, request].cpu()
                else:
                    rows.fill(row_writer(100 * request + depth), request, depth)
                    expected[request, depth] = 100 * request + depth
        found = rows.first(requests, depths + 1, sources)
        assert found.is_contiguous()
        assert torch.equal(found.cpu(), expected)
