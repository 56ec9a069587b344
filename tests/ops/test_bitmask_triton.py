"""The mask kernels give exactly what torch gives; here in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

COMPARE = """
import torch
from guided_spec.ops import bitmask as torch_ops, bitmask_triton as kernels

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)  # memory that nothing has written to holds NaN
for size in (1, 33, 1025, 2100):
    for share in (0.0, 0.01, 0.9):
        masks = torch_ops.pack_bitmask(torch.rand(2, 3, size) < share)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = torch.randn(2, 3, size).to(dtype)
            logits[0, 0, size // 2] = float("nan")
            found = kernels.apply_token_bitmask(logits, masks)
            expected = torch_ops.apply_token_bitmask(logits, masks)
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), (size, share)
        for wanted in (1, 1030):
            ids = torch.randperm(size)[:wanted]
            found = kernels.translate_bitmask(masks, ids)
            assert torch.equal(found, torch_ops.translate_bitmask(masks, ids)), (size, wanted)

some, logits = masks[:, 1], torch.randn(2, 3, 2100, 2)[:, 1, :, 0]  # neither is contiguous
expected = torch_ops.apply_token_bitmask(logits, some)
assert torch.equal(kernels.apply_token_bitmask(logits, some), expected)
ids = torch.arange(5000)[::99].clamp_max(2099)[:22]
assert torch.equal(kernels.translate_bitmask(some, ids), torch_ops.translate_bitmask(some, ids))
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_give_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
