"""Parts of the installed vLLM that run on a CPU: its scheduler over the bundled model, its kernels.

Import it behind a check that vLLM is there.
"""

from __future__ import annotations

import importlib
import os
import time
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import guided_spec
from guided_spec.integrations.patches import probe
from guided_spec.integrations.vllm.plugin import installed_root, installed_version

NUM_DRAFT = 4
BLOCK = 16  # tokens of the cache that requests may share
RELEASE = tuple(map(int, (installed_version() or "0.0").split(".")[:2]))
MODEL = Path(guided_spec.__file__).parent / "assets" / "target"
KERNELS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("CUDA_VISIBLE_DEVICES") != "",
    reason="vLLM's kernels run on a CPU with TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=''",
)


class Step(NamedTuple):
    """What vLLM's scheduler hands to its workers: the step, and the masks that come with it."""

    scheduled: Any
    grammar: Any


def _vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.{module}")


def make_config(
    *, speculative: dict[str, Any] | None = None, outputs: dict[str, Any] | None = None
) -> Any:
    """A VllmConfig of the bundled model without asynchronous scheduling.

    speculative, outputs: what SpeculativeConfig and StructuredOutputsConfig take.
    """
    config = _vllm("config")
    model = config.ModelConfig(model=str(MODEL), dtype="float32", max_model_len=512, seed=0)
    drafts = speculative or {"method": "ngram", "prompt_lookup_max": 4}
    cache_config = config.CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    cache_config.num_gpu_blocks = 100
    return config.VllmConfig(
        model_config=model,
        cache_config=cache_config,
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=512,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        speculative_config=config.SpeculativeConfig(
            num_speculative_tokens=NUM_DRAFT,
            target_model_config=model,
            target_parallel_config=config.ParallelConfig(),
            **drafts,
        ),
        device_config=config.DeviceConfig("cpu"),
        structured_outputs_config=config.StructuredOutputsConfig(
            **{"backend": "xgrammar", **(outputs or {})}
        ),
    )


@cache
def tokenizer() -> Any:
    """The tokenizer of the bundled model, as vLLM loads it."""
    return _vllm("tokenizers").cached_tokenizer_from_config(make_config().model_config)


