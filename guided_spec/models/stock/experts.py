"""The experts of a stock model where few tokens choose among many.

transformers asks a table for the function that a configuration names. The one that is registered
here multiplies each token with the matrices of its own experts, as long as there are fewer pairs of
a token and an expert than experts, and leaves the others to torch's grouped product. Nothing waits
for the device, so that a CUDA graph can hold it. Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _default_apply_gate,
    grouped_mm_experts_forward,
)

from guided_spec.models.target import implementing
from guided_spec.ops.linear.experts import (
    Gating,
    Projection,
    Routes,
    close_experts,
    expert_linear,
    open_experts,
)

EXPERTS = "guided_spec_experts"
DEFAULT_GATE = _default_apply_gate  # which modules have that do not bring their own
REPLACED = ("grouped_mm", "batched_mm")  # others were chosen on purpose


@contextmanager
def using_few_experts(config: Any) -> Iterator[None]:
    """Let the experts of the decoder of ``config`` run so while it is open; then as before.

    config: a model's own configuration object, which its layers share. Not to be entered for one
    configuration by two threads at a time.
    """
    is_replaced = config.get_text_config(decoder=True)._experts_implementation in REPLACED
    with implementing(config, "experts", EXPERTS) if is_replaced else nullcontext():
        yield


def few_experts(experts: Any, states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """[N, H]: the sum of what its experts make of each row.

    experts: a stock module of them. states: [N, H]. expert_ids: int64 [N, K]; expert_weights of
    them: [N, K].
    """
    if has_silu_gate(experts):
        routes = Routes(expert_ids, expert_weights.float())
        given = Projection(*_projection(experts, "gate_up_proj"))
        opened = open_experts(states, expert_ids, given, Gating())
        return close_experts(opened, routes, Projection(*_projection(experts, "down_proj")))
    chosen = expert_ids.flatten()
    opening = "gate_up_proj" if experts.has_gate else "up_proj"
    opened = expert_linear(states, chosen, *_projection(experts, opening))
    opened = experts._apply_gate(opened) if experts.has_gate else experts.act_fn(opened)
    found = expert_linear(opened, chosen, *_projection(experts, "down_proj"))
    shares = expert_weights.to(found.dtype).unsqueeze(1)
    summed = torch.bmm(shares, found.unflatten(0, expert_ids.shape)).squeeze(1)
    return summed.to(states.dtype)


def has_silu_gate(experts: Any) -> bool:
    """Whether a stock module of experts has silu(gate) * up, of matrices with outputs first."""
    names = ("has_gate", "is_transposed", "is_concatenated")
    form = [getattr(experts, name, False) for name in names]
    is_silu = type(getattr(experts, "act_fn", None)) is type(ACT2FN["silu"])
    return form == [True, False, True] and is_silu and type(experts)._apply_gate is DEFAULT_GATE


def _projection(experts: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight [E, O, I] and bias [E, O] of a projection."""
    weight: Tensor = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return weight.transpose(1, 2) if experts.is_transposed else weight, bias


def _experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function in the table."""
    has_norm = getattr(experts, "has_post_expert_norm", False)  # new in transformers 5.20
    is_plain = experts.down_proj.dtype == hidden_states.dtype and not has_norm
    # Of other dtypes the grouped product is a loop on the host, which waits for the device.
    is_few = top_k_index.numel() <= experts.num_experts or hidden_states.dtype != torch.bfloat16
    if hidden_states.is_cuda and is_plain and is_few:
        return few_experts(experts, hidden_states, top_k_index, top_k_weights)
    grouped: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return grouped


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
