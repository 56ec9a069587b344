"""A drafter's logits are adjusted as the target's are, wherever each draft stands."""

from __future__ import annotations

import pytest
import torch

from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.proposers.host_masks import DraftAdjustments
from guided_spec.types import SamplingParams
from tests.toys import CPU, EOS, VOCAB_SIZE, toy_batch

CONTEXTS = [[0, 1], [1, 2, 2], [3]]
DRAFTED = [[2], [], [4, 4]]
LATER = [[1, 5], [2, -1], [4, 1]]


def rules() -> list[TokenRules | None]:
    params = SamplingParams(
        logit_bias={1: -0.5, 7: float("-inf")},
        min_tokens=3,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    return [TokenRules(params, ((2, 1), (1, 5, 3), (4,)), (EOS,)), None, TokenRules(params)]


@pytest.mark.parametrize("size", [None, 9, VOCAB_SIZE])
def test_each_position_is_that_of_the_verifier(size: int | None) -> None:
    """Drafts of different lengths, in all tokens or in some of them in another order."""
    batch = toy_batch(CONTEXTS, [None] * 3, k=3)
    generator = torch.Generator().manual_seed(0)
    vocabulary, kept = None, torch.arange(VOCAB_SIZE)
    if size is not None:
        kept = torch.randperm(VOCAB_SIZE, generator=generator)[:size]
        vocabulary = DraftVocabulary(kept, VOCAB_SIZE)
    table = RuleTable.stack(rules(), VOCAB_SIZE, CPU)
    batch.adjustments = Adjustments.stack(table, batch.contexts, batch.prompt_lengths)
    assert batch.adjustments is not None
    walk = DraftAdjustments(batch, DRAFTED, vocabulary)
    for depth in range(3):
        logits = torch.randn(3, VOCAB_SIZE, generator=generator)
        found = walk.apply(logits[:, kept])
        for row in range(3):
            tokens = [one for one in [*DRAFTED[row], *LATER[row][:depth]] if one >= 0]
            drafted = torch.tensor([tokens] * 3, dtype=torch.int64).view(3, len(tokens))
            rows = batch.adjustments.apply(logits.unsqueeze(1), drafted, len(tokens))
            if row != 1 or depth < 2:  # where the draft has not ended
                assert torch.equal(found[row], rows[row, 0, kept])
        if depth < 2:
            walk.append(torch.tensor([later[depth] for later in LATER]))


def test_nothing_to_adjust() -> None:
    batch = toy_batch(CONTEXTS, [None] * 3)
    walk = DraftAdjustments(batch, DRAFTED, None)
    logits = torch.randn(3, VOCAB_SIZE)
    assert walk.apply(logits) is logits
    walk.append(torch.tensor([1, 1, 1]))
