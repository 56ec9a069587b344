"""Kernels that are compiled ahead: nothing runs meanwhile, and nothing is compiled afterwards."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from benchmarks.mixed_traffic import counted
from guided_spec.bundled import bundled_asset
from guided_spec.engine import setup as warming
from guided_spec.engine.options import Options
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.request import Job, Request
from guided_spec.engine.setup import Setup
from guided_spec.grammar import pipeline
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.packed.graph_pool import GraphPool, Inputs
from guided_spec.ops.launch_triton import compiling_ahead
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import verify
from guided_spec.ops.sampling.warm_up import SAMPLINGS
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


def test_nothing_is_compiled_or_loaded_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels()
    loaded: list[str] = []

    def load(_module: Any, _function: Any, name: str, *_: Any) -> None:
        loaded.append(name)

    monkeypatch.setattr(knobs.runtime, "kernel_load_start_hook", load)
    logits = torch.randn(2, 4, VOCAB_SIZE, device=CUDA, dtype=torch.bfloat16)
    with counted() as made:
        with compiling_ahead():
            for params in (GREEDY, FILTERED):
                decide(logits, params)
        ahead = made["compiled"]
        assert len(loaded) == ahead
        found = [decide(logits, params) for params in (GREEDY, FILTERED)]
    assert ahead == 9  # two of every kernel but those of filters, and the pass over all logits
    assert made["compiled"] == len(loaded) == ahead
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


@pytest.mark.parametrize(
    ("proposer", "asset"), [("eagle3:mask", "eagle3"), ("draft_model:mask", "draft")]
)
def test_the_first_step_along_a_table_compiles_none_of_its_kernels(
    proposer: str, asset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table comes when the engine has long been warm."""
    forget_kernels()
    monkeypatch.setattr(warming, "SAMPLINGS", SAMPLINGS[:1])
    options = {
        "device": "cuda",
        "max_batch_size": 2,
        "max_model_len": 128,
        "grammar_tables": "auto",
    }
    setup = Setup.build(None, proposer, bundled_asset(asset), Options.from_dict(options))
    warming.warm_up(setup.engine, setup.vocabulary, setup.grammars)
    monkeypatch.setattr(pipeline, "TEXTS", 1)
    grammar = setup.grammars.queue.submit(GrammarSpec.regex("[ab]{30}"))
    compiled: Any = grammar.result()
    compiled.new_matcher()
    while compiled.table is None:
        assert compiled.reason is None
        time.sleep(0.05)
    names, chunks = list[str](), list[Chunk]()
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name)
    )
    for seed in range(2):
        job = Job([1, 2, 3], SamplingParams(max_tokens=40, temperature=0.0), 128, seed, grammar)
        setup.engine.add(Request(job, setup.vocabulary, chunks.append))
    while setup.engine.has_work:
        setup.engine.step()
    setup.grammars.queue.close()
    texts = [chunk.completion for chunk in chunks if chunk.completion is not None]
    assert [text.error for text in texts] == [None, None]
    assert all(text.stats.device_steps for text in texts)
    assert {"_await", "_copy", "_reply", "_advance"}.isdisjoint(names)


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 9, "min_p": 0.01},
    {"temperature": 0.0, "logit_bias": {40: 2.0}},
    {"temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.8, "repetition_penalty": 1.2, "draft_policy": "validate"},
    {"temperature": 0.0, "min_tokens": 9, "presence_penalty": -0.5},
)


@pytest.mark.parametrize(
    ("proposer", "asset"),
    [("draft_model", "draft"), ("eagle3", "eagle3"), ("chain:grammar_forced+mtp", "mtp")],
)
def test_no_kind_of_request_has_a_kernel_compiled_once_all_is_warm(
    proposer: str, asset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, beside others, with a grammar and without."""
    forget_kernels()
    options = {"device": "cuda", "max_batch_size": 8, "max_model_len": 256}
    setup = Setup.build(None, proposer, bundled_asset(asset), Options.from_dict(options))
    warming.warm_up(setup.engine, setup.vocabulary, setup.grammars)
    grammar = setup.grammars.queue.submit(GrammarSpec.regex("[a-z ]{20,60}"))
    grammar.result()
    names, chunks = list[str](), list[Chunk]()
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name)
    )
    for kinds in (*((one,) for one in KINDS), KINDS):
        for given in (grammar, None):
            for seed, fields in enumerate(kinds):
                params = SamplingParams(max_tokens=24, **fields)
                words = ((40,), (41, 42)) if params.min_tokens else ()
                job = Job([1, 2, 3], params, 256, seed, given, bad_words=words)
                setup.engine.add(Request(job, setup.vocabulary, chunks.append))
            while setup.engine.has_work:
                setup.engine.step()
    setup.grammars.queue.close()
    texts = [chunk.completion for chunk in chunks if chunk.completion is not None]
    assert [text.error for text in texts] == [None] * 4 * len(KINDS)
    assert names == []
