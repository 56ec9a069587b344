"""Paths that are found where the lattices are, are those that the host finds."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.trees.lattice_paths import first_legal_paths
from tests.ops.interpreted import run_interpreted
from tests.ops.trees.lattice_walks import compare


def test_paths_are_those_of_the_host() -> None:
    assert compare(first_legal_paths, torch.device("cpu")) > 5


@pytest.mark.slow
def test_the_kernel_does_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-m", "tests.ops.trees.lattice_walks") == "equal"
