"""Whole workloads of random requests: each text is what its request gives alone.

``python -m tests.fuzz --target workload`` draws others for as long as it is told to.
"""

from __future__ import annotations

import pytest

from tests.fuzz.stepping import check, check_nothing_is_kept
from tests.fuzz.workloads import draw

QUICK = (0, 1, 2, 4, 6)


@pytest.mark.parametrize("seed", QUICK)
def test_texts_do_not_depend_on_what_runs_beside_them(seed: int) -> None:
    check(draw(seed))
    check_nothing_is_kept()


@pytest.mark.slow
def test_many_workloads() -> None:
    for seed in sorted(set(range(16)).difference(QUICK)):
        check(draw(seed))
        check_nothing_is_kept()
