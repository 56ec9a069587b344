"""The operations on a CUDA device give what they give on the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from guided_spec.models.quantized.fp8 import Fp8Experts
from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask, unpack_bitmask
from guided_spec.ops.delta_rule import DeltaShape, DeltaStates, gated_delta
from guided_spec.ops.linear.experts import Gating, Projection, close_experts, open_experts, route
from guided_spec.ops.linear.fp8_linear import Fp8Weight, fp8_linear, scales_shape
from guided_spec.ops.linear.linear import MOST_TOKENS, linear
from guided_spec.ops.pointwise import rms_norm
from guided_spec.ops.sampling.noise import Stream, exponential_noise, philox, uniform_noise
from guided_spec.ops.sampling.rejection import rejection_sample
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import Draft, Noise, SamplingParams
from tests.ops import test_delta_rule as delta
from tests.ops.linear.test_fp8_linear import every_number, weight_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BATCH, DRAFT = 7, 5


@pytest.mark.parametrize("vocab_size", [12, 4096, 151_669])
def test_bitmask_round_trip(vocab_size: int) -> None:
    legal = torch.rand(3, 2, vocab_size, device=CUDA) < 0.5
    bitmask = pack_bitmask(legal)
    assert torch.equal(unpack_bitmask(bitmask, vocab_size), legal)
    assert torch.equal(bitmask.cpu(), pack_bitmask(legal.cpu()))
    masked = apply_token_bitmask(torch.zeros(3, 2, vocab_size, device=CUDA), bitmask)
    assert torch.equal(masked == 0, legal)


def test_noise_is_the_same_stream() -> None:
    seeds = torch.tensor([0, 1, 2**62 + 5])
    positions = torch.tensor([0, 7, 2**33])
    on_cpu = philox(seeds, positions, Stream.DRAFT, 1001)
    assert torch.equal(philox(seeds.cuda(), positions.cuda(), Stream.DRAFT, 1001).cpu(), on_cpu)
    spread = positions.unsqueeze(1) + torch.arange(9)
    expected = uniform_noise(seeds, spread, Stream.ACCEPT)
    assert torch.equal(uniform_noise(seeds.cuda(), spread.cuda(), Stream.ACCEPT).cpu(), expected)
    exponential = exponential_noise(seeds.cuda(), positions.cuda(), Stream.SAMPLE, 1001)
    assert bool((exponential > 0).all())
    torch.testing.assert_close(
        exponential.cpu(), exponential_noise(seeds, positions, Stream.SAMPLE, 1001)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [33, 128_256])
def test_warp(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 3, vocab_size).to(dtype)
    logits[:, 1, ::2] = float("-inf")
    logits[:, 2] = float("-inf")
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.05, top_k=50, top_p=0.8),
    ]
    expected = warp(logits, Sampling.stack(params, [1, 2, 3, 4], torch.device("cpu")))
    found = warp(logits.cuda(), Sampling.stack(params, [1, 2, 3, 4], CUDA))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-3)
    assert bool((found[:, 2] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(128, 128), (1, 2080), (1, 32)])
@pytest.mark.parametrize("count", [1, 6, 33, 200, 300])
def test_products_with_fp8_weights(count: int, block: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    weight = weight_of((1100, 2080), block)
    x, bias = torch.randn(count, 2080).to(dtype), torch.randn(1100).to(dtype)
    expected = fp8_linear(x.float(), weight, bias.float()).cuda()
    on_device = weight._replace(
        values=weight.values.cuda(), scales=weight.scales.cuda(), arrived=weight.arrived.cuda()
    )
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    for _ in range(3):  # programs count each other, and leave no count behind
        found = fp8_linear(x.cuda(), on_device, bias.cuda())
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_number_in_fp8(dtype: torch.dtype) -> None:
    weight = every_number()
    on_device = Fp8Weight.of(weight.values.cuda(), weight.scales.cuda(), weight.block)
    one_by_one = torch.eye(254, dtype=dtype, device=CUDA)
    for count in (1, 16, 64, 127):
        found = torch.cat([fp8_linear(x, on_device) for x in one_by_one.split(count)])
        assert torch.equal(found.flatten().cpu(), weight.values.flatten().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 512), (1100, 2080), (4096, 12288), (1030, 50)])
@pytest.mark.parametrize("count", [1, 2, 6, MOST_TOKENS, MOST_TOKENS + 1])
@torch.inference_mode()
def test_products_of_few_tokens(count: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    outputs, inputs = shape
    weight, bias = (torch.randn(shape) * inputs**-0.5).to(dtype), torch.randn(outputs).to(dtype)
    x, tolerance = torch.randn(count, inputs).to(dtype), 1e-4 if dtype == torch.float32 else 2e-2
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    on_device = [one.cuda() for one in (x, weight, bias)]
    for _ in range(3):
        # What is given was written just before, by a kernel that lets its successor begin early.
        normed = rms_norm(on_device[0], torch.ones_like(on_device[0][0]), 1e-6)
        wanted = torch.nn.functional.linear(normed.cpu().float(), weight.float())
        found = linear(rms_norm(on_device[0], torch.ones_like(on_device[0][0]), 1e-6), on_device[1])
        torch.testing.assert_close(found.cpu().float(), wanted, atol=tolerance, rtol=tolerance)
        found = linear(*on_device)
        torch.testing.assert_close(found.cpu().float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("gating", [Gating(), Gating(is_interleaved=True, limit=7.0, alpha=1.7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "inner"), [(1, 768), (6, 2880), (3, 50)])
@pytest.mark.parametrize("has_shared", [False, True])
def test_steps_of_experts(
    count: int, inner: int, dtype: torch.dtype, gating: Gating, *, has_shared: bool
) -> None:
    torch.manual_seed(count)
    x, logits = torch.randn(count, 1100).to(dtype), torch.randn(count, 37 + has_shared).to(dtype)
    given = [
        Projection((torch.randn(37, *shape) / 33).to(dtype), torch.randn(37, shape[0]))
        for shape in ((2 * inner, 1100), (1100, inner))
    ]
    if has_shared:
        given = [one._replace(bias=None, shared=one.weight[0].flip(0)) for one in given]
    found = []
    for device in (torch.device("cpu"), CUDA):
        up, down = (
            Projection(
                one.weight.to(device),
                None if one.bias is None else one.bias.to(device, dtype),
                shared=None if one.shared is None else one.shared.to(device),
            )
            for one in given
        )
        routes = route(logits.to(device), 4, is_normalized=True, has_shared=has_shared)
        opened = open_experts(x.to(device), routes.experts, up, gating)
        found.append([*routes, opened, close_experts(opened, routes, down)])
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for expected, on_device in zip(*found, strict=True):
        torch.testing.assert_close(on_device.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*delta.SHAPES, DeltaShape(4, 8, 128, 128, 4)])
@pytest.mark.parametrize("is_long", [False, True])
def test_the_delta_rule(shape: DeltaShape, dtype: torch.dtype, *, is_long: bool) -> None:
    """Forwards behind one another, so that states go on from what the kernels left."""
    longest = delta.LONG_DRAFT if is_long else delta.LONGEST_DRAFT
    layer, states = delta.layer_of(shape, dtype), delta.empty_states(shape, dtype, longest)
    on_device = delta.layer_of(shape, dtype, CUDA)
    found_states = DeltaStates(*(part.cuda() for part in states))
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    for at, spans in enumerate(delta.LONG_STEPS if is_long else delta.STEPS):
        packed, places = delta.packed_of(layer, spans, at, dtype), delta.places_at(spans)
        moved = replace(
            places,
            tokens=places.tokens.cuda(),
            rows=places.rows.cuda(),
            tables=places.tables.cuda(),
        )
        expected = gated_delta(packed, layer, states, places)
        found = gated_delta(packed.cuda(), on_device, found_states, moved)
        torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            found_states.state.cpu(), states.state, atol=tolerance, rtol=tolerance
        )
        assert torch.equal(found_states.extent.cpu(), states.extent)
        assert torch.equal(found_states.recent.cpu(), states.recent)


@pytest.mark.parametrize("block", [(128, 128), (1, 2048)])
def test_experts_in_fp8(block: tuple[int, int]) -> None:
    """A way of its own for few pairs and for many; the definition is that on the CPU."""
    torch.manual_seed(0)
    with torch.device("meta"):
        config = Qwen3MoeConfig(
            hidden_size=512, moe_intermediate_size=256, num_experts=16, hidden_act="silu"
        )
        experts = Fp8Experts(Qwen3MoeExperts(config)).to_empty(device="cpu")
    for name, parts in (("gate_up_proj", 2), ("down_proj", 1)):
        values = getattr(experts, name)
        shape = (values.shape[1] // parts, values.shape[2])
        given = (block[0], min(block[1], shape[1]))
        values.data.copy_((torch.randn(values.shape) * 8).to(torch.float8_e4m3fn))
        scales = [[torch.rand(scales_shape(shape, given)) * 0.01] * parts for _ in range(16)]
        experts.scale(name, scales, None if block[0] == 1 else block)
    on_device = copy.deepcopy(experts).to(CUDA)
    for count in (1, 9, 100):
        states, routes = (
            torch.randn(count, 512),
            route(torch.randn(count, 16), 4, is_normalized=True),
        )
        expected = experts(states, *routes)
        found = on_device(states.to(CUDA).bfloat16(), *(one.to(CUDA) for one in routes))
        difference = (found.cpu().float() - expected).norm() / expected.norm()
        assert difference < 0.02


@pytest.mark.parametrize("with_probs", [False, True])
def test_rejection_decides_alike(*, with_probs: bool) -> None:
    torch.manual_seed(1)
    vocab_size = 257
    target = torch.rand(BATCH, DRAFT + 1, vocab_size)
    target[:, :, 100:] = 0
    target /= target.sum(-1, keepdim=True)
    draft_probs = torch.softmax(torch.randn(BATCH, DRAFT, vocab_size), -1)
    ids = torch.multinomial(draft_probs.flatten(0, 1), 1).view(BATCH, DRAFT)
    num_tokens = torch.tensor([5, 4, 0, 5, 1, 2, 5])
    draft = Draft(ids, num_tokens, draft_probs if with_probs else None)
    noise = Noise(
        torch.rand(BATCH, DRAFT), torch.empty(BATCH, vocab_size).exponential_().clamp_min(1e-9)
    )
    expected = rejection_sample(target, draft, noise)
    on_device = Draft(
        ids.cuda(), num_tokens.cuda(), None if draft.probs is None else draft.probs.cuda()
    )
    found = rejection_sample(
        target.cuda(), on_device, Noise(noise.accept.cuda(), noise.sample.cuda())
    )
    assert torch.equal(found.token_ids.cpu(), expected.token_ids)
    assert torch.equal(found.num_accepted.cpu(), expected.num_accepted)
