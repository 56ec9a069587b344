"""Paths that a CUDA device finds along tables are those that the host finds."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.trees.lattice_paths import first_legal_paths
from tests.ops.trees.lattice_walks import compare

pytestmark = pytest.mark.gpu


def test_the_kernel_finds_the_paths_of_the_host() -> None:
    assert compare(first_legal_paths, torch.device("cuda")) > 5
