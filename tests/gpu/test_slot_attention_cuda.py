"""The kernels on a CUDA device give what the torch references give on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from guided_spec.ops.pointwise import add_rms_norm, rms_norm, silu_mul_packed
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces, slot_attention

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
LENGTH = 200


class Data(NamedTuple):
    """The tensors of one call; the last of three or more rows is unused."""

    query: Tensor
    new: KeyValues
    buffers: KeyValues
    places: SlotPlaces


def make(batch: int, heads: tuple[int, int], tokens: int, width: int, dtype: torch.dtype) -> Data:
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    query = torch.randn(batch, tokens, query_heads, width).to(dtype).transpose(1, 2)
    key = torch.randn(batch, tokens, kv_heads, width).to(dtype).transpose(1, 2)
    value = torch.randn(batch, kv_heads, tokens, width).to(dtype)
    keys, values = torch.randn(2, batch + 1, kv_heads, LENGTH + 1, width).to(dtype)
    slots = torch.randperm(batch + 1)[:batch]
    starts = torch.randint(0, LENGTH, (batch,))
    starts[0] = max(LENGTH - tokens // 2, 0)  # some of its tokens go to the sink
    if batch > 1:
        starts[1] = 0
    if batch > 2:
        slots[-1] = -1
    return Data(query, KeyValues(key, value), KeyValues(keys, values), SlotPlaces(slots, starts))


def on_cuda(data: Data) -> Data:
    """A copy on the device; the order of strides stays."""
    query, new, buffers, places = data
    return Data(
        query.cuda(),
        KeyValues(*(states.cuda() for states in new)),
        KeyValues(*(states.clone().cuda() for states in buffers)),
        SlotPlaces(places.slots.cuda(), places.starts.cuda(), places.view),
    )


def compare(data: Data, window: int | None = None) -> None:
    device = on_cuda(data)
    found = slot_attention(*device, scale=0.1, window=window)
    expected = slot_attention(*data, scale=0.1, window=window)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
    for got, wanted in zip(device.buffers, data.buffers, strict=True):
        assert torch.equal(got[:, :, :LENGTH].cpu(), wanted[:, :, :LENGTH])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches(batch: int, tokens: int, dtype: torch.dtype) -> None:
    compare(make(batch, (32, 8), tokens, 128, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [8, 16, 32, 48, 64, 80, 96, 192, 256])
def test_sizes_of_a_head(width: int, dtype: torch.dtype) -> None:
    compare(make(3, (4, 2), 5, width, dtype))


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 1), (6, 2), (20, 4), (64, 1)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    compare(make(3, heads, 3, 64, torch.bfloat16))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_windows(window: int, dtype: torch.dtype) -> None:
    compare(make(7, (8, 2), 6, 64, dtype), window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 50])
def test_prompts(window: int | None, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 300), (3, 150)):
        compare(make(batch, (8, 2), tokens, 128, dtype), window)


def test_the_view_changes_no_result() -> None:
    data = make(2, (8, 2), 4, 64, torch.float32)
    for view in (1, 64, 1000):
        places = data.places._replace(view=view)
        compare(data._replace(places=places, buffers=KeyValues(*map(torch.clone, data.buffers))))


def test_a_captured_graph_follows_the_places() -> None:
    data = make(4, (8, 2), 3, 64, torch.float32)
    device = on_cuda(data)
    slot_attention(*device, scale=0.1)  # compiles, which may not happen during a capture
    for got, wanted in zip(device.buffers, data.buffers, strict=True):
        got.copy_(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = slot_attention(*device, scale=0.1)
    for slots, starts in (([4, -1, 0, 1], [0, 0, 9, 150]), ([2, 3, -1, 0], [199, 31, 5, 12])):
        places = SlotPlaces(torch.tensor(slots), torch.tensor(starts))
        device.places.slots.copy_(places.slots)
        device.places.starts.copy_(places.starts)
        graph.replay()
        expected = slot_attention(*data._replace(places=places), scale=0.1)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


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
        (silu_mul_packed(x.cuda()), silu_mul_packed(x)),
        *zip(
            add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5),
            add_rms_norm(x, residual, weight, 1e-5),
            strict=True,
        ),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.cpu(), expected, atol=place, rtol=place)


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
