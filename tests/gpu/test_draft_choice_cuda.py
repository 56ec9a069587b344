"""The draft's token choice on a CUDA device: the kernels against torch, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.draft_choice import DraftChoice, choose_draft, choose_draft_reference
from guided_spec.ops.warp import Sampling
from guided_spec.proposers.draft_chooser import DraftChooser
from guided_spec.types import SamplingParams
from tests.draft_choices import MASKS, ChoiceCase, MaskKind, check_alike, make_case, on_cpu

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
        _change(case, turn)
        graph.replay()
        check_alike(case, found, choose_draft_reference(*case))
        seen.add(tuple(found.tokens.tolist()))
    assert len(seen) == 3


@pytest.mark.parametrize("top_k", [0, 5], ids=["kernels", "filtered"])
@pytest.mark.parametrize("temperatures", [(0.0,) * 4, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("draft_size", [2048, None])
@pytest.mark.parametrize("mask", ["none", "each"])
def test_a_chooser_replays_what_it_has_seen(
    mask: MaskKind, draft_size: int | None, temperatures: tuple[float, ...], top_k: int
) -> None:
    """Other values in the same memory, other requests, other positions of a draft."""
    case = make_case((9001, draft_size), temperatures, mask, device="cuda")
    chooser, seen = DraftChooser(torch.device("cuda")), set()
    for turn in range(8):
        _change(case, turn)
        if turn % 3 == 0:  # other requests have joined
            params = [SamplingParams(temperature=one * turn, top_k=top_k) for one in temperatures]
            sampling = Sampling.stack(params, range(4), torch.device("cuda"))
            noise = case.noise._replace(seeds=case.noise.seeds + turn)
            case = case._replace(sampling=sampling, noise=noise)
        greedy = case.sampling.all_greedy
        arguments = (*case[:4], None if greedy else case.noise)
        for depth in (2, 1) if turn < 3 else ():  # captured before the positions in front of them
            chooser.choose(*arguments, depth)
        found = [chooser.choose(*arguments, depth) for depth in range(3)]
        expected = choose_draft(*case)
        for chosen in found:
            starved, rescued = expected.starved, expected.rescued
            check_alike(
                case, DraftChoice(chosen.tokens, chosen.probs, starved, chosen.rescued), expected
            )
            assert rescued is None or chosen.rescued is not None
            assert torch.equal(chosen.fed, chosen.tokens.clamp_min(0))
            assert torch.equal(chosen.report[0], chosen.tokens)
            flags = torch.zeros_like(chosen.tokens) if starved is None else starved.long()
            assert torch.equal(chosen.report[1], flags)
        seen.add(tuple(found[1].tokens.tolist()))
    assert len(seen) > 4


def test_a_chooser_keeps_a_bounded_number_of_graphs() -> None:
    chooser = DraftChooser(torch.device("cuda"))
    for start in range(40):
        case = make_case((4099, None), (0.0,) * (1 + start % 20), "each", device="cuda")
        for _ in range(4):
            for depth in range(5):
                chosen = chooser.choose(*case[:4], None, depth)
                assert torch.equal(chosen.tokens, choose_draft(*case).tokens)


def _change(case: ChoiceCase, turn: int) -> None:
    """Other values in the same memory."""
    case.logits.copy_(case.logits.roll(turn + 1, 1))
    if case.bitmask is not None:
        case.bitmask.copy_(case.bitmask.roll(1, 0))
    case.noise.positions.add_(turn)
