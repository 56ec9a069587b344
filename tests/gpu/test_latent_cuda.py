"""Latent attention on a CUDA device: its kernels against the definition, and packed models."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from guided_spec import LLM, SamplingParams
from guided_spec.bundled import bundled_asset
from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.models.packed_form import PackedForm
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.ops.attention.latent_attention import keep_latents, latent_attention
from guided_spec.ops.linear.experts import GroupedChoice, route_in_groups, router_logits
from tests.latent_lines import LatentData, Widths, make_latents
from tests.models.tiny import build
from tests.slot_lines import Case, Span, Unused, kept_positions

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
DEEPSEEK = Widths(512, 64)
HEADS, LENGTH, BLOCK = 128, 300, 64
LATENT = ["deepseek_v3", "deepseek_v3_yarn", "deepseek_v2", "glm4_moe_lite", "youtu"]


def case(batch: int, tokens: int, heads: int = HEADS) -> Case:
    """Rows of about ``tokens``, one of them beyond the end of its slot, one unused."""
    source = random.Random(batch)
    spans = [
        Span(slot, source.randint(0, LENGTH - tokens), max(tokens - slot % 2, 1))
        for slot in source.sample(range(batch), batch)
    ]
    spans[0] = spans[0]._replace(start=LENGTH - tokens // 2)
    return Case(1, heads, sum(DEEPSEEK), LENGTH, BLOCK, [*spans, Span(-1, 0, 2)], Unused(3, 2))


def compare(
    given: Case, dtype: torch.dtype, widths: Widths = DEEPSEEK, width: int | None = None
) -> None:
    theirs = make_latents(given, widths, dtype)
    ours = make_latents(given, widths, dtype, CUDA)
    places = [replace(one.places, width=width) for one in (ours, theirs)]
    found, expected = (
        keep_latents(one.query.rotary, one.packed, one.keys, one.rotation, one.buffers, at)
        for one, at in zip((ours, theirs), places, strict=True)
    )
    tolerance = TOLERANCE[dtype]
    used = theirs.places.tokens[0] >= 0
    torch.testing.assert_close(found.cpu()[used], expected[used], atol=tolerance, rtol=tolerance)
    kept = kept_positions(theirs.places, given.block)
    for got, wanted in zip(ours.buffers, theirs.buffers, strict=True):
        got, wanted = got.cpu().transpose(1, 2)[kept], wanted.transpose(1, 2)[kept]
        torch.testing.assert_close(got, wanted, equal_nan=True, atol=tolerance, rtol=tolerance)
    found, expected = (
        _attended(one, rotary, at)
        for one, rotary, at in zip((ours, theirs), (found, expected), places, strict=True)
    )
    torch.testing.assert_close(found.cpu()[used], expected[used], atol=tolerance, rtol=tolerance)


def _attended(data: LatentData, rotary: torch.Tensor, places: Any) -> torch.Tensor:
    query = data.query._replace(rotary=rotary)
    return latent_attention(query, data.buffers, places, scale=sum(DEEPSEEK) ** -0.5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 6, 70])
@pytest.mark.parametrize("batch", [1, 7])
def test_the_widths_of_deepseek(batch: int, tokens: int, dtype: torch.dtype) -> None:
    compare(case(batch, tokens), dtype, width=tokens)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("widths", [Widths(16, 8), Widths(256, 32), Widths(384, 64)])
@pytest.mark.parametrize("heads", [1, 5, 16, 40])
def test_other_widths(heads: int, widths: Widths, dtype: torch.dtype) -> None:
    compare(case(3, 6, heads)._replace(width=sum(widths)), dtype, widths)


def test_a_captured_graph_follows_the_places() -> None:
    """Positions and tables may change between two replays."""
    data = make_latents(case(5, 6), DEEPSEEK, torch.bfloat16, CUDA)
    places = data.places
    given = (data.query.rotary, data.packed, data.keys, data.rotation, data.buffers)

    def run() -> torch.Tensor:
        return _attended(data, keep_latents(*given, places), places)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for shift in (0, 3):
        is_used = places.tokens[0] >= 0
        places.tokens[1, is_used] += shift
        places.rows[1, places.rows[0] >= 0] += shift
        graph.replay()
        expected = run()
        torch.testing.assert_close(found[is_used], expected[is_used], atol=0, rtol=0)


@pytest.mark.parametrize("count", [1, 6, 64])
@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_experts_that_are_chosen_by_groups(count: int, *, is_sigmoid: bool) -> None:
    torch.manual_seed(count)
    logits, bias = torch.randn(count, 256), torch.randn(256) if is_sigmoid else None
    choice = GroupedChoice(
        *(8, 8, 4, 2 if is_sigmoid else 1, is_sigmoid, bias, is_sigmoid, 2.5), has_shared=True
    )
    expected = route_in_groups(logits, choice)
    on_device = choice._replace(bias=None if bias is None else bias.to(CUDA))
    found = route_in_groups(logits.to(CUDA), on_device)
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.shares.cpu(), expected.shares)
    x, weight = torch.randn(count, 7168).bfloat16(), torch.randn(256, 7168)
    scored = router_logits(x.to(CUDA), weight.to(CUDA))
    torch.testing.assert_close(scored.cpu(), router_logits(x, weight), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LATENT)
def test_prompts_again_in_an_engine_with_graphs(name: str, dtype: torch.dtype) -> None:
    """All are captured at its start; a text begins with the blocks of another one."""
    tokenizer = load_tokenizer(bundled_asset("target"))
    model = build(name, vocab_size=len(tokenizer), hidden_size=64)
    given = cast(Any, model).to(CUDA, dtype)
    form = PackedForm.of(given, "auto", 512)
    assert form is not None
    assert isinstance(form.decoder, PackedDecoder)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompts = ["a b c " * 40 + end for end in ("a b c", "1 2 3", "x")]
    with LLM(given, "ngram", tokenizer=tokenizer, max_model_len=512, max_batch_size=4) as llm:
        found = [llm.generate(prompts, params) for _ in range(2)]
    outputs = [[one.completions[0] for one in some] for some in found]
    tokens = [[one.token_ids for one in some] for some in outputs]
    if dtype == torch.float32:  # in half precision, rounding may choose another token
        assert tokens[0] == tokens[1]
    assert all(tokens[1])
    assert all(one.stats.cached_tokens > 0 for one in outputs[1])
