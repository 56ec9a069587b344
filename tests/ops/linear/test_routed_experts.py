"""The steps of chosen experts, against one expert at a time; and their kernels."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from guided_spec.errors import ConfigError
from guided_spec.ops.linear.experts import (
    Gating,
    GroupedChoice,
    Projection,
    close_experts,
    open_experts,
    route,
    route_in_groups,
)
from guided_spec.ops.linear.fp8_linear import FP8, Fp8Weight, multiply_out, scales_shape
from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from guided_spec.ops.linear import experts_triton as kernels
from tests.ops.linear.test_routed_experts import scaled
from guided_spec.ops.linear.experts import Gating, Projection
from guided_spec.ops.linear.experts import close_experts, open_experts, route, route_in_groups
from guided_spec.ops.linear.experts import router_logits
from tests.ops.linear.test_routed_experts import grouped

torch.manual_seed(0)
gatings = (Gating(), Gating(is_interleaved=True, limit=2.0, alpha=1.7))
sizes = ((1, 5, 2, 8, 8), (3, 7, 3, 70, 22), (2, 4, 4, 16, 600), (1, 33, 8, 1100, 48))
for dtype, tolerance, few in ((torch.float32, 1e-4, sizes), (torch.float16, 2e-2, sizes[1:2])):
    for count, experts, chosen, inputs, outputs in few:
        logits = torch.randn(count, experts).to(dtype)
        for is_normalized, has_shared in ((True, False), (False, False), (True, True)):
            given = torch.cat([logits, logits[:, :1]], 1) if has_shared else logits
            options = {"is_normalized": is_normalized, "has_shared": has_shared}
            expected = route(given, chosen, **options)
            routes = kernels.route(given, chosen, **options)
            assert torch.equal(routes.experts, expected.experts)
            torch.testing.assert_close(routes.shares, expected.shares)
        x, opened = torch.randn(count, inputs), torch.randn(count, chosen + 1, inputs)
        scale = inputs**-0.5
        weight = (torch.randn(experts, outputs, inputs) * scale).to(dtype)
        shared, bias = weight[0] + 1, torch.randn(experts, outputs).to(dtype)
        for given in (Projection(weight, None, shared=shared), Projection(weight, bias)):
            if given.shared is None:
                routes = type(routes)(*(one[:, :-1].contiguous() for one in routes))
                opened = opened[:, :-1]
            for gating in gatings:
                found = kernels.open_experts(x.to(dtype), routes.experts, given, gating)
                wanted = open_experts(x.to(dtype), routes.experts, given, gating)
                torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
            found = kernels.close_experts(opened.to(dtype), routes, given)
            wanted = close_experts(opened.to(dtype), routes, given)
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)

for case in range(60):
    choice, logits = grouped(case)
    x, weight = torch.randn(len(logits), 7 + 11 * case), torch.randn(len(logits[0]), 7 + 11 * case)
    x = x.to((torch.float16, torch.float32)[case % 2])
    found = kernels.router_logits(x, weight)
    torch.testing.assert_close(found, router_logits(x, weight), atol=1e-4, rtol=1e-4)
    expected, found = route_in_groups(logits, choice), kernels.route_in_groups(logits, choice)
    assert torch.equal(found.experts, expected.experts), choice
    torch.testing.assert_close(found.shares, expected.shares)

for block, serves in (((8, 16), True), ((1, 48), True), ((48, 48), True), ((4, 16), False)):
    opening = scaled(5, (96, 40), block)
    closing = scaled(5, (48, 40), block)
    assert kernels.serves(opening, 2) is kernels.serves(closing, 1) is serves
    if serves:
        x = torch.randn(3, 40)
        routes = route(torch.randn(3, 6), 2, is_normalized=True, has_shared=True)
        found = kernels.open_experts(x, routes.experts, opening, Gating())
        torch.testing.assert_close(found, open_experts(x, routes.experts, opening, Gating()))
        x = torch.randn(3, 3, 40)
        found = kernels.close_experts(x, routes, closing)
        torch.testing.assert_close(found, close_experts(x, routes, closing))
print("equal")
"""


def grouped(seed: int) -> tuple[GroupedChoice, Tensor]:
    """A choice of any kind, and logits [N, E] of few or many experts for it."""
    source = random.Random(seed)
    groups, size = source.choice([1, 2, 3, 8]), source.choice([2, 3, 16])
    chosen = source.randint(1, groups)
    torch.manual_seed(seed)
    bias = torch.randn(groups * size) if source.random() < 0.5 else None
    choice = GroupedChoice(
        *(source.randint(1, min(chosen * size, 8)), groups, chosen, source.choice([1, 2])),
        is_sigmoid=source.random() < 0.5,
        bias=bias,
        is_normalized=source.random() < 0.5,
        factor=source.choice([1.0, 2.5]),
        has_shared=source.random() < 0.5,
    )
    return choice, torch.randn(source.randint(1, 4), groups * size)


