"""What a stock layer computes after its attention, in few kernels: an MLP, or chosen experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from guided_spec.models.linear_layer import product
from guided_spec.models.packed.weights import can_be_joined, is_plain, join, pack
from guided_spec.models.quantized.fp8 import Fp8Experts
from guided_spec.models.stock.experts import REPLACED
from guided_spec.models.stock.routed import ExpertRecorder
from guided_spec.models.target import kind_of
from guided_spec.ops.linear.experts import (
    Gating,
    GroupedChoice,
    Projection,
    Routes,
    are_served,
    close_experts,
    open_experts,
    route,
    route_in_groups,
    router_logits,
)
from guided_spec.ops.linear.fp8_linear import Fp8Weight
from guided_spec.ops.linear.linear import linear
from guided_spec.ops.pointwise import silu_mul_packed

OPENING = ("gate_proj", "up_proj")
FUSED = "gate_up_proj"  # both in one
ACTIVATIONS = ("act_fn", "activation_fn")


class Feed(Protocol):
    """Normed states [N, H] to what an MLP or experts make of them, [N, H].

    recorder: attached to the model, of which a router that does not run as a stock module tells it.
    """

    def __call__(self, states: Tensor, recorder: ExpertRecorder | None = None, /) -> Tensor: ...


def feed_of(mlp: Any) -> Feed:
    """What computes a stock MLP, or experts: normed states [N, H] to their output [N, H]."""
    if _has_plain_projections(mlp):
        return _packed_mlp(mlp, _activation(mlp))
    return PackedExperts(mlp).feed if PackedExperts.fits(mlp) else _stock_mlp(mlp)


def _packed_mlp(mlp: Any, activation: Any) -> Feed:
    gate_up, down = pack(_opening(mlp)), mlp.down_proj
    is_silu = isinstance(activation, type(ACT2FN["silu"]))

    def feed(states: Tensor, recorder: ExpertRecorder | None = None) -> Tensor:
        """Normed states [N, H] to the MLP's output [N, H]."""
        del recorder  # it has no experts
        both = gate_up.product(states)
        if is_silu:
            opened = silu_mul_packed(both)
        else:
            gate, up = both.chunk(2, -1)
            opened = activation(gate) * up
        return product(down, opened)

    return feed


def _stock_mlp(mlp: Any) -> Feed:
    def feed(states: Tensor, recorder: ExpertRecorder | None = None) -> Tensor:
        """States [N, H] to the MLP's output [N, H]; some MLPs return expert weights too."""
        del recorder  # it sees the experts' own call
        found = mlp(states.unsqueeze(0))
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output.view(states.shape)

    return feed


def _has_plain_projections(mlp: Any) -> bool:
    opening = _opening(mlp)
    are_plain = all(map(is_plain, [*opening, getattr(mlp, "down_proj", None)]))
    return are_plain and _activation(mlp) is not None and can_be_joined(opening)


def _opening(mlp: Any) -> list[Any]:
    """What makes gate and up, in this order; None of what is missing."""
    names = [FUSED] if hasattr(mlp, FUSED) else OPENING
    return [getattr(mlp, name, None) for name in names]


def _activation(mlp: Any) -> Any:
    return next((getattr(mlp, name) for name in ACTIVATIONS if hasattr(mlp, name)), None)


GPT_OSS = "GptOssMLP"
SHARING = {  # with an expert that all tokens take, behind a gate
    *("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3_5MoeSparseMoeBlock"),
}
MAY_NORMALIZE = {  # the others do
    *("Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock"),
    *("OlmoeSparseMoeBlock", "FlexOlmoSparseMoeBlock", "MellumSparseMoeBlock"),
}
DEEPSEEK_V2 = "DeepseekV2Moe"
GROUPED = {  # choose among groups of experts first
    *(DEEPSEEK_V2, "DeepseekV3MoE", "Glm4MoeMoE", "Glm4MoeLiteMoE", "Dots1MoE", "SolarOpenMoE"),
    "ExaoneMoeSparseMoEBlock",
}
KNOWN = {GPT_OSS, "MixtralSparseMoeBlock", "Qwen3VLMoeTextSparseMoeBlock"}
KNOWN |= SHARING | MAY_NORMALIZE | GROUPED
"""Classes of transformers."""


def _class_of(block: Any) -> str:
    return type(block).__name__ if kind_of(block) else ""


