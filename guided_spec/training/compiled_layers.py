"""The layers of a head as they are trained on CUDA: what is between their products is compiled.

Only the order of operations is transformers'. What a layer gives is the same; of 16 bits, what was
rounded between two passes is no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from guided_spec.models.heads.eagle import PARTS, FirstLayer
from guided_spec.models.transformers_version import CACHE_NAMES
from guided_spec.training.compiled import compiled_on_cuda
from guided_spec.training.unroll_attention import UNROLLED, unrolled_attention


def compile_layers(model: nn.Module) -> None:
    """Replace the elementwise parts of heads on CUDA by compiled ones; changes ``model``.

    These are norms with the joins and sums next to them, the gates of MLPs, and the rotation for
    the attention of an unroll. Norms return the dtype of autocast: each matrix product after them
    would otherwise cast float32 again.
    """
    for module in model.modules():
        if type(module) in _RUNS and next(module.parameters()).is_cuda:
            _replace(module)


def _replace(module: nn.Module) -> None:
    vars(module).update(forward=partial(_RUNS[type(module)], module))


def _run_norm(norm: Any, x: Tensor) -> Tensor:
    return _normed(x.flatten(0, -2), norm.weight, norm.variance_epsilon).view_as(x)


@compiled_on_cuda
def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, weight, eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    kind, wide = x.device.type, x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    scaled = weight * wide.to(x.dtype)
    if torch.is_autocast_enabled(kind):
        return scaled.to(torch.get_autocast_dtype(kind))
    return scaled


def _run_first(layer: Any, embedding: Tensor, hidden: Tensor, **attention: Any) -> Tensor:
    """The forward of ``FirstLayer``, [B, T, H]; embedding, hidden: [B, T, H]."""
    norms = layer.input_layernorm, layer.hidden_norm
    eps: float = layer.hidden_norm.variance_epsilon
    rows = embedding.flatten(0, -2), hidden.flatten(0, -2)
    wide = _join_normed(*rows, *(norm.weight for norm in norms), eps)
    residual = wide[:, hidden.shape[-1] :] if layer.norm_before_residual else rows[1]
    attended = layer.self_attn(wide.view(*hidden.shape[:-1], -1), **attention)[0]
    return _run_end(layer, residual, attended)


def _run_layer(layer: Any, hidden: Tensor, **attention: Any) -> Tensor:
    """The forward of a decoder layer, [B, T, H]; hidden: [B, T, H]."""
    attended = layer.self_attn(layer.input_layernorm(hidden), **attention)[0]
    return _run_end(layer, hidden.flatten(0, -2), attended)


def _run_end(layer: Any, residual: Tensor, attended: Tensor) -> Tensor:
    """What a layer does after its attention, [B, T, H]. residual: [B * T, H]."""
    norm = layer.post_attention_layernorm
    rows = attended.flatten(0, -2)
    states, normed = _add_normed(residual, rows, norm.weight, norm.variance_epsilon)
    output: Tensor = (states + layer.mlp(normed)).view_as(attended)
    return output


@compiled_on_cuda
def _join_normed(one: Tensor, other: Tensor, own: Tensor, others: Tensor, eps: float) -> Tensor:
    """[n, 2 H]: two tensors after a norm each, with the weights ``own`` and ``others``."""
    return torch.cat([_norm(one, own, eps), _norm(other, others, eps)], -1)


@compiled_on_cuda
def _add_normed(one: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A sum, and what a norm makes of it."""
    total = one + other
    return total, _norm(total, weight, eps)


def _run_mlp(mlp: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    gated = _gate(mlp.gate_proj(rows), mlp.up_proj(rows), mlp.act_fn)
    output: Tensor = mlp.down_proj(gated).view_as(x)
    return output


@compiled_on_cuda
def _gate(gate: Tensor, up: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    return activate(gate) * up


def _run_attention(
    attention: Any, hidden_states: Tensor, *, position_embeddings: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention's output [B, T, H] and None; compiled where it is that of an unroll.

    Queries, keys and values keep the memory layout of the products: nothing is transposed.
    """
    if attention.config._attn_implementation != UNROLLED:
        options |= {"position_embeddings": position_embeddings}
        found: tuple[Tensor, None] = type(attention).forward(attention, hidden_states, **options)
        return found
    shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
    query = attention.q_proj(hidden_states).view(shape)
    key = attention.k_proj(hidden_states).view(shape)
    value = attention.v_proj(hidden_states).view(shape)
    if isinstance(attention, PARTS["qwen3"].attention):
        query, key = attention.q_norm(query), attention.k_norm(key)
    turns = (part.expand(len(query), -1, -1).flatten(0, 1) for part in position_embeddings)
    rotated = _rotate(query.flatten(0, 1), key.flatten(0, 1), *turns)
    query, key = (part.unflatten(0, shape[:2]) for part in rotated)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    cache: Any = next(options[name] for name in CACHE_NAMES if name in options)
    key, value = cache.update(key, value, attention.layer_idx)
    output = unrolled_attention(query, key, value, scale=attention.scaling)
    return attention.o_proj(output.transpose(1, 2).flatten(2)), None


@compiled_on_cuda
def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by position. query, key: [n, heads, D]. cos, sin: [n, D]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + _half_turn(query) * sin, key * cos + _half_turn(key) * sin


def _half_turn(states: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return torch.cat([-second, first], -1)


_RUNS: dict[type[nn.Module], Callable[..., Any]] = {
    kind: run
    for parts in PARTS.values()
    for kind, run in (
        (parts.norm, _run_norm),
        (parts.mlp, _run_mlp),
        (parts.attention, _run_attention),
        (parts.layer, _run_layer),
        (FirstLayer, _run_first),
    )
}
