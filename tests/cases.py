"""Cases for parametrized tests: less than a full product, but nothing is left out.

A fault seldom needs three settings at once. So a test over several lists takes every pair of
values (``pairwise``), or each value of one list with some of another (``rotated``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any


def rotated(first: Sequence[Any], second: Sequence[Any], each: int = 1) -> list[tuple[Any, Any]]:
    """Each value of ``first`` with ``each`` values of ``second``, the next ones each time.

    All of ``second`` occur if there are enough of ``first``: asserted, since nothing may be lost.
    """
    assert len(first) * each >= len(second), "raise each: values of second would be left out"
    return [
        (value, second[(row * each + column) % len(second)])
        for row, value in enumerate(first)
        for column in range(each)
    ]


def pairwise(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few of the product's tuples, in which every two values of two lists occur together.

    Greedy: the tuple with most of the missing pairs comes next, the earliest of equals.
    """
    everything = list(product(*(range(len(values)) for values in lists)))
    missing = {pair for one in everything for pair in _pairs(one)}
    found = []
    while missing:
        best = max(everything, key=lambda one: len(missing.intersection(_pairs(one))))
        missing.difference_update(_pairs(best))
        found.append(tuple(values[at] for values, at in zip(lists, best, strict=True)))
    return found


def _pairs(positions: tuple[int, ...]) -> Iterator[Any]:
    return combinations(enumerate(positions), 2)
