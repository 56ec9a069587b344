"""The experts of a stock layer: routed and multiplied in few kernels over the same weights.

Where there are fewer pairs of a token and an expert than experts, or in fp8 than four times as
many, each pair is a product of its own; behind that the stock module takes torch's grouped product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from guided_spec.models.fp8 import Fp8Experts
from guided_spec.models.packed.weights import can_be_joined, is_plain, join, pack
from guided_spec.models.stock.experts import REPLACED
from guided_spec.ops.linear.experts import (
    Gating,
    Projection,
    are_served,
    close_experts,
    open_experts,
    route,
)
from guided_spec.ops.linear.fp8_linear import Fp8Weight

__all__ = ["PackedExperts"]

MAY_NORMALIZE = (Qwen3MoeSparseMoeBlock, Qwen3NextSparseMoeBlock)  # the others do
SHARING = (Qwen3NextSparseMoeBlock, Qwen3_5MoeSparseMoeBlock)  # with an expert that all tokens take
KNOWN = (GptOssMLP, MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock, *SHARING)


class PackedExperts:
    """See the module's docstring; block: for which ``fits``.

    An expert that all tokens take is one more of theirs, which lies elsewhere; its gate joins the
    router. Matrices that are stored inputs first are turned: what an output takes is then in one
    piece, as the kernels read it. The stock parameters become views of the turned ones.
    """

    def __init__(self, block: Any) -> None:
        is_gpt_oss = type(block) is GptOssMLP
        self._block, self._experts = block, block.experts
        router: Any = block.router if is_gpt_oss else block.gate
        self._count, self._has_shared = int(router.top_k), type(block) in SHARING
        gates = [router, block.shared_expert_gate] if self._has_shared else [router]
        self._router_weight = join(gates)
        self._router_bias: Tensor | None = router.bias if is_gpt_oss else None
        # gpt-oss takes the softmax of what it chose, which is the same.
        may_normalize = type(block) in MAY_NORMALIZE
        self._is_normalized: bool = router.norm_topk_prob if may_normalize else True
        found = _projections(block)
        assert found is not None, "fits() comes before"
        self._opening, self._closing = found
        self._is_served = are_served(self._opening, self._closing)
        is_fp8 = isinstance(self._experts, Fp8Experts)
        self._most_pairs: int = self._experts.most_pairs if is_fp8 else len(self._opening.weight)
        self._gating = Gating()
        if is_gpt_oss:
            limit, alpha = float(self._experts.limit), float(self._experts.alpha)
            self._gating = Gating(is_interleaved=True, limit=limit, alpha=alpha)

    @staticmethod
    def fits(block: Any) -> bool:
        """Whether it is a router and experts of a known kind, with plain weights."""
        if type(block) not in KNOWN:
            return False
        experts: Any = block.experts
        is_known = type(block) is GptOssMLP or type(experts.act_fn) is type(ACT2FN["silu"])
        is_plain = all(type(weight.data) is Tensor for weight in block.parameters())
        is_one_kind = len({weight.dtype for weight in experts.parameters()}) == 1
        fits = is_known and is_plain and is_one_kind and _is_replaced(experts)
        return fits and _projections(block) is not None

    def feed(self, states: Tensor) -> Tensor:
        """Normed states [N, H] to the experts' output [N, H]."""
        if not self._are_few(states):
            # It must choose by itself: nothing but kernels may go by what a kernel chose, because
            # kernels that are compiled ahead choose anything.
            found = self._block(states.unsqueeze(0))
            output: Tensor = found[0] if isinstance(found, tuple) else found
            return output.view(states.shape)
        logits = functional.linear(states, self._router_weight, self._router_bias)
        routes = route(
            logits,
            self._count,
            is_normalized=self._is_normalized,
            has_shared=self._has_shared,
        )
        opened = open_experts(states, routes.experts, self._opening, self._gating)
        return close_experts(opened, routes, self._closing)

    def _are_few(self, states: Tensor) -> bool:
        # Of other dtypes the grouped product is a loop on the host, which waits for the device.
        is_few = len(states) * self._count <= self._most_pairs
        return self._is_served and (is_few or states.dtype != torch.bfloat16)


def _projections(block: Any) -> tuple[Projection, Projection] | None:
    """Opening and closing; None where an expert that all tokens take is unlike the others."""
    opening, closing = (_projection(block.experts, name) for name in ("gate_up_proj", "down_proj"))
    if type(block) not in SHARING:
        return opening, closing
    shared, gate = block.shared_expert, block.shared_expert_gate
    is_one_router = type(gate) is nn.Linear and gate.weight.dtype == block.gate.weight.dtype
    if not is_one_router or type(shared.act_fn) is not type(ACT2FN["silu"]):
        return None
    opened = _with_shared(opening, [shared.gate_proj, shared.up_proj])
    closed = _with_shared(closing, [shared.down_proj])
    return None if opened is None or closed is None else (opened, closed)


def _projection(experts: Any, name: str) -> Projection:
    if isinstance(experts, Fp8Experts):
        return experts.projection(name)
    weight: nn.Parameter = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return Projection(_outputs_first(weight) if experts.is_transposed else weight.data, bias)


def _with_shared(projection: Projection, linears: Sequence[Any]) -> Projection | None:
    """The projection and the matrix of the expert that all tokens take; None if it is another kind.

    linears: which give the matrix, one behind the other.
    """
    if not (all(map(is_plain, linears)) and can_be_joined(linears)):
        return None
    found = pack(linears)
    values, scales, block = found.weight, None, (1, 1)
    if isinstance(values, Fp8Weight):
        values, scales, block, _ = values
    is_alike = (
        values.shape == projection.weight.shape[1:] and values.dtype == projection.weight.dtype
    )
    if found.bias is not None or not is_alike or block != projection.block:
        return None
    return projection._replace(shared=values, shared_scales=scales)


def _is_replaced(experts: Any) -> bool:
    """Who asked for another way to run them has a reason."""
    return experts.config.get_text_config(decoder=True)._experts_implementation in REPLACED


def _outputs_first(weight: nn.Parameter) -> Tensor:
    """[E, O, I], contiguous; the parameter [E, I, O] is a view of it afterwards."""
    turned = weight.data.transpose(1, 2)
    if not turned.is_contiguous():
        turned = turned.contiguous()
        weight.data = turned.transpose(1, 2)
    return turned
