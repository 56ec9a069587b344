"""Kernels that are compiled ahead: nothing runs meanwhile, and nothing is compiled afterwards."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks.mixed_traffic import counted
from guided_spec.models.packed.graph_pool import GraphPool, Inputs
from guided_spec.ops.launch_triton import compiling_ahead
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Accepted, Draft, SamplingParams

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
VOCAB_SIZE = 300_000
GREEDY = SamplingParams(temperature=0.0)
FILTERED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=3)


def decide(logits: torch.Tensor, params: SamplingParams) -> Accepted:
    batch, width = logits.shape[:2]
    token_ids = logits[:, :-1].argmax(-1)
    draft = Draft(token_ids, torch.full((batch,), width - 1, device=CUDA))
    sampling = Sampling.stack([params] * batch, [3] * batch, CUDA)
    noise = NoiseKeys(sampling.seeds, torch.zeros(batch, dtype=torch.int64, device=CUDA))
    return verify(logits, None, draft, VerifyRows(sampling, noise))


def forget_kernels() -> None:
    """Whatever tests before have had compiled, of the kernels of this package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("guided_spec.ops.") and name.endswith("_triton"):
            for one in vars(module).values():
                if isinstance(one, JITFunction):
                    one.device_caches.clear()


def test_nothing_is_compiled_behind_it() -> None:
    forget_kernels()
    logits = torch.randn(2, 4, VOCAB_SIZE, device=CUDA, dtype=torch.bfloat16)
    with counted() as made:
        with compiling_ahead():
            for params in (GREEDY, FILTERED):
                decide(logits, params)
        ahead = made["compiled"]
        found = [decide(logits, params) for params in (GREEDY, FILTERED)]
    assert ahead == 9  # two of every kernel but those of filters, and the pass over all logits
    assert made["compiled"] == ahead
    assert torch.equal(found[0].token_ids, logits.argmax(-1))
    assert found[0].num_accepted.tolist() == [3, 3]


def test_one_filter_or_all_rows_of_a_draft_or_one_are_the_same_kernels() -> None:
    logits = torch.randn(3, 6, VOCAB_SIZE, device=CUDA, dtype=torch.bfloat16)
    decide(logits, FILTERED)
    with counted() as made:
        for width in (1, 2, 4):
            for params in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}):
                decide(logits[:, :width].contiguous(), SamplingParams(temperature=1.0, **params))
    assert made["compiled"] == 0


def test_garbage_of_an_engine_before_is_not_collected_in_a_capture() -> None:
    """Its graphs lie in cycles of references, and may not be freed while another is captured."""

    class Dropped:
        def __init__(self) -> None:
            self.itself = self
            self.pool = GraphPool(CUDA)
            self.pool.run("double", {"x": torch.ones(2)}, lambda given: given["x"] * 2)

    def body(given: Inputs) -> torch.Tensor:
        kept = [[index] for index in range(1000)]  # new objects: many for the collector
        return given["x"] * len(kept)

    Dropped()
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        found = GraphPool(CUDA).run("times", {"x": torch.ones(2)}, body)
    finally:
        gc.set_threshold(*before)
    assert found.tolist() == [1000, 1000]
    assert gc.isenabled()