class PackedExperts:
    """The router and the experts of a stock layer; block: for which ``fits``.

    Where there are fewer pairs of a token and an expert than experts, or in fp8 than four times as
    many, each pair is a product of its own; above that the stock module takes torch's grouped
    product.

    An expert that all tokens take is one more of theirs, which lies elsewhere; its gate joins the
    router. Matrices that are stored inputs first are turned: what an output takes is then in one
    piece, as the kernels read it. The stock parameters become views of the turned ones.
    """

    def __init__(self, block: Any) -> None:
        is_gpt_oss, self._experts = _class_of(block) == GPT_OSS, block.experts
        self._feed_many = _stock_mlp(block)
        found = _projections(block)
        assert found is not None, "fits() comes before"
        self._opening, self._closing = found
        self._shared: Feed | None = None
        if _class_of(block) in GROUPED:
            has_shared = self._opening.shared is not None
            self._route, self._count = _grouped_router(block, has_shared=has_shared)
            self._shared = None if has_shared else feed_of(block.shared_experts)
        else:
            self._route, self._count = _softmax_router(block)
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
        if _class_of(block) not in KNOWN:
            return False
        experts: Any = block.experts
        is_known = _class_of(block) == GPT_OSS or type(experts.act_fn) is type(ACT2FN["silu"])
        is_plain = all(type(weight.data) is Tensor for weight in block.parameters())
        is_one_kind = len({weight.dtype for weight in experts.parameters()}) == 1
        fits = is_known and is_plain and is_one_kind and _is_replaced(experts)
        return fits and _projections(block) is not None

    def feed(self, states: Tensor, recorder: ExpertRecorder | None = None) -> Tensor:
        """Normed states [N, H] to the experts' output [N, H]; see ``Feed``."""
        if not self._are_few(states):
            # It must choose by itself: nothing but kernels may go by what a kernel chose, because
            # kernels that are compiled ahead choose anything.
            return self._feed_many(states)
        routes = self._route(states)
        if recorder is not None:  # without the expert that all tokens take
            recorder.put(self._experts, routes.experts[:, : self._count])
        opened = open_experts(states, routes.experts, self._opening, self._gating)
        found = close_experts(opened, routes, self._closing)
        return found if self._shared is None else found + self._shared(states)

    def _are_few(self, states: Tensor) -> bool:
        # Of other dtypes the grouped product is a loop on the host, which waits for the device.
        is_few = len(states) * self._count <= self._most_pairs
        return self._is_served and (is_few or states.dtype != torch.bfloat16)


Router = Callable[[Tensor], Routes]  # of normed states [N, H]


def _softmax_router(block: Any) -> tuple[Router, int]:
    """What chooses experts for states, and how many for each token."""
    is_gpt_oss = _class_of(block) == GPT_OSS
    router: Any = block.router if is_gpt_oss else block.gate
    has_shared = _class_of(block) in SHARING
    weight = join([router, block.shared_expert_gate] if has_shared else [router])
    bias: Tensor | None = router.bias if is_gpt_oss else None
    # gpt-oss takes the softmax of what it chose, which is the same.
    is_normalized = router.norm_topk_prob if _class_of(block) in MAY_NORMALIZE else True
    count = int(router.top_k)
    choose = partial(route, count=count, is_normalized=is_normalized, has_shared=has_shared)
    return lambda states: choose(linear(states, weight, bias)), count


def _grouped_router(block: Any, *, has_shared: bool) -> tuple[Router, int]:
    """Likewise, by logits in float32, as the stock modules compute them."""
    gate: Any = block.gate
    weight, count = gate.weight.data, int(gate.top_k)
    choice = GroupedChoice(count, factor=float(gate.routed_scaling_factor), has_shared=has_shared)
    if _class_of(block) != DEEPSEEK_V2:
        choice = choice._replace(
            is_sigmoid=True,
            bias=gate.e_score_correction_bias.float(),
            is_normalized=bool(gate.norm_topk_prob),
            ranked_by=2,
        )
    if _class_of(block) != DEEPSEEK_V2 or gate.topk_method == "group_limited_greedy":
        choice = choice._replace(groups=int(gate.num_group), chosen=int(gate.topk_group))
    return lambda states: route_in_groups(router_logits(states, weight), choice), count


def _projections(block: Any) -> tuple[Projection, Projection] | None:
    """Opening and closing; None where an expert that all tokens take is unlike the others."""
    opening, closing = (_projection(block.experts, name) for name in ("gate_up_proj", "down_proj"))
    if _class_of(block) in GROUPED:
        return _with_all(opening, closing, block.shared_experts) or (opening, closing)
    if _class_of(block) not in SHARING:
        return opening, closing
    shared, gate = block.shared_expert, block.shared_expert_gate
    is_one_router = type(gate) is nn.Linear and gate.weight.dtype == block.gate.weight.dtype
    return _with_all(opening, closing, shared) if is_one_router else None


def _with_all(
    opening: Projection, closing: Projection, shared: Any
) -> tuple[Projection, Projection] | None:
    """Both with those of the MLP ``shared`` that all tokens take; None if it is another kind."""
    if type(shared.act_fn) is not type(ACT2FN["silu"]):
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

    linears: whose concatenation is the matrix.
    """
    if not (all(map(is_plain, linears)) and can_be_joined(linears)):
        return None
    found = pack(linears)
    values, scales, block = found.weight, None, (1, 1)
    if isinstance(values, Fp8Weight):
        values, scales, block, _ = values
    elif not isinstance(values, Tensor):
        return None
    is_alike = (
        values.shape == projection.weight.shape[1:] and values.dtype == projection.weight.dtype
    )
    is_bare = found.bias is None and found.low_rank is None
    if not (is_bare and is_alike) or block != projection.block:
        return None
    return projection._replace(shared=values, shared_scales=scales)


def _is_replaced(experts: Any) -> bool:
    """Whether the configured implementation of the experts is one that may be replaced."""
    return experts.config.get_text_config(decoder=True)._experts_implementation in REPLACED


def _outputs_first(weight: nn.Parameter) -> Tensor:
    """[E, O, I], contiguous; the parameter [E, I, O] is a view of it afterwards."""
    turned = weight.data.transpose(1, 2)
    if not turned.is_contiguous():
        turned = turned.contiguous()
        weight.data = turned.transpose(1, 2)
    return turned
