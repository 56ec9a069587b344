"""An installed vLLM loads a target and a draft head on a CPU: its parser, classes and loader.

What is vLLM's: how it reads config.json, which class it takes for it, which tensors it loads where,
and what it borrows of the target. In the place of its attention, whose backends want a device,
stands attention in torch over one text, and in the place of two kernels their definition.

Import it behind a check that vLLM is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

DTYPE = "float32"
LOADERS = {
    "eagle": ("eagle", "load_eagle_model"),
    "eagle3": ("eagle", "load_eagle_model"),
    "dflash": ("dflash", "load_dflash_model"),
    "dspark": ("dspark", "load_dspark_model"),
    "mtp": ("eagle", "load_eagle_model"),
}


class Loaded(NamedTuple):
    """target, draft: vLLM's modules. config: its VllmConfig. missing: what no file filled."""

    target: Any
    draft: Any
    config: Any
    missing: list[str]


def _vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.{module}")


@contextmanager
def load_draft(target: Path, head: Path, **speculative: Any) -> Iterator[Loaded]:
    """Both as vLLM's engine loads them; inside, the modules run.

    speculative: what SpeculativeConfig takes besides the folder of the head. Memory that vLLM
    allocates holds NaN, so that a weight that was not loaded is seen.
    """
    config = _make_config(target, head, speculative)
    package, name = LOADERS[config.speculative_config.method]
    load = getattr(_vllm(f"v1.worker.gpu.spec_decode.{package}.utils"), name)
    with _vllm("config").set_current_vllm_config(config), _one_process(target), _on_cpu():
        loader = _vllm("model_executor.model_loader")
        ours = loader.get_model(vllm_config=config, model_config=config.model_config)
        draft = load(ours, config)
        missing = [n for n, tensor in draft.named_parameters() if tensor.isnan().any()]
        with torch.no_grad(), _vllm("forward_context").set_forward_context(None, config):
            yield Loaded(ours, draft, config, missing)


def _make_config(target: Path, head: Path, speculative: dict[str, Any]) -> Any:
    config = _vllm("config")
    model = config.ModelConfig(
        model=str(target),
        skip_tokenizer_init=True,
        dtype=DTYPE,
        max_model_len=64,
        seed=0,
        enforce_eager=True,
    )
    draft = config.SpeculativeConfig(
        model=str(head),
        target_model_config=model,
        target_parallel_config=config.ParallelConfig(),
        **speculative,
    )
    return config.VllmConfig(
        model_config=model,
        cache_config=config.CacheConfig(block_size=16, enable_prefix_caching=False),
        speculative_config=draft,
        device_config=config.DeviceConfig("cpu"),
        compilation_config=config.CompilationConfig(mode=0, custom_ops=["none"]),
    )


@contextmanager
def _one_process(folder: Path) -> Iterator[None]:
    state = _vllm("distributed.parallel_state")
    if not torch.distributed.is_initialized():
        state.init_distributed_environment(1, 0, f"file://{folder}/process", 0, "gloo")
        state.initialize_model_parallel(1, 1)
    yield


class _Attention(nn.Module):
    """Attention over one text and, where something was kept, over what was kept before it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *args: Any,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        nn.Module.__init__(self)
        del args, kwargs
        self.sizes = (num_heads, num_kv_heads or num_heads, head_size)
        self.scale, self.window, self.layer_name = scale, per_layer_sliding_window, prefix
        self.kv_cache, self.is_causal = None, True
        self.kept: list[Tensor] = []
        # vLLM writes what comes before a block through here.
        self.impl = SimpleNamespace(do_kv_cache_update=lambda *given: self.kept.extend(given[1:3]))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """A backend would choose the form of its scales here."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        del args
        heads, kv_heads, size = self.sizes
        count = len(query)
        query = query.view(count, heads, size)
        key, value = key.view(count, kv_heads, size), value.view(count, kv_heads, size)
        before = 0
        if self.kept:
            before = len(self.kept[0])
            key, value = torch.cat([self.kept[0], key]), torch.cat([self.kept[1], value])
        seen = torch.ones(count, before + count, dtype=torch.bool)
        if self.is_causal:
            seen = seen.tril(before)
        if self.window is not None:
            seen = seen.triu(before - self.window + 1)
        queries, keys, values = (part.transpose(0, 1)[None] for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=self.scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(count, -1)


@contextmanager
def _on_cpu() -> Iterator[None]:
    attention = _vllm("model_executor.layers.attention").Attention
    names = ("__init__", "process_weights_after_loading", "forward")
    own: dict[str, Any] = {name: vars(_Attention)[name] for name in names}
    base = _vllm("model_executor.model_loader.base_loader")
    build = base.initialize_model

    def build_with_nan(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
        return model

    kernels: dict[str, Any] = {"rms_norm": _rms_norm, "rotary_embedding": _rotate}
    with (
        mock.patch.multiple(attention, create=True, **own),
        mock.patch.object(base, "initialize_model", build_with_nan),
        mock.patch.object(torch.accelerator, "empty_cache", return_value=None),
        mock.patch.multiple(_vllm("_custom_ops"), create=True, **kernels),
    ):
        yield


def _rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    """weight: [size], or [layers, size] for x [layers, ...]."""
    spread = weight if weight.dim() == 1 else weight.view(len(weight), 1, 1, -1)
    out.copy_(x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * spread)


def _rotate(
    positions: Tensor, query: Tensor, key: None, size: int, table: Tensor, is_neox: object
) -> None:
    """query [T, heads * size], in place; table [positions, size]: cosines, then sines."""
    assert is_neox
    assert key is None
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    a, b = query.view(len(query), -1, size).chunk(2, -1)
    query.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view_as(query))
