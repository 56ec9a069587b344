"""Attention over latents is that over the keys and values that they stand for; and its kernels."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from guided_spec.errors import ConfigError
from guided_spec.ops.attention.latent_attention import (
    LatentQueries,
    keep_latents,
    latent_attention,
)
from guided_spec.ops.attention.slot_attention import KeyValues, slot_attention
from tests.latent_lines import LatentData, Widths, latent_cases, make_latents
from tests.ops.interpreted import run_interpreted
from tests.slot_lines import Case, Span, Unused, kept_positions

WIDTHS = [Widths(8, 2), Widths(12, 4), Widths(16, 8)]
CASE = Case(
    1, 4, 20, 9, 4, [Span(2, 7, 4), Span(0, 1, 3), Span(-1, 3, 1), Span(0, 4, 2)], Unused(2)
)
PAIRS = [(True, False), (True, True), (False, False)]

COMPARE = """
from dataclasses import replace

import torch
from hypothesis import given, settings, strategies as st
from guided_spec.ops.attention import latent_attention as reference
from guided_spec.ops.attention import latent_attention_triton as kernels
from guided_spec.ops.attention.slot_attention import FP8
from guided_spec.ops.attention.slot_attention_triton import Tiling
from tests.latent_lines import Widths, latent_cases, make_latents
from tests.ops.interpreted import round_to_fp8_as_devices_do
from tests.ops.test_latent_attention import PAIRS
from tests.slot_lines import kept_positions

TILINGS = [None, Tiling(16, 16, 1, 4, 1), Tiling(16, 16, 4, 4, 1), Tiling(64, 32, 2, 4, 1)]
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (4e-3, 4e-3)}
empty = torch.Tensor.new_empty


def poisoned(*args, **kwargs):
    memory = empty(*args, **kwargs)
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory


torch.Tensor.new_empty = poisoned
round_to_fp8_as_devices_do()


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    latent_cases([Widths(16, 8), Widths(24, 6), Widths(40, 16)], 70),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(PAIRS),
    st.lists(st.sampled_from(TILINGS), min_size=2, max_size=2),
    st.booleans(),
)
def compare(drawn, dtype, pairs, tilings, in_fp8):
    case, widths = drawn
    theirs = make_latents(case, widths, dtype, pairs=pairs)
    theirs = theirs.kept_in(FP8) if in_fp8 else theirs
    ours = theirs.clone()
    places, (atol, rtol) = replace(theirs.places, width=3), TOLERANCE[dtype]
    given_ = theirs.query.rotary, theirs.packed, theirs.keys, theirs.rotation
    expected = reference.keep_latents(*given_, theirs.buffers, places)
    found = kernels.keep_latents(*given_, ours.buffers, places)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    kept, used = kept_positions(places, case.block), places.tokens[0] >= 0
    for got, wanted in zip(ours.buffers, theirs.buffers):
        got, wanted = (one.float().transpose(1, 2)[kept] for one in (got, wanted))
        # A number half way between two of fp8 may go to either.
        near = (2**-9, 2**-3) if in_fp8 else (atol, rtol)
        torch.testing.assert_close(got, wanted, equal_nan=True, atol=near[0], rtol=near[1])
    query = theirs.query._replace(rotary=expected)
    wanted = reference.latent_attention(query, theirs.buffers, places, scale=0.3)
    for tiling in tilings:
        found = kernels.latent_attention(query, theirs.buffers, places, scale=0.3, tiling=tiling)
        torch.testing.assert_close(found[used], wanted[used], atol=atol, rtol=rtol)


