"""Texts that walk along tables by addresses go where the tables say."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops import table_rows
from tests.ops.interpreted import run_interpreted
from tests.ops.table_walks import compare


def test_texts_go_where_their_tables_say() -> None:
    compare(table_rows, torch.device("cpu"))


@pytest.mark.slow
def test_the_kernels_do_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-m", "tests.ops.table_walks") == "equal"
