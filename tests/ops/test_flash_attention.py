"""What FlashAttention is asked about a line of tokens, held against the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from guided_spec.ops.attention import flash_attention as module
from guided_spec.ops.attention.flash_attention import flash_attention
from guided_spec.ops.attention.slot_attention import slot_attention, store_keys_values
from tests.slot_lines import Case, cases, make


def attend(  # noqa: PLR0913 - FlashAttention's
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """As its documentation says: rows of q over pages, the last query sees the last key."""
    assert causal
    out = torch.full_like(q, torch.nan)
    for row, length in enumerate(cache_seqlens.tolist()):
        first, end = cu_seqlens_q[row : row + 2].tolist()
        assert end - first <= max_seqlen_q
        if end == first or length == 0:
            continue
        pages = page_table[row, : -(-length // k_cache.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache)
        )
        mask = torch.arange(length) <= torch.arange(length - (end - first), length)[:, None]
        found = scaled_dot_product_attention(
            q[first:end].transpose(0, 1)[None], keys[None], values[None], mask,
            scale=softmax_scale, enable_gqa=True,
        )  # fmt: skip
        out[first:end] = found[0].transpose(0, 1)
    return out


@pytest.fixture(scope="module", autouse=True)
def installed() -> Any:
    """The package, in the test's own words."""
    with pytest.MonkeyPatch.context() as patch:
        own: Any = ModuleType(module.MODULE)
        own.flash_attn_with_kvcache = attend
        patch.setitem(sys.modules, module.MODULE, own)
        yield


@given(cases(70, [8, 16]))
def test_it_gives_what_the_reference_gives(case: Case) -> None:
    spans = [one for one in case.spans if one.start + one.length <= case.max_length]
    plain = case._replace(spans=spans, window=None, has_sinks=False, alike=())
    data = make(plain)
    used = data.places.tokens[0] >= 0
    store_keys_values(data.new, data.buffers, data.places)
    expected = slot_attention(data.query, None, data.buffers, data.places, scale=0.3)
    found = flash_attention(data.query, data.buffers, data.places, scale=0.3)
    torch.testing.assert_close(found[used], expected[used], atol=1e-5, rtol=1e-5)


def test_what_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only long lines on a device of its own, whatever is installed."""
    case = Case(2, 2, 16, 4000, 64, [])
    data = make(case)
    places = replace(data.places, fits=True)
    query = torch.empty(module.LEAST_WIDTH, 4, 16, dtype=torch.bfloat16)
    buffers = type(data.buffers)(*(one.bfloat16() for one in data.buffers))
    monkeypatch.setattr(module, "is_installed", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert module.serves(query, buffers, places)
    assert module.serves(query, buffers, replace(places, width=len(query)))
    assert not module.serves(query[1:], buffers, places)
    assert not module.serves(query, buffers, replace(places, width=len(query) - 1))
    assert not module.serves(query, buffers, data.places)
    assert not module.serves(query.float(), buffers, places)
