"""Integers of Python lists as tensors: those that torch makes of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.ops.host import host_integers

INTEGERS = st.integers(-(2**63), 2**63 - 1)
TABLES = st.integers(0, 4).flatmap(
    lambda width: st.lists(st.lists(INTEGERS, min_size=width, max_size=width), min_size=1)
)


@given(values=st.one_of(st.lists(INTEGERS), TABLES))
def test_they_are_torchs_own(values: list[int] | list[list[int]]) -> None:
    found, wanted = host_integers(values), torch.tensor(values, dtype=torch.int64)
    assert found.shape == wanted.shape
    assert found.dtype == torch.int64
    assert torch.equal(found, wanted)


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="inhomogeneous"):
        host_integers([[1], [2, 3]])
