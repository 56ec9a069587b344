"""The pointwise kernels give what the torch references give; here in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

COMPARE = """
from itertools import product
import torch
from guided_spec.ops.attention.slot_attention import HeadNorms
from guided_spec.ops import pointwise, pointwise_triton as kernels

# Not bfloat16: the interpreter cuts off its digits, where a GPU rounds.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.float16: (0, 2e-3)}
torch.manual_seed(0)


def close(found, expected):
    atol, rtol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


for dtype in TOLERANCE:
    for shape in ((1, 1, 8), (3, 2, 40), (2, 1030), (0, 8)):
        x, residual = torch.randn(2, *shape).to(dtype)
        weight = torch.randn(shape[-1]).to(dtype)
        for shift in (None, 0.0, 1.0):
            expected = pointwise.rms_norm(x, weight, 1e-5, shift)
            close(kernels.rms_norm(x, weight, 1e-5, shift), expected)
            norm, other = (weight, 1e-5, shift), (weight.flip(0), 1e-3, 0.0)
            for own, then in product((None, norm), (None, other)):
                found = kernels.add_branch(x, residual, own, then, 0.22)
                expected = pointwise.add_branch(x, residual, own, then, 0.22)
                close(found[0], expected[0])
                close(found[1], expected[1])
        found = kernels.add_branch(x, residual, None, (weight, 1e-5, None))
        expected = pointwise.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(found[0], expected[0])
        close(found[1], expected[1])
        both = torch.cat([x * 4, residual], -1)
        gate, up = both.chunk(2, -1)
        close(kernels.silu_mul(gate, up), pointwise.silu_mul(gate, up))
        close(kernels.silu_mul(x, up), pointwise.silu_mul(x, up))
    x, weight = torch.randn(2, 8).to(dtype), torch.randn(8)
    close(kernels.rms_norm(x, weight, 1e-5), pointwise.rms_norm(x, weight, 1e-5))
    for shift in (None, 0.0):
        own = (weight, 1e-5, shift)
        found, expected = (one.add_branch(x, x, own, own) for one in (kernels, pointwise))
        close(found[0], expected[0])
        close(found[1], expected[1])
    for queries, keys in ((24, 8), (8, 24), (0, 8), (1030, 40)):
        for count in (0, 5):
            packed = torch.randn(count, queries + 2 * keys).to(dtype)
            norms = HeadNorms(torch.randn(queries), torch.randn(keys).to(dtype), 1e-5, True)
            expected = packed.clone()
            pointwise.norm_all_heads(expected, norms)
            kernels.norm_all_heads(packed, norms)
            close(packed, expected)
print("equal")
"""


def test_the_kernels_agree_with_the_references() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
