"""Steps whose drafts are as long as chance says, of the lengths that they may have."""

from __future__ import annotations

import random

import pytest

from guided_spec.engine.steps.draft_length import DraftLengthPolicy


def draft_by_chance(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on; returns how much each step drafts, as they come."""
    dice, counts = random.Random(0), list[int]()

    def num_draft_tokens(policy: DraftLengthPolicy, *_: int) -> int:
        counts.append(dice.choice(policy.lengths))
        return counts[-1]

    monkeypatch.setattr(DraftLengthPolicy, "num_draft_tokens", num_draft_tokens)
    return counts
