"""After a refusal the token comes from what the draft left of the target: its law is the target's.

One position, in closed form: many rows in one call, and exact probabilities. ``test_law.py`` has
the law of several positions, for every kind of draft.
"""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.sampling.rejection import rejection_sample
from guided_spec.types import Draft, Noise
from tests.toys import chi_square_p_value

ROWS = 100_000
UNLIKELY = 1e-6
TARGET = torch.tensor([0.5, 0.3, 0.2, 0.0])
DRAFTER = torch.tensor([0.1, 0.6, 0.1, 0.2])


@pytest.mark.parametrize("is_certain", [False, True], ids=["sampled", "certain"])
def test_the_first_token_has_the_law_of_the_target(*, is_certain: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    drafted = torch.multinomial(DRAFTER.expand(ROWS, -1), 1, generator=generator)
    probs = None if is_certain else DRAFTER.expand(ROWS, 1, -1)
    accept = torch.rand(ROWS, 1, generator=generator)
    sample = torch.empty(ROWS, len(TARGET)).exponential_(generator=generator).clamp_min(1e-30)
    draft = Draft(drafted, torch.ones(ROWS, dtype=torch.int64), probs)
    found = rejection_sample(TARGET.expand(ROWS, 2, -1), draft, Noise(accept, sample))
    counts = torch.bincount(found.token_ids[:, 0], minlength=len(TARGET))
    assert chi_square_p_value(counts, TARGET) > UNLIKELY


def test_a_refused_token_that_was_certain_is_not_drawn_again() -> None:
    draft = Draft(torch.full((ROWS, 1), 1), torch.ones(ROWS, dtype=torch.int64))
    generator = torch.Generator().manual_seed(4)
    accept = torch.rand(ROWS, 1, generator=generator)
    sample = torch.empty(ROWS, len(TARGET)).exponential_(generator=generator).clamp_min(1e-30)
    found = rejection_sample(TARGET.expand(ROWS, 2, -1), draft, Noise(accept, sample))
    is_refused = found.num_accepted == 0
    assert not (found.token_ids[is_refused, 0] == 1).any()
