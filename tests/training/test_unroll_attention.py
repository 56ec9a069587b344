"""Attention of an unroll without a mask is that under the dense one, and so are its gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.models.heads.loading import load_head
from guided_spec.training.algorithms import heads
from guided_spec.training.algorithms.heads import unroll, unroll_mask
from guided_spec.training.unroll_attention import has_kernel, unrolled_attention
from tests.learned_heads import write_head

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    repeats = key.shape[2] // length - 1
    mask = unroll_mask(length, repeats, device=query.device)
    keys, values = (part.repeat_interleave(groups, 1) for part in (key, value))
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3)


def unmasked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return unrolled_attention(query, key, value, scale=0.3)


def run(attend: Attention, parts: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    leaves = [part.clone().requires_grad_() for part in parts]
    output = attend(*leaves)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    return [output, *torch.autograd.grad((output.float() * weights).sum(), leaves)]


def draw(shape: tuple[int, int, int, int, int], repeats: int, **options: Any) -> list[Tensor]:
    batch, queries, keys, length, width = shape
    random = torch.Generator().manual_seed(5)
    sizes = [(queries, length), (keys, (1 + repeats) * length), (keys, (1 + repeats) * length)]
    made = [torch.randn(batch, *size, width, generator=random) for size in sizes]
    return [part.to(**options) for part in made]


@pytest.mark.parametrize("repeats", [0, 1, 5])
@pytest.mark.parametrize("shape", [(2, 4, 2, 7, 8), (1, 3, 3, 33, 16), (1, 6, 1, 1, 4)])
def test_it_is_what_the_dense_mask_gives(
    shape: tuple[int, int, int, int, int], repeats: int
) -> None:
    parts = draw(shape, repeats, dtype=torch.float64)
    assert has_kernel(parts[0], shape[-1])
    for ours, wanted in zip(run(unmasked, parts), run(dense, parts), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_unrolls_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    target, draft = write_head(tmp_path, method, 64)
    head: Any = load_head(method, draft, target)
    tokens = torch.arange(22).view(2, 11)
    states = torch.randn(2, 11, len(head.aux_hidden_layers) * 32)
    masks: list[bool] = []
    build = heads.head_masks

    def count(*arguments: Any) -> Any:
        masks.append(True)
        return build(*arguments)

    monkeypatch.setattr(heads, "head_masks", count)
    before = head.config._attn_implementation
    with torch.no_grad():
        ours = list(unroll(head, tokens, states, 4))
        assert not masks
        assert head.config._attn_implementation == before
        monkeypatch.setattr(heads, "has_kernel", lambda *_: False)
        wanted = list(unroll(head, tokens, states, 4))
    assert len(masks) == 4
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("change", ["attention_dropout", "layer_types", "_attn_implementation"])
def test_what_needs_a_mask_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    target, draft = write_head(tmp_path, "eagle3", 64)
    head: Any = load_head("eagle3", draft, target)
    values = {
        "attention_dropout": 0.5,
        "layer_types": ["sliding_attention"],
        "_attn_implementation": "eager",
    }
    head.config.sliding_window = 4
    monkeypatch.setattr(head.config, change, values[change], raising=False)
    masks: list[Any] = []
    build = heads.head_masks

    def keep(*arguments: Any) -> Any:
        masks.append(build(*arguments))
        return masks[-1]

    monkeypatch.setattr(heads, "head_masks", keep)
    with torch.no_grad():
        list(unroll(head, torch.arange(11)[None], torch.randn(1, 11, 96), 2))
    assert len(masks) == 2
