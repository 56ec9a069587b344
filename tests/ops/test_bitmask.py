"""Bitmasks against sets of tokens and against xgrammar's own kernel."""

from __future__ import annotations

import pytest
import torch
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask, unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words

SIZES = st.sampled_from([1, 5, 31, 32, 33, 63, 64, 65, 100, 257])
NO = float("-inf")


@st.composite
def token_sets(draw: st.DrawFn) -> tuple[int, frozenset[int]]:
    size = draw(SIZES)
    return size, frozenset(draw(st.sets(st.integers(0, size - 1))))


def bools(size: int, legal: frozenset[int]) -> torch.Tensor:
    return torch.tensor([token in legal for token in range(size)])


@pytest.mark.parametrize(("size", "words"), [(1, 1), (32, 1), (33, 2), (64, 2), (151_669, 4740)])
def test_num_mask_words(size: int, words: int) -> None:
    assert num_mask_words(size) == words


@given(token_sets())
def test_packed_bits_are_where_the_layout_says(drawn: tuple[int, frozenset[int]]) -> None:
    size, legal = drawn
    words = pack_bitmask(bools(size, legal))
    assert words.dtype == torch.int32
    assert len(words) == num_mask_words(size)
    unsigned = [word % 2**32 for word in words.tolist()]
    found = {t for t in range(32 * len(unsigned)) if unsigned[t // 32] >> (t % 32) & 1}
    assert found == legal  # padding bits are 0
    assert unpack_bitmask(words, size).tolist() == bools(size, legal).tolist()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4))
def test_unpacked_words_pack_to_themselves(words: list[int]) -> None:
    bitmask = torch.tensor(words, dtype=torch.int32)
    assert torch.equal(pack_bitmask(unpack_bitmask(bitmask, 32 * len(words))), bitmask)


@given(token_sets())
def test_apply_is_xgrammars(drawn: tuple[int, frozenset[int]]) -> None:
    size, legal = drawn
    bitmask = pack_bitmask(bools(size, legal)).unsqueeze(0)
    logits = torch.arange(size, dtype=torch.float32).unsqueeze(0)
    expected = logits.clone()
    xgrammar.apply_token_bitmask_inplace(expected, bitmask)
    found = apply_token_bitmask(logits, bitmask)
    assert torch.equal(found, expected)
    assert {t for t in range(size) if found[0, t] != NO} == legal
    assert torch.equal(logits, torch.arange(size, dtype=torch.float32).unsqueeze(0))


def test_leading_dimensions() -> None:
    torch.manual_seed(0)
    legal = torch.rand(3, 2, 45) < 0.5
    bitmask = pack_bitmask(legal)
    assert bitmask.shape == (3, 2, 2)
    assert torch.equal(unpack_bitmask(bitmask, 45), legal)
    masked = apply_token_bitmask(torch.zeros(3, 2, 45, dtype=torch.bfloat16), bitmask)
    assert masked.dtype == torch.bfloat16
    assert torch.equal(masked == 0, legal)
    assert bool((masked[~legal] == NO).all())


def test_no_rows() -> None:
    assert pack_bitmask(torch.zeros(0, 45, dtype=torch.bool)).shape == (0, 2)


def test_top_bit() -> None:
    legal = frozenset({31, 63})
    words = pack_bitmask(bools(64, legal))
    assert words.tolist() == [-(2**31)] * 2
    assert unpack_bitmask(words, 64).nonzero().flatten().tolist() == [31, 63]


def test_all_ones_forbids_nothing() -> None:
    logits = torch.randn(2, 40)
    ones = torch.full((2, 2), -1, dtype=torch.int32)
    assert torch.equal(apply_token_bitmask(logits, ones), logits)


def test_no_mask_is_no_copy() -> None:
    logits = torch.randn(2, 3, 7)
    assert apply_token_bitmask(logits, None) is logits
