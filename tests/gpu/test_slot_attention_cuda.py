"""The kernels on a CUDA device give what the torch references give on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from guided_spec.ops.attention.slot_attention import HeadNorms, Window, slot_attention
from guided_spec.ops.linear.experts import expert_linear
from guided_spec.ops.pointwise import (
    add_branch,
    add_rms_norm,
    norm_all_heads,
    rms_norm,
    silu_mul_packed,
)
from tests.slot_lines import Case, SharedPrefix, Span, Unused, kept_positions, make, places_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
LENGTH, BLOCK = 200, 32


def case(
    batch: int, heads: tuple[int, int], tokens: int, width: int, window: Window | None = None
) -> Case:
    """Rows of about ``tokens``; with two or more, the last slot's text is cut into two rows."""
    source = torch.Generator().manual_seed(batch)
    starts = torch.randint(0, LENGTH, (batch,), generator=source).tolist()
    starts[0] = max(LENGTH - tokens // 2, 0)  # some of its tokens go to the sink
    order = torch.randperm(batch, generator=source).tolist()
    spans = [
        Span(slot, start, tokens - slot % 2) for slot, start in zip(order, starts, strict=True)
    ]
    if batch > 1:
        slot, _, length = spans[-1]
        spans[-1:] = [Span(slot, 0, length), Span(-1, 0, 2), Span(slot, length, tokens)]
    query_heads, kv_heads = heads
    return Case(
        kv_heads, query_heads // kv_heads, width, LENGTH, BLOCK, spans, Unused(3, 2), window
    )


def compare(
    given: Case,
    dtype: torch.dtype,
    width: int | None = None,
    view: int | None = None,
    kept_in: torch.dtype | None = None,
) -> None:
    data = make(given, num_slots=len(given.spans) + 1).to(dtype).kept_in(kept_in or dtype)
    data = data._replace(places=replace(data.places, width=width, view=view))
    device = data.to(CUDA)
    sinks = given.sinks()
    on_device = None if sinks is None else sinks.to(CUDA)
    found = slot_attention(*device, scale=0.1, window=given.window, sinks=on_device)
    expected = slot_attention(*data, scale=0.1, window=given.window, sinks=sinks)
    used = data.places.tokens[0] >= 0
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu()[used], expected[used], atol=tolerance, rtol=tolerance)
    kept = kept_positions(data.places, given.block)
    for got, wanted in zip(device.buffers, data.buffers, strict=True):
        got, wanted = (one.cpu().float().transpose(1, 2)[kept] for one in (got, wanted))
        torch.testing.assert_close(got, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches(batch: int, tokens: int, dtype: torch.dtype) -> None:
    compare(case(batch, (32, 8), tokens, 128), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [8, 16, 32, 48, 64, 80, 96, 192, 256])
def test_sizes_of_a_head(width: int, dtype: torch.dtype) -> None:
    compare(case(3, (4, 2), 5, width), dtype)


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 1), (6, 2), (20, 4), (64, 1)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    compare(case(3, heads, 3, 64), torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "window", [*map(Window, (1, 7, 64, 100)), Window(7, is_chunk=True), Window(64, is_chunk=True)]
)
def test_windows(window: Window, dtype: torch.dtype) -> None:
    compare(case(7, (8, 2), 6, 64, window), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", [1, 64])
def test_sinks(batch: int, dtype: torch.dtype) -> None:
    """Of a text in parts, and of texts in one."""
    compare(case(batch, (8, 2), 6, 64)._replace(has_sinks=True), dtype)


@pytest.mark.parametrize("block", [1, 16, 40, 100, LENGTH, LENGTH + 1])
def test_blocks_of_any_size(block: int) -> None:
    compare(case(7, (8, 2), 6, 64)._replace(block=block), torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, Window(50), Window(50, is_chunk=True)])
def test_prompts(window: Window | None, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 300), (3, 150)):
        compare(case(batch, (8, 2), tokens, 128, window), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("batch", "tokens", "block"), [(7, 1, 32), (64, 6, 64), (3, 90, 64)])
