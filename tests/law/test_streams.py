"""Which random numbers a draft is drawn with: its own, or those of the target if it is coupled."""

from __future__ import annotations

import pytest
import torch

from guided_spec.core import DecodeBatch
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.types import SamplingParams, Verifier
from tests.toys import CPU, VOCAB_SIZE

K = 3
CONTEXT = (1, 2, 3, 4)


def batch(verifier: Verifier) -> DecodeBatch:
    return DecodeBatch(
        slots=(0,),
        contexts=(CONTEXT,),
        prompt_lengths=(2,),
        constraints=(None,),
        limits=(K,),
        sampling=Sampling.stack([SamplingParams(temperature=1.0)], [7], CPU),
        mask_rows=MaskRows(1, K + 1, VOCAB_SIZE, CPU),
        num_draft_tokens=K,
        vocab_size=VOCAB_SIZE,
        device=CPU,
        verifier=verifier,
    )


@pytest.mark.every_case
@pytest.mark.parametrize("at", range(K))
def test_rejection_verifies_with_noise_of_its_own(at: int) -> None:
    decoding = batch("rejection")
    drafting = decoding.draft_noise(torch.tensor([len(CONTEXT) + at]))
    assert not torch.equal(drafting, decoding.verify_noise(K).sample)


@pytest.mark.every_case
@pytest.mark.parametrize("at", range(K))
def test_coupled_drafts_share_the_noise_of_their_position(at: int) -> None:
    decoding = batch("coupled")
    drafting = decoding.draft_noise(torch.tensor([len(CONTEXT) + at]))
    assert torch.equal(drafting, decoding.verify_noise(K).sample[:, at])
