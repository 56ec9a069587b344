"""The law of a text beside one with the same noise, which that noise keeps in the batch.

Both texts are a or b, a colon, and then b or a long rest that begins with a. The first one comes a
step earlier: the second one has it for company in its own first step where the shared noise gave
the first one an a, and is alone where it gave a b.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from guided_spec import proposers
from guided_spec.core import DecodeBatch, DraftInFlight
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers import build_proposer
from tests.law.harness import UNLIKELY
from tests.proposers.company import CONFIG, Company, Member, ToyModel
from tests.toys import EOS, TEXTS, VOCAB_SIZE, ToyTarget, chi_square_p_value, toy_context

SEEDS = 120
A, B, COLON = map(TEXTS.index, (b"a", b"b", b":"))
LETTERS = frozenset({A, B})
LONGEST = 9


def rule(prefix: tuple[int, ...]) -> frozenset[int]:
    if len(prefix) == 1:
        return frozenset({COLON})
    is_over = len(prefix) == LONGEST or (len(prefix) == 3 and prefix[2] == B)
    return frozenset({EOS}) if is_over else LETTERS


def letters(_: object) -> torch.Tensor:
    """The logits of a model that knows the two letters alone, and likes both as much."""
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[[A, B]] = 0.0
    return logits


class AsksTheBatch(ToyModel):
    """The mistake: it ends chains where the host need not see any request's draft as it grows."""

    asked = False

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        self.asked = "mask" not in batch.policies
        return super().begin(batch, lookahead, carry)

    @property
    def ends_chains(self) -> bool:
        return self.asked


def p_value(model: type[ToyModel], seeds: int) -> float:
    """How likely the third letters of the second texts are."""
    pair = [
        Member(rule, {"draft_policy": "mask"}),
        Member(rule, {"draft_policy": "validate"}, joins=1),
    ]
    uniform, counts = ToyTarget(scale=0.0), [0, 0]
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setitem(proposers.PROPOSERS, "letters", lambda _: model(letters))
        build = partial(build_proposer, "chain:grammar_forced+letters")
        for seed in range(seeds):
            company, proposer = Company(pair, seed, uniform), build(toy_context(config=CONFIG))
            while len(found := company.texts[1].output_ids) < 3:
                company.step(proposer)
            counts[found[2] == B] += 1
    return chi_square_p_value(torch.tensor(counts), torch.tensor([0.5, 0.5]))


def test_the_law_beside_a_text_with_the_same_noise() -> None:
    assert p_value(ToyModel, SEEDS) > UNLIKELY


@pytest.mark.slow
def test_the_law_beside_a_text_with_the_same_noise_by_many_seeds() -> None:
    assert p_value(ToyModel, 1000) > UNLIKELY


def test_the_law_is_broken_where_the_batch_ends_a_chain() -> None:
    assert p_value(AsksTheBatch, SEEDS) < UNLIKELY
