"""Whole workloads of random requests: each text is what its request gives alone.

``python -m tests.fuzz --target workload`` draws others for as long as it is told to.
"""

from __future__ import annotations

from typing import Any

import pytest

from guided_spec.models.packed.blocks import BLOCK
from guided_spec.types import SamplingParams
from tests.fuzz.stepping import check, keeps_nothing
from tests.fuzz.workloads import LENGTH, SYSTEM, Ask, Workload, draw

QUICK = (1, 2, 4, 6)


@pytest.mark.parametrize("seed", QUICK)
def test_texts_do_not_depend_on_what_runs_beside_them(seed: int) -> None:
    with keeps_nothing():
        check(draw(seed))


@pytest.mark.slow
def test_many_workloads() -> None:
    for seed in sorted(set(range(16)).difference(QUICK)):
        with keeps_nothing():
            check(draw(seed))


@pytest.mark.slow
def test_scores_that_are_done_stay_done() -> None:
    """A text that grows in the same step takes room from those that run, not from these."""
    text = Ask(SYSTEM[:BLOCK], SamplingParams(max_tokens=140, ignore_eos=True))
    choices = [Ask(SYSTEM[: BLOCK + at], None, joins=at) for at in range(1, 60)]
    options: dict[str, Any] = {"num_draft_tokens": 0, "max_forced_tokens": 0, "max_batch_size": 6}
    options |= {"max_model_len": LENGTH, "kernels": "auto", "verifier": "rejection"}
    check(Workload("none", "llama", options, 4, None, [text, *choices]))
