"""LMDeploy's benchmark as far as a CPU goes: attention, settings, counts."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import lmdeploy_peer
from benchmarks.gpu.lmdeploy_attention import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    provide_flash_attention,
)
from tests.benchmarks.small_llama import write_small

# As vLLM 0.25.1's library declares them.
FORWARD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, "
    "int window_size_left, int window_size_right, bool has_softcap, int num_splits, "
    "bool? pack_gqa, int sm_margin) -> Tensor"
)
HEADS, KEY_HEADS, SIZE, PAGE = 4, 2, 8, 4


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One text, causal from its end: q [S, heads, D], k and v [L, key heads, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=0) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(0, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> list[Tensor]:
    """What the operator computes, by the places of its arguments."""
    cu_q, cu_k, seqused, pages = options[4], options[5], options[8], options[11]
    scale, causal, left, right, softcap = options[20:25]
    assert (causal, left, right, softcap) == (True, -1, -1, 0.0)
    assert options[25] is True
    if pages is None:
        texts = zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        return [torch.cat([attend(q[a:b], k[c:d], v[c:d], scale) for a, b, c, d in texts])]
    found = []
    for at, length in enumerate(seqused.tolist()):
        keys, values = (x[pages[at].long()].flatten(0, 1)[:length] for x in (k, v))
        found.append(attend(q[at], keys, values, scale))
    return [torch.stack(found)]


def metadata(*arguments: Any) -> Tensor:
    numbers = [int(x) for x in arguments if isinstance(x, int) and not isinstance(x, bool)]
    assert arguments[7] == torch.float16
    return torch.tensor(numbers)


@pytest.fixture
def library() -> Iterator[None]:
    found = torch.library.Library("_vllm_fa3_C", "DEF")
    found.define(FORWARD)
    found.define(METADATA)
    found.impl("fwd", forward, "CPU")
    found.impl("get_scheduler_metadata", metadata, "CPU")
    yield
    found._destroy()


def paged_caches(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tables of pages [B, 2], and key and value caches of four pages that hold two texts."""
    tables = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    caches = torch.zeros(2, 4, PAGE, KEY_HEADS, SIZE)
    for table, text in zip(tables, texts, strict=True):
        for place in range(text.shape[1]):
            caches[:, table[place // PAGE], place % PAGE] = text[:, place]
    return tables, caches


@pytest.mark.usefixtures("library")
def test_attention() -> None:
    """Texts behind one another, and the same texts over pages, as LMDeploy asks for them."""
    torch.manual_seed(0)
    lengths, news = torch.tensor([7, 5], dtype=torch.int32), 3
    texts = [torch.randn(2, length, KEY_HEADS, SIZE) for length in lengths.tolist()]
    queries = torch.randn(2, news, HEADS, SIZE)
    expected = torch.stack(
        [attend(q, k, v, SIZE**-0.5) for q, (k, v) in zip(queries, texts, strict=True)]
    )
    k, v = torch.cat(texts, dim=1)
    flat = flash_attn_varlen_func(
        q=queries.flatten(0, 1),
        k=k,
        v=v,
        cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 7, 12], dtype=torch.int32),
        max_seqlen_q=news,
        max_seqlen_k=7,
        softmax_scale=SIZE**-0.5,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
    )
    torch.testing.assert_close(flat, expected.flatten(0, 1))
    pages, caches = paged_caches(texts)
    paged = flash_attn_with_kvcache(
        queries,
        caches[0],
        caches[1],
        cache_seqlens=lengths,
        max_seqlen_q=news,
        scheduler_metadata=torch.zeros(1, dtype=torch.int32),
        page_table=pages,
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
    )
    torch.testing.assert_close(paged, expected)


@pytest.mark.usefixtures("library")
def test_scheduler_metadata() -> None:
    sizes = {"batch_size": 2, "max_seqlen_q": 6, "max_seqlen_k": 512}
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    options = {"qkv_dtype": torch.float16, "page_size": 64, "causal": True, "window_size": (-1, -1)}
    heads = {"num_heads_q": 32, "num_heads_kv": 8, "headdim": 128, "headdim_v": None}
    found = get_scheduler_metadata(cache_seqlens=lengths, **sizes, **heads, **options)
    assert found.tolist() == [2, 6, 512, 32, 8, 128, 128, 64, 0, -1, -1, 0, 0]
    positional = get_scheduler_metadata(2, 6, 512, 32, 8, 128, lengths, **options)
    assert positional.tolist() == found.tolist()


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        provide_flash_attention(tmp_path / "absent.so")
    assert "flash_attn_interface" not in sys.modules


def test_the_draft_folder(tmp_path: Path) -> None:
    eagle3 = write_small(tmp_path).eagle3
    folder = lmdeploy_peer.write_draft_folder(eagle3, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["draft_vocab_size"] == 200
    assert (folder / "model.safetensors").read_bytes() == (
        eagle3 / "model.safetensors"
    ).read_bytes()


@pytest.fixture
def engine_loop() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what LMDeploy imports
        pytest.importorskip("lmdeploy", reason="LMDeploy is not installed")
        return importlib.import_module(lmdeploy_peer.ENGINE_LOOP)


@pytest.mark.usefixtures("engine_loop")
def test_generation_config() -> None:
    request = {"prompt_ids": [1], "schema": '{"type": "object"}', "max_tokens": 9}
    greedy = lmdeploy_peer.generation_config(request, 0.0)
    assert (greedy.do_sample, greedy.max_new_tokens) == (False, 9)
    assert greedy.response_format["json_schema"]["schema"] == {"type": "object"}
    sampled = lmdeploy_peer.generation_config({"prompt_ids": [1], "max_tokens": 9}, 0.7)
    assert (sampled.do_sample, sampled.temperature, sampled.top_k, sampled.top_p) == (
        True,
        0.7,
        0,
        1,
    )
    assert sampled.response_format is None


def test_counts(engine_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps with drafts; LMDeploy's record stays what it was."""
    monkeypatch.setattr(engine_loop, "RequestMetrics", engine_loop.RequestMetrics)
    counts = lmdeploy_peer._count_drafts()
    for accepted in (0, 3):
        info = {"num_draft_tokens": 5, "num_accepted_tokens": accepted}
        record = engine_loop.RequestMetrics(1.0, [], spec_info=info, cached_tokens=0)
        assert dataclasses.asdict(record)["spec_info"] == info
    engine_loop.RequestMetrics(1.0, [], spec_info=None)
    engine_loop.RequestMetrics(1.0, [], spec_info={"num_draft_tokens": 0, "num_accepted_tokens": 0})
    assert counts == {"drafts": 2, "drafted": 10, "accepted": 3}


@pytest.mark.usefixtures("engine_loop")
def test_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target hands out what the head reads, whatever its number of layers suggests."""
    config: Any = importlib.import_module("lmdeploy.pytorch.config")
    builder: Any = importlib.import_module(lmdeploy_peer.LLAMA).LlamaModelConfigBuilder
    monkeypatch.setattr(builder, "build", builder.__dict__["build"])
    target = str(write_small(tmp_path).target)

    def layers(method: str | None) -> Any:
        found = config.ModelConfig.from_pretrained(target, dtype="float32", spec_method=method)
        return getattr(found.hf_config, "aux_hidden_state_layers", None)

    assert layers("eagle3") == (2, 1, 0)  # of three layers
    lmdeploy_peer.use_layers([0, 1, 2])
    assert layers("eagle3") == (0, 1, 2)
    assert layers(None) is None
