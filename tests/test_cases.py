"""Every value and every pair of values of a product occurs among the cases that stand for it."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import pairwise, rotated


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_every_pair_occurs(sizes: list[int]) -> None:
    lists = [range(size) for size in sizes]
    found = pairwise(*lists)
    assert set(found) <= set(product(*lists))
    for (a, first), (b, second) in combinations(enumerate(lists), 2):
        assert {(one[a], one[b]) for one in found} == set(product(first, second))


def test_it_is_fewer_than_the_product() -> None:
    assert len(pairwise(range(4), range(3), range(2), range(2))) < 48 / 3


def test_every_value_occurs() -> None:
    assert rotated("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]
    assert rotated("ab", [1, 2, 3], each=2) == [("a", 1), ("a", 2), ("b", 3), ("b", 1)]
    with pytest.raises(AssertionError, match="raise each"):
        rotated("a", [1, 2])
