"""FlashAttention 3 for LMDeploy out of vLLM's wheel, where there is no wheel of its own.

LMDeploy speculates on CUDA with FlashAttention 3 only, and imports it as ``flash_attn_interface``.
vLLM ships the same kernels as a library of operators. Here the three functions that LMDeploy calls
are that library's operators with the arguments in its order: the kernels are what is measured.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_NAME = "flash_attn_interface"
# What the operator takes besides, and no default: Tensors and numbers that are not given.
_ABSENT: dict[str, Any] = {
    **dict.fromkeys(("k_new", "v_new", "q_v", "out", "page_table", "kv_batch_idx", "leftpad_k")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqlens_rotary")),
    **dict.fromkeys(("seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "s_aux")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "q_descale", "k_descale", "v_descale")),
    **dict.fromkeys(("scheduler_metadata", "pack_gqa", "cp_tot_seqused_k")),
}
_PLAIN = {"is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


def provide_flash_attention(library: Path) -> None:
    """Let ``import flash_attn_interface`` find the functions below, in this process.

    library: vLLM's ``vllm_flash_attn/_vllm_fa3_C.abi3.so``, of a build for this torch.

    Raises OSError for a file that cannot be loaded.
    """
    torch.ops.load_library(str(library))
    module = ModuleType(_NAME)
    module.__spec__ = importlib.machinery.ModuleSpec(_NAME, None)
    for function in (flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata):
        setattr(module, function.__name__, function)
    sys.modules[_NAME] = module


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    **options: Any,
) -> Tensor:
    """Texts of any lengths one behind another: q [tokens, heads, D], k and v likewise.

    options: cu_seqlens_q, cu_seqlens_k [B + 1] int32, max_seqlen_q, max_seqlen_k, and what
    ``flash_attn_with_kvcache`` takes. Returns [tokens, heads, D].
    """
    return _forward(q, k, v, softmax_scale=softmax_scale, num_splits=num_splits, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float | None = None,
    **options: Any,
) -> Tensor:
    """The last tokens of each text over pages: q [B, S, heads, D], caches [pages, size, heads, D].

    cache_seqlens: [B] int32, the texts' lengths with those tokens. options: page_table [B, P]
    int32, causal, window_size, softcap, scheduler_metadata, max_seqlen_q. Returns [B, S, heads, D].
    """
    options = {"seqused_k": cache_seqlens, "num_splits": 0, **options}
    return _forward(q, k_cache, v_cache, softmax_scale=softmax_scale, **options)


def get_scheduler_metadata(*sizes: Any, **options: Any) -> Tensor:
    """How the kernel is to split its work, ahead of ``flash_attn_with_kvcache``.

    sizes: batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
    cache_seqlens; by name too. options: qkv_dtype, headdim_v, cu_seqlens_q, cu_seqlens_k_new,
    page_size, causal, window_size, has_softcap, num_splits. Returns [M] int32.
    """
    names = "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens"
    given = {**dict(zip(names.split(), sizes, strict=False)), **options}
    left, right = _window(given.get("window_size"))
    headdim = given["headdim"]
    metadata: Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        given["batch_size"],
        given["max_seqlen_q"],
        given["max_seqlen_k"],
        given["num_heads_q"],
        given["num_heads_kv"],
        headdim,
        given.get("headdim_v") or headdim,
        given.get("qkv_dtype", torch.bfloat16),
        given["cache_seqlens"],
        given.get("cu_seqlens_q"),
        None,  # cu_seqlens_k
        given.get("cu_seqlens_k_new"),
        None,  # seqused_q
        None,  # leftpad_k
        given.get("page_size"),
        0,  # max_seqlen_k_new
        given.get("causal", False),
        left,
        right,
        given.get("has_softcap", False),
        given.get("num_splits", 0),
        None,  # pack_gqa
        0,  # sm_margin
    )
    return metadata


def _forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    left, right = _window(options.pop("window_size", None))
    scale = options.pop("softmax_scale")
    arguments = {
        **_ABSENT,
        **_PLAIN,
        "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "is_causal": options.pop("causal", False),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0,
        **options,
    }
    output: Tensor = torch.ops._vllm_fa3_C.fwd(q=q, k=k, v=v, **arguments)[0]
    return output


def _window(size: Sequence[int] | None) -> tuple[int, int]:
    return (-1, -1) if size is None else (size[0], size[1])