@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_experts_come_from_the_best_groups(*, is_sigmoid: bool) -> None:
    """By hand: two of three groups, those of which the two best scores are largest."""
    logits = torch.tensor([[0.0, 2.0, 1.9, 2.3, -3.0, -3.0, 2.5, 2.4, 0.1]])
    choice = GroupedChoice(3, 3, 2, 2, is_sigmoid=is_sigmoid, factor=2.0, has_shared=True)
    found = route_in_groups(logits, choice)
    assert found.experts.tolist() == [[6, 7, 1, 9]]
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    torch.testing.assert_close(found.shares[0, :3], 2 * scores[0, [6, 7, 1]])
    assert found.shares[0, 3] == 1.0
    by_best = route_in_groups(logits, choice._replace(ranked_by=1))
    assert by_best.experts.tolist() == [[6, 7, 3, 9]]
    biased = choice._replace(bias=torch.eye(9)[4] * 9, is_normalized=True, factor=1.0)
    found = route_in_groups(logits, biased)
    assert found.experts.tolist() == [[4, 6, 7, 9]]
    torch.testing.assert_close(found.shares[0, :3].sum(), torch.tensor(1.0))
    with pytest.raises(ConfigError, match="groups=2: must divide 9 experts"):
        route_in_groups(logits, choice._replace(groups=2))
    with pytest.raises(ConfigError, match="top_k=7: must be 1 to 6, of the chosen groups"):
        route_in_groups(logits, choice._replace(top_k=7))


def scaled(experts: int, shape: tuple[int, int], block: tuple[int, int]) -> Projection:
    """Matrices in fp8, and one that all tokens take."""
    weight = torch.randn(experts + 1, *shape).to(FP8)
    scales = torch.rand(experts + 1, *scales_shape(shape, block))
    *others, last = (weight[:-1], scales[:-1], scales[-1])
    return Projection(others[0], None, others[1], block, weight[-1], last)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_largest_are_chosen(*, is_normalized: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 9)
    found = route(logits.bfloat16(), 3, is_normalized=is_normalized)
    assert found.shares.dtype == torch.float32
    probs = logits.bfloat16().float().softmax(-1)
    values, experts = probs.topk(3, -1)
    assert torch.equal(found.experts, experts)
    expected = values / values.sum(-1, keepdim=True) if is_normalized else values
    torch.testing.assert_close(found.shares, expected)
    with pytest.raises(ConfigError, match="count=10: must be 1 to 9"):
        route(logits, 10, is_normalized=is_normalized)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_one_expert_at_a_time(limit: float | None, *, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(3, 6), torch.randn(3, 5)
    opening = Projection(torch.randn(5, 8, 6), torch.randn(5, 8) if has_bias else None)
    closing = Projection(torch.randn(5, 6, 4), torch.randn(5, 6) if has_bias else None)
    gating = Gating(is_interleaved=limit is not None, limit=limit, alpha=1.7)
    routes = route(logits, 2, is_normalized=True)
    found = close_experts(open_experts(x, routes.experts, opening, gating), routes, closing)
    for token in range(3):
        expected = torch.zeros(6)
        for expert, share in zip(routes.experts[token], routes.shares[token], strict=True):
            both = opening.weight[expert] @ x[token]
            both = both if opening.bias is None else both + opening.bias[expert]
            if limit is None:
                opened = silu(both[:4]) * both[4:]
            else:
                gate, up = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
                opened = gate * torch.sigmoid(1.7 * gate) * (up + 1)
            closed = closing.weight[expert] @ opened
            closed = closed if closing.bias is None else closed + closing.bias[expert]
            expected += share * closed
        torch.testing.assert_close(found[token], expected)


def test_matrices_in_fp8_are_multiplied_out() -> None:
    given = scaled(4, (7, 10), (4, 4))
    assert given.scales is not None
    assert given.shared is not None
    assert given.shared_scales is not None
    found = given.of(torch.tensor([[3, 4, 0]]))
    for at, expert in enumerate((3, None, 0)):
        numbers = (given.shared, given.shared_scales)
        if expert is not None:
            numbers = (given.weight[expert], given.scales[expert])
        one = Fp8Weight.of(*numbers, (4, 4))
        assert torch.equal(found[0, at], multiply_out(one, torch.float32))


@pytest.mark.parametrize("is_normalized", [True, False])
def test_every_token_takes_the_shared_expert(*, is_normalized: bool) -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(3, 6), torch.randn(3, 6)
    opening = Projection(torch.randn(5, 8, 6), None, shared=torch.randn(8, 6))
    closing = Projection(torch.randn(5, 6, 4), None, shared=torch.randn(6, 4))
    assert opening.shared is not None
    assert closing.shared is not None
    routes = route(logits, 2, is_normalized=is_normalized, has_shared=True)
    found = close_experts(open_experts(x, routes.experts, opening, Gating()), routes, closing)
    chosen = route(logits[:, :5], 2, is_normalized=is_normalized)
    others = close_experts(open_experts(x, chosen.experts, opening, Gating()), chosen, closing)
    gate, up = (x @ opening.shared.T).chunk(2, 1)
    shared = (silu(gate) * up) @ closing.shared.T
    torch.testing.assert_close(found, others + logits[:, 5:].sigmoid() * shared)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, experts, weight = torch.randn(2, 6), torch.tensor([[0, 1], [2, 0]]), torch.randn(4, 8, 6)
    with pytest.raises(ConfigError, match=r"x=\(2, 5\): must be \[..., 6\], as weight is"):
        open_experts(x[:, :5], experts, Projection(weight, None), Gating())
    with pytest.raises(ConfigError, match=r"experts=\(1, 2\): must be \[2, K\]"):
        open_experts(x, experts[:1], Projection(weight, None), Gating())
    with pytest.raises(ConfigError, match="must be contiguous: turn it"):
        open_experts(x, experts, Projection(torch.randn(4, 6, 8).mT, None), Gating())


def test_the_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
