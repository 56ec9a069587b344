"""The two tiers of tests: the quick one, which ``pytest`` runs, and the full one, of ``.ci/run``.

A test is in the full tier alone if it is marked ``slow``, if its folder is one of ``FULL_FOLDERS``,
or if it is one of many cases of a parametrized test: the quick tier takes ``QUICK_CASES`` of them,
as different as they come. Where every case is a promise of its own, ``@pytest.mark.every_case``
keeps all of them quick.

Hypothesis draws few examples in the quick tier, the same in every run; in the full tier it draws
many, by a seed that ``--hypothesis-seed`` sets (``.ci/run`` takes one of the package's contents),
so that another version tries other examples and a failure can be had again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

QUICK_CASES = 2
QUICK_EXAMPLES = 10
FULL_EXAMPLES = 60
FULL_ONLY = ("slow", "sweep", "gpu")
FULL_FOLDERS = ("benchmarks",)  # of tests: what they test is no part of the package


def is_quick(config: pytest.Config) -> bool:
    """Whether the run leaves slow tests out."""
    return "not slow" in str(config.option.markexpr)


def load_profile(config: pytest.Config) -> None:
    """Set how many examples Hypothesis draws, and whether they are the same in every run."""
    name = "quick" if is_quick(config) else "full"
    settings.register_profile(
        name,
        deadline=None,  # a busy machine is not a defect
        derandomize=name == "quick",
        database=None,  # a run does not depend on those before it
        max_examples=QUICK_EXAMPLES if name == "quick" else FULL_EXAMPLES,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],  # likewise
    )
    settings.load_profile(name)


def examples(count: int) -> int:
    """How many examples a test draws that needs ``count`` in the full tier; few in the quick.

    For ``settings(max_examples=examples(400))``, where the profile's number does not fit.
    """
    if settings.get_current_profile_name() == "full":
        return count
    return max(1, min(QUICK_EXAMPLES, count // 4))


def leave_to_the_full_tier(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what the quick tier has no room for: all but a few cases of each test."""
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if set(FULL_FOLDERS) & {*item.path.parts}:
            item.add_marker(pytest.mark.slow)
        is_left_out = any(item.get_closest_marker(name) is not None for name in FULL_ONLY)
        is_whole = item.get_closest_marker("every_case") is not None
        if isinstance(item, pytest.Function) and not (is_left_out or is_whole):
            cases[f"{item.path}::{item.originalname}"].append(item)
    for found in cases.values():
        kept = _different([case.name.split("-") for case in found], QUICK_CASES)
        for position, case in enumerate(found):
            if position not in kept:
                case.add_marker(pytest.mark.slow)


def _different(cases: Sequence[Sequence[str]], count: int) -> set[int]:
    """The positions of the first case, and of those that share least with the ones before them."""
    kept = [0]
    while len(kept) < min(count, len(cases)):
        seen = {part for position in kept for part in enumerate(cases[position])}
        rest = [position for position in range(len(cases)) if position not in kept]
        # The last of equals: neighbours in a list of cases are often alike.
        kept.append(max(rest, key=lambda at: (len(set(enumerate(cases[at])) - seen), at)))
    return set(kept)
