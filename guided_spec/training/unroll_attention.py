"""Attention of an unrolled draft without a mask, exactly, by kernels for causal attention.

At depth s of an unroll a query sees the keys of the text up to its own position, and at each
further depth the key of its own position. The first part is causal attention, which kernels compute
without reading masked keys; the second part is s scores a query. One softmax covers both: with L
the logarithm of the sum of the exponentials of all scores, and L0 that of the first part's,

    output = exp(L0 - L) * output of the first part + sum over depths exp(score - L) * value

The kernel's backward pass gets L and the whole output instead of its own, and so returns the
gradients of its part: the same decomposition as in ring attention (arXiv:2310.01889).

A dense mask of depth s is (1 + s) * T * T large instead, and all of it is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from guided_spec.training.compiled import compiled_on_cuda

UNROLLED = "guided_spec_unroll"
"""The name under which transformers' layers find ``unrolled_attention``."""

aten = torch.ops.aten


def has_kernel(like: Tensor, head_dim: int) -> bool:
    """Whether causal attention has the kernels for it where ``like`` is computed.

    On CUDA these are FlashAttention's: 16 bits wide, as under autocast.
    """
    kind = like.device.type
    if kind == "cpu":
        return like.dtype in (torch.float32, torch.float64, torch.bfloat16)
    is_half = _compute_dtype(like) in (torch.bfloat16, torch.float16)
    return kind == "cuda" and is_half and head_dim % 8 == 0 and head_dim <= 256


