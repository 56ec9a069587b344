"""The draft's token choice on a CUDA device: the kernels against torch, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from guided_spec.models.packed.graph_pool import GraphPool
from guided_spec.ops.sampling.draft_choice import choose_draft, choose_draft_reference
from guided_spec.ops.sampling.rejection import DraftChoice
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers.choice_graphs import ChoiceGraphs
from guided_spec.types import SamplingParams
from tests.draft_choices import (
    MASKS,
    MaskKind,
    change,
    check_alike,
    check_chooser,
    check_walking,
    make_case,
    on_cpu,
)

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 128_256
MIXED = (0.8, 1.0, 0.0, 0.3)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("draft_size", [2048, 32_000, None])
def test_the_kernels_agree_with_torch(
    draft_size: int | None, batch: int, dtype: torch.dtype, mask: MaskKind
) -> None:
    for temperatures in ([0.0] * batch, [MIXED[row % 4] for row in range(batch)]):
        case = make_case((VOCAB_SIZE, draft_size), temperatures, mask, dtype, "cuda")
        check_alike(case, choose_draft(*case), choose_draft_reference(*case))


def test_the_device_draws_what_the_host_draws() -> None:
    for temperatures in ([0.0] * 8, [*MIXED, *MIXED]):
        case = make_case((4099, 1500), temperatures, "each", device="cuda")
        there, host = choose_draft(*case), on_cpu(case)
        assert there.starved is not None
        assert there.rescued is not None
        probs = None if there.probs is None else there.probs.cpu()
        found = DraftChoice(there.tokens.cpu(), probs, there.starved.cpu(), there.rescued.cpu())
        check_alike(host, found, choose_draft(*host))


@pytest.mark.parametrize("top_k", [0, 5], ids=["kernels", "filtered"])
@pytest.mark.parametrize("temperatures", [(0.0,) * 4, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("mask", ["none", "each"])
@pytest.mark.parametrize("draft_size", [2048, None])
def test_in_a_cuda_graph(
    draft_size: int | None, mask: MaskKind, temperatures: tuple[float, ...], top_k: int
) -> None:
    """Captured once, replayed for other logits, masks and positions."""
    case = make_case((9001, draft_size), temperatures, mask, device="cuda")
    params = [SamplingParams(temperature=one, top_k=top_k) for one in temperatures]
    sampling = Sampling.stack(params, range(4), torch.device("cuda"))
    case = case._replace(sampling=sampling)
    choose_draft(*case)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = choose_draft(*case)
    seen = set()
    for turn in range(3):
        change(case, turn)
        case.noise.positions.add_(turn)
        graph.replay()
        check_alike(case, found, choose_draft_reference(*case))
        seen.add(tuple(found.tokens.tolist()))
    assert len(seen) == 3


@pytest.mark.parametrize("top_k", [0, 5], ids=["kernels", "filtered"])
@pytest.mark.parametrize(
    "temperatures", [(0.0,) * 9, (*MIXED, *MIXED, 0.5)], ids=["greedy", "mixed"]
)
@pytest.mark.parametrize("draft_size", [2048, None])
@pytest.mark.parametrize("mask", ["none", "each"])
def test_a_chooser(
    mask: MaskKind, draft_size: int | None, temperatures: tuple[float, ...], top_k: int
) -> None:
    graphs = GraphPool(torch.device("cuda"))
    check_chooser((9001, draft_size), temperatures, mask, top_k, graphs, device="cuda")


@pytest.mark.parametrize("rows", [4, 9])
def test_texts_walk_along_tables(rows: int) -> None:
    check_walking(GraphPool(torch.device("cuda")), rows, device="cuda")


def test_a_chooser_reads_what_a_drafters_graph_wrote() -> None:
    device = torch.device("cuda")
    drafter = GraphPool(device)
    sampling = Sampling.stack([SamplingParams(temperature=0.0)] * 9, range(9), device)
    chooser = ChoiceGraphs(None, GraphPool(device), drafter)
    for turn in range(4):
        inputs = {"x": torch.randn(10, VOCAB_SIZE, device=device)}
        (logits,) = drafter.run("logits", inputs, lambda tensors: (tensors["x"] * 2,))
        assert drafter.whole(logits[:9]) is not None
        found = chooser.choose(turn % 2, logits[:9], None, sampling, None)
        assert torch.equal(found.tokens, inputs["x"][:9].argmax(1))
        other = logits[:9] + 0.0  # somewhere else
        assert drafter.whole(other) is None
        found = chooser.choose(turn % 2, -other, None, sampling, None)
        assert torch.equal(found.tokens, inputs["x"][:9].argmin(1))