def make_scheduler(config: Any) -> Any:
    """vLLM's own scheduler, for one attention layer that does not exist."""
    kv = _vllm("v1.kv_cache_interface")
    layer = kv.FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32
    )
    manager = _vllm("v1.structured_output").StructuredOutputManager(config)
    return _vllm("v1.core.sched.scheduler").Scheduler(
        vllm_config=config,
        kv_cache_config=kv.KVCacheConfig(
            num_blocks=100,
            kv_cache_tensors=[],
            kv_cache_groups=[kv.KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=manager,
        block_size=BLOCK,
    )


def keep_functions(monkeypatch: pytest.MonkeyPatch, patches: Any) -> list[tuple[Any, str, Any]]:
    """Whatever replaces these functions of vLLM, they are put back: owner, name, and function."""
    root = installed_root()
    assert root is not None
    found = []
    for patch in probe(root, patches).patches:
        if patch.wrap is not None:
            owner: Any = importlib.import_module(patch.module)
            *classes, last = patch.path.split(".")
            for step in classes:
                owner = getattr(owner, step)
            monkeypatch.setattr(owner, last, getattr(owner, last))
            found.append((owner, last, getattr(owner, last)))
    return found


def wait_for_grammar(requests: Any, name: str) -> None:
    """Until a worker's request has its grammar, which is compiled beside its first steps."""
    requests._asked[name].shadow._future.result(60)


def sampling_params(config: Any, **grammar: Any) -> Any:
    """SamplingParams as vLLM's front end passes them on; ``grammar`` as below, or nothing."""
    params = _vllm("sampling_params")
    wanted = params.StructuredOutputsParams(**grammar) if grammar else None
    sampling = params.SamplingParams(max_tokens=100, structured_outputs=wanted)
    sampling._validate_structured_outputs(
        config.model_config, config.structured_outputs_config, tokenizer()
    )
    return sampling


PROMPT = (5, 6, 7)


@cache
def _block_hasher() -> Any:
    """By what the scheduler finds blocks of texts in its cache."""
    utils, sha256 = _vllm("v1.core.kv_cache_utils"), _vllm("utils.hashing").sha256
    utils.init_none_hash(sha256)
    return utils.get_request_block_hasher(BLOCK, sha256)


def add_request(
    scheduler: Any,
    name: str,
    stops: Sequence[int] = (),
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 100,
    **grammar: Any,
) -> Any:
    """A request under ``grammar``: what StructuredOutputsParams takes.

    stops: its own stop tokens.
    """
    sampling = sampling_params(scheduler.vllm_config, **grammar)
    sampling.max_tokens = max_tokens
    sampling._all_stop_token_ids.update(stops)
    request = _vllm("v1.request").Request(
        name, [*prompt], sampling, None, block_hasher=_block_hasher()
    )
    scheduler.structured_output_manager.grammar_init(request)
    scheduler.add_request(request)
    return request


def first_step(scheduler: Any, count: int) -> Any:
    """The step of ``count`` requests' prompts; waits for their grammars."""
    wanted = [request.structured_output_request for request in scheduler.requests.values()]
    until = time.monotonic() + 60
    while not all(one is None or one.is_grammar_ready for one in wanted):
        assert time.monotonic() < until, "the grammars are never ready"
        time.sleep(0.02)
    step = scheduler.schedule()
    assert len(step.num_scheduled_tokens) == count
    return step


def end_step(
    scheduler: Any, step: Any, sampled: dict[str, list[int]], drafts: dict[str, list[int]]
) -> None:
    """``step`` gave ``sampled`` and the drafter then drew ``drafts``."""
    outputs = _vllm("v1.outputs")
    names = list(sampled)
    index = {name: at for at, name in enumerate(names)}
    tokens = [sampled[name] for name in names]
    scheduler.update_from_output(
        step, outputs.ModelRunnerOutput(names, index, sampled_token_ids=tokens)
    )
    scheduler.update_draft_token_ids(outputs.DraftTokenIds(list(drafts), list(drafts.values())))


def next_step(
    scheduler: Any, step: Any, sampled: dict[str, list[int]], drafts: dict[str, list[int]]
) -> Step:
    """What follows when ``step`` ended so, see ``end_step``."""
    end_step(scheduler, step, sampled, drafts)
    scheduled = scheduler.schedule()
    return Step(scheduled, scheduler.get_grammar_bitmask(scheduled))


def use_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' one function of CUDA's library in the interpreter's words; no pinned memory."""
    tensors = _vllm("utils.torch_utils")
    monkeypatch.setattr(tensors, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(tensors, "is_pin_memory_available", lambda: False, raising=False)
    tl = importlib.import_module("triton.language")
    plain = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    for name in (KERNELS, "vllm.v1.worker.gpu.sample.gumbel"):
        module = importlib.import_module(name)
        if hasattr(module, "tldevice"):
            monkeypatch.setattr(module, "tldevice", plain)


def verify(
    target: Tensor, draft: Tensor, token_ids: Sequence[Sequence[int]], seed: int = 1
) -> list[list[int]]:
    """What vLLM's rejection kernels emit for each request, at temperature 1.

    target: logits [B, K + 1, V], masked; draft: logits [B, K, V]; token_ids: [B] drafts, which may
    be shorter than K; -1 is vLLM's placeholder.
    """
    lengths = torch.tensor([len(row) + 1 for row in token_ids])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = torch.cat([target[at, :n] for at, n in enumerate(lengths.tolist())])
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    requests = torch.arange(len(token_ids), dtype=torch.int32)
    sampled, counts = importlib.import_module(KERNELS).rejection_sample(
        rows.contiguous(),
        draft.contiguous(),
        torch.tensor([token for row in token_ids for token in (0, *row)]),
        starts.to(torch.int32),
        positions + 7,
        requests,
        requests.repeat_interleave(lengths),
        positions.to(torch.int32),
        torch.ones(len(token_ids)),
        torch.arange(len(token_ids)) * 7919 + seed,
        draft.shape[1],
    )
    return [row[:n] for row, n in zip(sampled.tolist(), counts.tolist(), strict=True)]
