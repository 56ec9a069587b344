"""Every row of a step is masked: those of the draft, and the one behind it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Draft, SamplingParams, Verifier

CPU = torch.device("cpu")
K, SIZE = 3, 8
ROWS = 200
FORBIDDEN = 0  # the model's favourite, everywhere


@pytest.mark.every_case
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", get_args(Verifier))
def test_only_legal_tokens_come_at_each_position(verifier: Verifier, temperature: float) -> None:
    """Row i allows token i + 1 alone, and that is what is drafted: all of it is accepted."""
    logits = torch.zeros(ROWS, K + 1, SIZE)
    logits[..., FORBIDDEN] = 9.0
    legal = torch.zeros(ROWS, K + 1, SIZE, dtype=torch.bool)
    for row in range(K + 1):
        legal[:, row, row + 1] = True
    params = [SamplingParams(temperature=temperature)] * ROWS
    seeds = torch.arange(ROWS)
    draft = Draft(torch.arange(1, K + 1).expand(ROWS, -1), torch.full((ROWS,), K))
    rows = VerifyRows(Sampling.stack(params, range(ROWS), CPU), NoiseKeys(seeds, seeds), verifier)
    found = verify(logits, pack_bitmask(legal), draft, rows)
    assert found.token_ids.tolist() == [[1, 2, 3, 4]] * ROWS


@pytest.mark.every_case
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", range(K))
@pytest.mark.parametrize("verifier", get_args(Verifier))
def test_an_illegal_token_is_refused_at_each_position(
    verifier: Verifier, at: int, temperature: float
) -> None:
    """However likely the model finds it; what comes instead is legal."""
    logits = torch.zeros(ROWS, K + 1, SIZE)
    logits[..., FORBIDDEN] = 9.0
    legal = torch.ones(ROWS, K + 1, SIZE, dtype=torch.bool)
    legal[:, at, FORBIDDEN] = False
    params = [SamplingParams(temperature=temperature)] * ROWS
    draft = Draft(torch.full((ROWS, K), FORBIDDEN), torch.full((ROWS,), K))
    seeds = torch.arange(ROWS)
    rows = VerifyRows(Sampling.stack(params, range(ROWS), CPU), NoiseKeys(seeds, seeds), verifier)
    found = verify(logits, pack_bitmask(legal), draft, rows)
    assert (found.num_accepted <= at).all()
    assert (found.token_ids[:, at] != FORBIDDEN).all()
    assert (found.num_accepted == at).any()
