"""What forwards read of prompts, as a test watches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from guided_spec.core import PromptPiece
from guided_spec.engine.steps.in_flight import InFlight, Plan
from guided_spec.engine.steps.step_runner import StepRunner
from guided_spec.engine.target.line_target import LineTarget


class Read(NamedTuple):
    """What a forward reads of prompts. is_alone: it does nothing else."""

    prompts: Sequence[PromptPiece]
    is_alone: bool

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """The forwards of packed targets from here on, as they are launched."""
    found = list[Read]()
    read, launch = LineTarget.read, StepRunner.launch

    def reading(target: LineTarget, prompts: Sequence[PromptPiece]) -> None:
        found.append(Read(prompts, is_alone=True))
        read(target, prompts)

    def launching(runner: StepRunner, plan: Plan, last: InFlight) -> InFlight:
        found.append(Read([piece.tokens for piece in plan.pieces], is_alone=False))
        return launch(runner, plan, last)

    monkeypatch.setattr(LineTarget, "read", reading)
    monkeypatch.setattr(StepRunner, "launch", launching)
    return found
