"""How much is drafted for a text with a seed does not depend on who runs beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guided_spec.types import SamplingParams
from tests.by_chance import draft_by_chance
from tests.tiny_llm import make_llm

SEEDED = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
SHORT = replace(SEEDED, seed=None, max_tokens=4)  # never runs without the other


def test_steps_with_a_seeded_text_draft_as_they_always_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is asked where a step has other texts alone."""
    asked = draft_by_chance(monkeypatch)
    with make_llm("llama", "ngram", max_batch_size=2, drafting="auto") as llm:
        llm.generate(["A", "B"], [SEEDED, SHORT])
        assert asked == []
        llm.generate(["A", "B"], SHORT)
        assert asked != []
