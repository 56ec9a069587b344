"""The published equations of EAGLE and EAGLE-3 in plain torch: one text, no cache, no modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.models.heads.draft_head import DraftHead
from tests.models.heads.head_steps import HeadSteps
from tests.models.heads.heads import HEAD_DIM, NORM_EPS

Tensors = Mapping[str, Tensor]
Pass = Callable[[Tensor, Tensor], Tensor]


class Text(NamedTuple):
    """states [P, X]: of the target. tokens [P + K]: the one after each, then K drafts."""

    states: Tensor
    tokens: Tensor


def draw_texts(lengths: Sequence[int], width: int, vocab_size: int, drafts: int) -> list[Text]:
    """Random states and tokens."""
    random = torch.Generator().manual_seed(5)
    return [
        Text(
            torch.randn(length, width, generator=random),
            torch.randint(vocab_size, (length + drafts,), generator=random),
        )
        for length in lengths
    ]


def unroll(run: Pass, score: Callable[[Tensor], Tensor], inputs: Tensor, tokens: Tensor) -> Tensor:
    """[P + K, D]: logits of P positions with features, then of K that recycle the one before."""
    scores: list[Tensor] = []
    hidden = inputs
    while True:
        output = run(tokens[: len(hidden)], hidden)
        scores.append(score(output if not scores else output[-1:]))
        if len(hidden) == len(tokens):
            return torch.cat(scores)
        hidden = torch.cat([hidden, output[-1:]])


def eagle(tensors: Tensors, num_layers: int = 1) -> Pass:
    """x = fc([e ; h]), then layers, the first without its norm."""

    def run(tokens: Tensor, hidden: Tensor) -> Tensor:
        fused = torch.cat([tensors["embed_tokens.weight"][tokens], hidden], -1)
        x = _linear(fused, tensors, "fc")
        for index in range(num_layers):
            layer = _part(tensors, f"layers.{index}")
            x = x + _attend(x if index == 0 else _norm(x, layer["input_layernorm.weight"]), layer)
            x = x + _mlp(_norm(x, layer["post_attention_layernorm.weight"]), layer)
        return x

    return run


class Eagle3(NamedTuple):
    """The three functions of an EAGLE-3 head."""

    features: Callable[[Tensor], Tensor]
    run: Pass
    score: Callable[[Tensor], Tensor]


def eagle3(
    tensors: Tensors,
    flags: Mapping[str, bool],
    num_layers: int = 1,
    window: int | None = None,
    count: int = 3,
) -> Eagle3:
    """tensors: with embed_tokens.weight and lm_head.weight. window: of the first layer."""

    def features(states: Tensor) -> Tensor:
        if flags.get("norm_before_fc"):
            states = _norm(states, tensors["input_norm.weight"])
        if flags.get("fc_norm"):
            chunks = enumerate(states.chunk(count, -1))
            states = torch.cat([_norm(c, tensors[f"fc_norm.{i}.weight"]) for i, c in chunks], -1)
        return states @ tensors["fc.weight"].T if "fc.weight" in tensors else states

    def run(tokens: Tensor, hidden: Tensor) -> Tensor:
        layer = _part(tensors, "layers.0")
        e = _norm(tensors["embed_tokens.weight"][tokens], layer["input_layernorm.weight"])
        n = _norm(hidden, layer["hidden_norm.weight"])
        x = n if flags.get("norm_before_residual") else hidden
        x = x + _attend(torch.cat([e, n], -1), layer, window)
        x = x + _mlp(_norm(x, layer["post_attention_layernorm.weight"]), layer)
        for index in range(1, num_layers):
            layer = _part(tensors, f"layers.{index}")
            x = x + _attend(_norm(x, layer["input_layernorm.weight"]), layer)
            x = x + _mlp(_norm(x, layer["post_attention_layernorm.weight"]), layer)
        return _norm(x, tensors["norm.weight"]) if flags.get("norm_output") else x

    def score(y: Tensor) -> Tensor:
        y = y if flags.get("norm_output") else _norm(y, tensors["norm.weight"])
        return y @ tensors["lm_head.weight"].T

    return Eagle3(features, run, score)


@torch.no_grad()
def cached_logits(head: DraftHead, texts: Sequence[Text], drafts: int) -> list[Tensor]:
    """What the head gives for all texts at once over slots: [P + K, D] each."""
    steps = HeadSteps(head, slots=[2, *range(len(texts) - 1)])
    counts = [len(text.states) for text in texts]
    tokens = torch.zeros(len(texts), max(counts), dtype=torch.int64)
    states = torch.randn(len(texts), max(counts), texts[0].states.shape[1])
    for row, text in enumerate(texts):
        tokens[row, : counts[row]] = text.tokens[: counts[row]]
        states[row, : counts[row]] = text.states
    hidden = steps.forward(tokens, steps.run.features(states), [0] * len(texts), counts)
    scores = [[steps.run.logits(hidden[row, :count])] for row, count in enumerate(counts)]
    last = torch.stack([hidden[row, count - 1] for row, count in enumerate(counts)]).unsqueeze(1)
    for step in range(drafts):
        starts = [count + step for count in counts]
        tokens = torch.stack([text.tokens[n] for text, n in zip(texts, starts, strict=True)])
        last = steps.forward(tokens.unsqueeze(1), last, starts, [1] * len(texts))
        for row, logits in enumerate(steps.run.logits(last)):
            scores[row].append(logits)
    return [torch.cat(row) for row in scores]


def _part(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    dotted = f"{prefix}."
    return {n.removeprefix(dotted): t for n, t in tensors.items() if n.startswith(dotted)}


def _linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()


def _mlp(x: Tensor, layer: Tensors) -> Tensor:
    gate = functional.silu(_linear(x, layer, "mlp.gate_proj"))
    return _linear(gate * _linear(x, layer, "mlp.up_proj"), layer, "mlp.down_proj")


def _attend(x: Tensor, layer: Tensors, window: int | None = None) -> Tensor:
    """Causal attention of [T, X]; windows hold the position itself and those before it."""
    length = len(x)
    q, k, v = (
        _linear(x, layer, f"self_attn.{name}_proj").view(length, -1, HEAD_DIM) for name in "qkv"
    )
    if "self_attn.q_norm.weight" in layer:
        q = _norm(q, layer["self_attn.q_norm.weight"])
        k = _norm(k, layer["self_attn.k_norm.weight"])
    groups = q.shape[1] // k.shape[1]
    q, k = _rotate(q), _rotate(k)
    k, v = (states.repeat_interleave(groups, 1) for states in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
    return _linear(mixed, layer, "self_attn.o_proj")


def _rotate(x: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, d], theta 10000: (a, b) to (a cos - b sin, b cos + a sin)."""
    length, _, size = x.shape
    frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(length).float(), frequencies)[:, None]
    a, b = x.chunk(2, -1)
    turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    return torch.cat(turned, -1)
