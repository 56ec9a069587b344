"""The likeliest tokens of a place."""

from __future__ import annotations

import pytest
import torch

from guided_spec.models.heads.block.transitions import GROUP, likeliest


@pytest.mark.parametrize("size", [1000, 4 * 2 * GROUP + 1, 4 * 2 * GROUP, 5])
def test_the_likeliest_of_many(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.stack([torch.randperm(size).float() for _ in range(6)]).view(2, 3, size)
    logits[0, 0, -1] = size  # in the last group, which may be a part of one
    found, best = likeliest(logits, 4), logits.topk(4)
    assert torch.equal(found.values, best.values)
    assert torch.equal(found.found, best.indices)
