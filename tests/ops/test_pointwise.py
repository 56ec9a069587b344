"""The pointwise operators give what transformers' Llama modules give, bit for bit on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
)
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from guided_spec.ops.pointwise import (
    add_branch,
    add_rms_norm,
    rms_norm,
    silu_mul,
    silu_mul_packed,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 8), (3, 2, 40), (5, 17)]


def norm_module(width: int, dtype: torch.dtype, kind: type[Any] = LlamaRMSNorm) -> Any:
    module = kind(width, eps=1e-5)
    torch.nn.init.normal_(module.weight)
    return module.to(dtype).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "shift"), [(LlamaRMSNorm, None), (Olmo2RMSNorm, 0.0), (Gemma3RMSNorm, 1.0)]
)
def test_rms_norm(
    kind: type[Any], shift: float | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module, x = norm_module(shape[-1], dtype, kind), torch.randn(shape).to(dtype) * 3
    found = rms_norm(x, module.weight, 1e-5, shift)
    assert torch.equal(found, module(x))
    assert found.dtype == dtype
    assert torch.equal(add_rms_norm(x, x, module.weight, 1e-5, shift).normed, module(x + x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = norm_module(shape[-1], dtype)
    x, residual = torch.randn(2, *shape).to(dtype)
    found = add_rms_norm(x, residual, module.weight, 1e-5)
    assert torch.equal(found.residual, x + residual)
    assert torch.equal(found.normed, module(x + residual))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_add_branch(factor: float, dtype: torch.dtype) -> None:
    """As layers add what attention gives: with a norm of it, before the next one's, or neither."""
    torch.manual_seed(0)
    own, then = norm_module(40, dtype, Olmo2RMSNorm), norm_module(40, dtype)
    x, residual = torch.randn(2, 3, 40).to(dtype)
    for first in (None, own):
        for second in (None, then):
            norms = (
                None if first is None else (first.weight, 1e-5, 0.0),
                None if second is None else (second.weight, 1e-5, None),
            )
            found = add_branch(x, residual, *norms, factor)
            change = x if first is None else first(x)
            total = residual + change * factor
            assert torch.equal(found.residual, total)
            assert torch.equal(found.normed, total if second is None else second(total))


def test_a_weight_in_float32_decides_the_dtype() -> None:
    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(8)
    assert rms_norm(x, weight, 1e-5).dtype == torch.float32
    found = add_rms_norm(x, x, weight, 1e-5)
    assert (found.residual.dtype, found.normed.dtype) == (torch.bfloat16, torch.float32)
    assert rms_norm(x, weight, 1e-5, 1.0).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_the_inside_of_the_mlp(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2)
    mlp: Any = LlamaMLP(config).to(dtype).requires_grad_(requires_grad=False)
    x = torch.randn(3, 2, 16).to(dtype) * 4
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    assert torch.equal(mlp.down_proj(silu_mul(gate, up)), mlp(x))
    packed = silu_mul_packed(torch.cat([gate, up], -1))
    torch.testing.assert_close(packed, silu_mul(gate, up))