compare()
query = torch.zeros(6, 128, 512, dtype=torch.bfloat16)
memory = 227 * 1024
assert kernels.choose_tiling(query, 6, 1152, memory) == Tiling(64, 32, 8, 8, 2)
assert kernels.choose_tiling(query[:1], 6, 1152, memory).splits == 32
assert kernels.choose_tiling(query[:1], 6, 100, memory).splits == 4
assert kernels.choose_tiling(query.repeat(64, 1, 1), 6, 1152, memory).splits == 1
assert kernels.choose_tiling(query, 6, 1152, 99 * 1024).rows == 16
print("equal")
"""


class Expanded(NamedTuple):
    """Of a layer: what latents stand for. U, W: [Hq, D, C]."""

    keys: Tensor
    values: Tensor


@given(latent_cases(WIDTHS), st.integers(0, 99))
def test_latents_give_what_the_keys_and_values_they_stand_for_give(
    drawn: tuple[Case, Widths], seed: int
) -> None:
    case, widths = drawn
    data = make_latents(case, widths)
    torch.manual_seed(seed)
    size = 6
    matrices = Expanded(*(torch.randn(case.group, size, widths.latent) for _ in range(2)))
    rotary = keep_latents(
        data.query.rotary, data.packed, data.keys, data.rotation, data.buffers, data.places
    )
    asked = torch.randn(len(data.packed), case.group, size)
    latent = torch.einsum("nhd,hdc->nhc", asked, matrices.keys)
    query = LatentQueries(latent, rotary)
    found = latent_attention(query, data.buffers, data.places, scale=0.3)
    found = torch.einsum("nhc,hdc->nhd", found, matrices.values)
    expanded = _expanded(data, matrices)
    whole = torch.cat([asked, rotary], 2)
    expected = slot_attention(whole, None, expanded, data.places, scale=0.3)[..., :size]
    used = data.places.tokens[0] >= 0
    torch.testing.assert_close(found[used], expected[used], atol=1e-4, rtol=1e-4)


def _expanded(data: LatentData, matrices: Expanded) -> KeyValues:
    """The blocks of all heads: keys (U c, k), and values W c, as wide as the keys by zeros."""
    latents, rotary = data.buffers
    keys, values = (torch.einsum("bopc,hdc->bhpd", latents, one) for one in matrices)
    spread = rotary.expand(-1, keys.shape[1], -1, -1)
    return KeyValues(torch.cat([keys, spread], 3), torch.cat([values, torch.zeros_like(spread)], 3))


@pytest.mark.parametrize("pairs", PAIRS)
def test_what_is_kept_is_what_transformers_caches(pairs: tuple[bool, bool]) -> None:
    widths = Widths(16, 4)
    data = make_latents(CASE, widths, pairs=pairs)
    places = data.places
    latent, key = data.packed.split([*widths], 1)
    norm = DeepseekV3RMSNorm(widths.latent)
    norm.weight.data = data.keys.norm
    at = places.positions.clamp_max(CASE.max_length - 1)
    cos, sin = (part[at].unsqueeze(0) for part in data.rotation[:2])
    query, key = data.query.rotary.transpose(0, 1).unsqueeze(0), key[None, None]
    if pairs == (True, True):
        half = widths.rotary // 2
        angles = torch.complex(cos[..., :half], sin[..., :half])
        turned, kept = apply_rotary_emb(query, key, angles)
    else:
        rotate = apply_rotary_pos_emb_interleave if pairs[0] else apply_rotary_pos_emb
        turned, kept = rotate(query, key, cos, sin)
    found = keep_latents(
        data.query.rotary, data.packed, data.keys, data.rotation, data.buffers, places
    )
    torch.testing.assert_close(found, turned[0].transpose(0, 1))
    blocks, within = places.stored(CASE.block)
    is_kept = (places.tokens[0] >= 0) & (places.positions < CASE.max_length)
    for states, buffer in ((norm(latent).detach(), data.buffers[0]), (kept[0, 0], data.buffers[1])):
        stored = buffer[blocks, 0, within]
        torch.testing.assert_close(stored[is_kept], states[is_kept])
    assert is_kept.sum() == 2 + 3 + 2


def test_unused_tokens_keep_nothing() -> None:
    data = make_latents(CASE._replace(spans=[Span(-1, 3, 2)]), Widths(16, 4))
    keep_latents(
        data.query.rotary, data.packed, data.keys, data.rotation, data.buffers, data.places
    )
    kept = kept_positions(data.places, CASE.block)
    assert all(buffer.transpose(1, 2)[kept].isnan().all() for buffer in data.buffers)


def test_shapes_that_do_not_fit_are_named() -> None:
    query, buffers, places = (lambda data: (data.query, data.buffers, data.places))(
        make_latents(CASE, Widths(16, 4))
    )
    wrong = query._replace(rotary=query.rotary[..., :2])
    with pytest.raises(ConfigError, match=r"query.rotary=\(12, 4, 2\): must be \[N, Hq, 4\]"):
        latent_attention(wrong, buffers, places, scale=1.0)
    pair = KeyValues(*(buffer.repeat(1, 2, 1, 1) for buffer in buffers))
    with pytest.raises(ConfigError, match=r"must be \[num_blocks, 1, block, D\]"):
        latent_attention(query, pair, places, scale=1.0)
    turned = KeyValues(buffers.keys.mT.contiguous().mT, buffers.values)
    with pytest.raises(ConfigError, match="must be contiguous"):
        latent_attention(query, turned, places, scale=1.0)


@pytest.mark.slow
def test_the_kernels_agree_with_the_definition() -> None:
    pytest.importorskip("triton", minversion="3.9")
    assert run_interpreted("-c", COMPARE) == "equal"