def test_texts_that_begin_alike(batch: int, tokens: int, block: int, dtype: torch.dtype) -> None:
    """Two groups of slots, and some that are in none; two pieces of one text."""
    source = torch.Generator().manual_seed(batch)
    slots = torch.randperm(batch, generator=source).tolist()
    spans = [Span(slot, 128 + 5 * (slot % 9), tokens) for slot in slots]
    spans.append(Span(slots[0], 128 + 5 * (slots[0] % 9) + tokens, 2))
    rest = tuple(slots[batch // 2 :])
    alike = (
        SharedPrefix(tuple(slots[: batch // 2]), 128 // block),
        SharedPrefix(rest[:-1] or rest, 1),
    )
    given = Case(8, 4, 128, 300, block, spans, Unused(3, 2), alike=alike)
    for has_sinks in (False, True):
        compare(given._replace(has_sinks=has_sinks), dtype, tokens)


@pytest.mark.parametrize(("width", "view"), [(None, 1), (4, 64), (1, 1000)])
def test_width_and_view_change_no_result(width: int | None, view: int) -> None:
    compare(case(2, (8, 2), 4, 64), torch.float32, width, view)


def test_a_captured_graph_follows_the_places() -> None:
    """Other rows of as many tokens, and other tables."""
    given = case(2, (8, 2), 3, 64)
    data = make(given).to(torch.float32)
    for buffer in data.buffers:  # of slots that hold nothing yet, too
        buffer.nan_to_num_(0.5)
    device = data.to(CUDA)
    slot_attention(*device, scale=0.1)  # compiles, which may not happen during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = slot_attention(*device, scale=0.1)
    count, num_rows = data.places.tokens.shape[1], data.places.rows.shape[1]
    for spans in (
        [Span(3, 9, 2), Span(-1, 0, 1), Span(0, 150, 4)],
        [Span(1, 199, 1), Span(2, 31, 5)],
        [Span(slot, 12 * slot, 1) for slot in range(4)],
    ):
        for got, wanted in zip(device.buffers, data.buffers, strict=True):
            got.copy_(wanted)
        tables = data.places.tables.flip(1) if len(spans) == 2 else data.places.tables
        unused = Unused(count - sum(span.length for span in spans), num_rows - len(spans))
        places = places_of(spans, tables, LENGTH, unused)
        for name in ("tokens", "rows", "tables"):
            getattr(device.places, name).copy_(getattr(places, name))
        graph.replay()
        expected = slot_attention(*data.clone()._replace(places=places), scale=0.1)
        used = places.tokens[0] >= 0
        torch.testing.assert_close(found.cpu()[used], expected[used], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [8, 1000, 4096])
def test_pointwise_operators(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 5, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    # A number that is rounded twice may end one place apart.
    place = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    pairs = [
        (rms_norm(x.cuda(), weight.cuda(), 1e-5), rms_norm(x, weight, 1e-5)),
        (rms_norm(x.cuda(), weight.cuda(), 1e-5, 1.0), rms_norm(x, weight, 1e-5, 1.0)),
        (rms_norm(x.cuda(), weight.cuda(), 1e-5, 0.0), rms_norm(x, weight, 1e-5, 0.0)),
        (silu_mul_packed(x.cuda()), silu_mul_packed(x)),
        *zip(
            add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5),
            add_rms_norm(x, residual, weight, 1e-5),
            strict=True,
        ),
        *zip(
            add_branch(x.cuda(), residual.cuda(), (weight.cuda(), 1e-5, 0.0), None, 0.22),
            add_branch(x, residual, (weight, 1e-5, 0.0), None, 0.22),
            strict=True,
        ),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.cpu(), expected, atol=place, rtol=place)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("queries", "keys"), [(32, 8), (4096, 4096), (5120, 1024)])
def test_norms_over_all_heads(queries: int, keys: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = torch.randn(9, queries + 2 * keys).to(dtype)
    query, key, there = torch.randn(queries).to(dtype), torch.randn(keys).to(dtype), packed.cuda()
    norm_all_heads(packed, HeadNorms(query, key, 1e-6, are_whole=True))
    norm_all_heads(there, HeadNorms(query.cuda(), key.cuda(), 1e-6, are_whole=True))
    place = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(there.cpu(), packed, atol=place, rtol=place)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inputs", [24, 700, 2880])
def test_products_with_experts(inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, chosen, bias = torch.randn(3, inputs), torch.randint(5, (12,)), torch.randn(5, 300)
    for weight in (torch.randn(5, 300, inputs), torch.randn(5, inputs, 300).mT):
        given = [one.to(dtype) for one in (x, weight / inputs**0.5, bias)]
        there = [one.cuda() for one in given]
        found = expert_linear(there[0], chosen.cuda(), *there[1:])
        expected = expert_linear(given[0], chosen, *given[1:])
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_kernels_that_follow_each_other_wait_for_each_other() -> None:
    """A long chain in a graph: each kernel begins early, and reads what the one before it wrote."""
    torch.manual_seed(0)
    x = torch.randn(300, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        residual, normed = x, x
        for _ in range(100):
            residual, normed = add_rms_norm(normed, residual, weight, 1e-5)
        return normed

    expected = x
    total = x
    for _ in range(100):
        total = total + expected
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        expected = wide.to(x.dtype)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
