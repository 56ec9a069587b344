"""Masks on a CUDA device: the kernels give what the host gives."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask, translate_bitmask

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 33, 4099, 128_256])
def test_masks_are_applied_alike(vocab_size: int, dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    bitmask = pack_bitmask(torch.rand(3, 2, vocab_size, generator=generator) < share)
    logits = torch.randn(3, 2, vocab_size, generator=generator).to(dtype)
    on_cuda = logits.cuda()
    masked = apply_token_bitmask(on_cuda, bitmask.cuda())
    assert torch.equal(masked.cpu(), apply_token_bitmask(logits, bitmask))
    assert torch.equal(on_cuda.cpu(), logits)


def test_gradients() -> None:
    legal = torch.arange(70) % 3 == 0
    logits = torch.ones(4, 70, device="cuda", requires_grad=True)
    masked = apply_token_bitmask(logits, pack_bitmask(legal.expand(4, -1)).cuda())
    masked[:, ::3].sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[2].bool().cpu(), legal)


def test_rows_that_share_a_mask() -> None:
    legal = torch.arange(70) % 3 == 0
    masked = apply_token_bitmask(torch.ones(4, 70, device="cuda"), pack_bitmask(legal).cuda())
    assert torch.equal(masked.cpu() == 1, legal.expand(4, -1))
    with pytest.raises(RuntimeError):
        apply_token_bitmask(torch.ones(4, 70, device="cuda"), torch.ones(4, 2).int().cuda())


@pytest.mark.parametrize("draft_size", [1, 1000, 32_000])
def test_in_a_cuda_graph(draft_size: int) -> None:
    bitmask = pack_bitmask(torch.rand(5, 128_256, device="cuda") < 0.4)
    target_ids = torch.randperm(128_256, device="cuda")[:draft_size]
    logits = torch.randn(5, 128_256, device="cuda")
    translate_bitmask(bitmask, target_ids)
    apply_token_bitmask(logits, bitmask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        translated = translate_bitmask(bitmask, target_ids)
        masked = apply_token_bitmask(logits, bitmask)
    bitmask.copy_(bitmask.roll(2, 0))
    graph.replay()
    host = bitmask.cpu()
    assert torch.equal(translated.cpu(), translate_bitmask(host, target_ids.cpu()))
    assert torch.equal(masked.cpu(), apply_token_bitmask(logits.cpu(), host))
