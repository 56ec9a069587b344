"""The Philox kernel gives the bits of the torch reference; here in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from guided_spec.ops.sampling.noise import Stream, philox
from guided_spec.ops.sampling.noise_triton import philox as kernel

torch.manual_seed(0)
for batch, columns in ((1, 1), (3, 2), (2, 7), (4, 1023), (2, 1025), (3, 2050)):
    seeds = torch.randint(0, 2**63 - 1, (batch,))
    positions = torch.randint(0, 2**40, (batch,))
    seeds[0], positions[0] = 0, 0
    seeds[-1], positions[-1] = 2**63 - 1, 2**33 + 5
    for stream in Stream:
        found = kernel(seeds, positions, int(stream), columns)
        assert torch.equal(found, philox(seeds, positions, stream, columns)), (batch, columns)
assert kernel(torch.zeros(0).long(), torch.zeros(0).long(), 0, 5).shape == (0, 5)
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_gives_the_same_bits() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
