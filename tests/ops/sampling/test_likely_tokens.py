"""The likeliest tokens of a place, and those of them that are legal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.sampling.likely_tokens import GROUP, LISTED, likeliest, list_likely_tokens


@pytest.mark.parametrize("size", [1000, 4 * 2 * GROUP + 1, 4 * 2 * GROUP, 5])
def test_the_likeliest_of_many(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.stack([torch.randperm(size).float() for _ in range(6)]).view(2, 3, size)
    logits[0, 0, -1] = size  # in the last group, which may be a part of one
    found, best = likeliest(logits, 4), logits.topk(4)
    assert torch.equal(found.values, best.values)
    assert torch.equal(found.found, best.indices)


def ids_and_scores(listed: Tensor) -> list[dict[int, float]]:
    """Of each row its tokens, which are there once, and their scores."""
    assert listed.shape[1:] == (2, LISTED)
    assert listed.dtype == torch.int32
    rows = []
    for ids, scores in zip(listed[:, 0], listed[:, 1].view(torch.float32), strict=True):
        kept = ids >= 0
        rows.append(dict(zip(ids[kept].tolist(), scores[kept].tolist(), strict=True)))
        assert len(rows[-1]) == int(kept.sum())
    return rows


@pytest.mark.parametrize("size", [12, 700])
@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_best_legal_ones(size: int, *, is_reduced: bool, is_masked: bool) -> None:
    torch.manual_seed(1)
    target_size = size + 40 * is_reduced
    target_ids = torch.randperm(target_size)[:size].sort().values
    logits, legal = torch.randn(3, size), torch.rand(3, target_size) < 0.1
    legal[0] = False  # a row where nothing is
    mask = pack_bitmask(legal) if is_masked else None
    found = list_likely_tokens(logits, mask, target_ids if is_reduced else None)
    spelled = target_ids.tolist() if is_reduced else list(range(size))
    for row, own in enumerate(ids_and_scores(found)):
        order = logits[row].argsort(descending=True).tolist()
        expected = [at for at in order if legal[row, spelled[at]] or not is_masked][:LISTED]
        assert list(own.items()) == [(spelled[at], logits[row, at].item()) for at in expected]


def test_what_has_no_logit_is_not_listed() -> None:
    """Nor what is illegal."""
    logits = torch.full((1, 40), float("-inf"))
    logits[0, [3, 5]] = torch.tensor([1.0, 2.0])
    legal = torch.zeros(1, 40, dtype=torch.bool)
    legal[0, [3, 7]] = True
    assert ids_and_scores(list_likely_tokens(logits, pack_bitmask(legal), None)) == [{3: 1.0}]