def unrolled_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """What queries attend to at one depth of an unroll, [B, Hq, T, D].

    query: [B, Hq, T, D]. key, value: [B, Hkv, (1 + s) * T, D]: of the text, and of each depth of
    drafting, the last their own. Float, on the CPU or CUDA, where ``has_kernel`` holds.
    """
    dtype = _compute_dtype(query)
    parts = (part.to(dtype) for part in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        found: Tensor = _Unrolled.apply(*parts, scale)  # type: ignore[no-untyped-call]
    return found


def _compute_dtype(like: Tensor) -> torch.dtype:
    kind = like.device.type
    if torch.is_autocast_enabled(kind) and like.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return like.dtype


class _Parts(NamedTuple):
    """Keys or values: of the text [B, Hkv, T, D], and of the depths [B, Hkv, S, T, D]."""

    text: Tensor
    depths: Tensor

    @classmethod
    def of(cls, states: Tensor, length: int) -> _Parts:
        return cls(states[:, :, :length], states[:, :, length:].unflatten(2, (-1, length)))


class _Depths(NamedTuple):
    """Keys and values of each depth of drafting, each [B, Hkv, S, T, D]."""

    keys: Tensor
    values: Tensor


class _Causal(NamedTuple):
    """output: [B, H, T, D]. total: float32 [B, H, T, 1], the log of the sum of the exponentials.

    state: what CUDA's backward pass needs besides these.
    """

    output: Tensor
    total: Tensor
    state: tuple[Any, ...]


class _Unrolled(torch.autograd.Function):
    """Scores of depths are [B, Hkv, G, T, S], where G query heads share a head of keys.

    Tensors as large as queries have the memory layout [B, T, Hq, D], as products make and take it.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = (_Parts.of(part, query.shape[2]) for part in (key, value))
        text = _causal(query, keys.text, values.text, scale)
        depths = _Depths(keys.depths, values.depths)
        output, total = text.output, text.total
        if depths.keys.shape[2]:
            output, total = _mixed(query, depths, text._replace(state=()), scale)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.scale, ctx.state = scale, text.state
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        keys, values = (_Parts.of(part, query.shape[2]) for part in (key, value))
        grad = upstream[0].to(query.dtype)
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        whole = _Causal(output.detach(), total, ctx.state)  # torch.compile looks at its .grad
        depths = _Depths(keys.depths, values.depths)
        text = _causal_backward(grad, query, keys.text, values.text, whole, ctx.scale)
        if depths.keys.shape[2]:
            text = _mixed_backward(grad, query, whole._replace(state=()), depths, text, ctx.scale)
        return (*(part.to(query.dtype) for part in text), None)


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))


@compiled_on_cuda
def _mixed(query: Tensor, depths: _Depths, text: _Causal, scale: float) -> tuple[Tensor, Tensor]:
    """The output and ``total`` of text and depths."""
    groups = query.shape[1] // depths.keys.shape[1]
    scores = _scores(query, depths.keys, groups) * scale
    ours = text.total.unflatten(1, (-1, groups))
    whole = torch.cat([ours, scores], -1).logsumexp(-1, keepdim=True)
    mixed = _mix((scores - whole).exp(), depths.values)
    mixed = mixed + (ours - whole).exp() * text.output.unflatten(1, (-1, groups))
    return _laid_out(mixed.flatten(1, 2), query.dtype), whole.flatten(1, 2)


@compiled_on_cuda
def _mixed_backward(
    grad: Tensor,
    query: Tensor,
    whole: _Causal,
    depths: _Depths,
    text: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """The gradients of queries, of keys and of values.

    whole: of text and depths. text: such gradients, by the text's part.
    """
    keys, values = depths
    split = (-1, query.shape[1] // keys.shape[1])
    scores = _scores(query, keys, split[1]) * scale
    share = (scores - whole.total.unflatten(1, split)).exp()
    delta = (_wide(grad) * _wide(whole.output)).sum(-1).unflatten(1, split).unsqueeze(-1)
    inner = share * (_scores(grad, values, split[1]) - delta) * scale
    return [
        _laid_out(_wide(text[0]) + _mix(inner, keys).flatten(1, 2), query.dtype),
        _joined(text[1], _spread(inner, query), keys.dtype),
        _joined(text[2], _spread(share, grad), values.dtype),
    ]


def _laid_out(states: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, T, D], with the memory layout of [B, T, H, D]."""
    return states.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


# Sums of products of rows, depth by depth: they are bound by memory, and as matrices they would be
# one tiny product for each position and head.


def _scores(query: Tensor, depths: Tensor, groups: int) -> Tensor:
    """Scores of each query with the key of its position at each depth; float32 or wider."""
    split = _wide(query).unflatten(1, (-1, groups))
    found = [(split * states.unsqueeze(2)).sum(-1) for states in depths.unbind(2)]
    return torch.stack(found, -1)


def _mix(shares: Tensor, depths: Tensor) -> Tensor:
    """[B, Hkv, G, T, D]: what each depth has, by its share."""
    mixed: Tensor = shares.new_zeros(*shares.shape[:-1], depths.shape[-1])
    for depth, states in enumerate(depths.unbind(2)):
        mixed = mixed.addcmul(shares[..., depth, None], _wide(states).unsqueeze(2))
    return mixed


def _spread(shares: Tensor, queries: Tensor) -> Tensor:
    """[B, Hkv, S, T, D]: the sum over the query heads that share a head of keys."""
    split = _wide(queries).unflatten(1, (shares.shape[1], -1))
    found = [(share.unsqueeze(-1) * split).sum(2) for share in shares.unbind(-1)]
    return torch.stack(found, 2)


def _joined(text: Tensor, depths: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([_wide(text), depths.flatten(2, 3)], 2).to(dtype)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> _Causal:
    """CUDA's kernel knows keys that query heads share; that of the CPU has them repeated."""
    if query.device.type == "cpu":
        key, value = (_repeat(part, query.shape[1]) for part in (key, value))
        output, total = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=True, scale=scale
        )
        return _Causal(output, total.unsqueeze(-1), ())
    output, total, *state = aten._scaled_dot_product_flash_attention(
        query, key, value, is_causal=True, scale=scale
    )
    return _Causal(output, total.unsqueeze(-1), tuple(state[:6]))


def _causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: _Causal, scale: float
) -> list[Tensor]:
    """Gradients of query, key and value by their part of the softmax that ``whole`` is of."""
    if query.device.type == "cpu":
        repeated = (_repeat(part, query.shape[1]) for part in (key, value))
        of_query, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, query, *repeated, whole.output, whole.total.squeeze(-1)),
            dropout_p=0.0,
            is_causal=True,
            scale=scale,
        )
        return [of_query, *(_wide(x).unflatten(1, (key.shape[1], -1)).sum(2) for x in others)]
    names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
    state = dict(zip(names, whole.state, strict=True))
    found: Any = aten._scaled_dot_product_flash_attention_backward(
        *(grad, query, key, value, whole.output, whole.total.squeeze(-1)),
        dropout_p=0.0,
        is_causal=True,
        scale=scale,
        **state,
    )
    return list(found)


def _repeat(states: Tensor, heads: int) -> Tensor:
    return states.repeat_interleave(heads // states.shape[1], 1)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of a layer of a head; without a mask, a window, or dropout."""
    del module, attention_mask, options
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return unrolled_attention(query, key, value, scale=scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(UNROLLED, _attend)
