"""What speculation did, added up."""

from __future__ import annotations

import json

import pytest

from guided_spec.engine.outputs import RequestStats


def test_steps_are_counted_by_position() -> None:
    stats = RequestStats(prompt_tokens=3)
    stats.count_step(4, 2, [0, 1, 2])
    stats.count_step(0, 0, [])
    stats.count_step(2, 2, [1])
    assert stats.steps == 3
    assert stats.drafted == [2, 2, 1, 1]
    assert stats.accepted == [2, 2]
    assert (stats.forced, stats.forced_accepted) == (4, 3)


def test_what_stands_before_the_marker() -> None:
    stats = RequestStats()
    stats.count_step(4, 4, [2, 3], 3)
    stats.count_step(4, 1, [], 2)
    stats.count_step(2, 2, [1])
    assert (stats.reasoning, stats.reasoning_accepted) == (4, 3)
    assert (stats.forced, stats.forced_accepted) == (3, 3)


def test_ratios() -> None:
    stats = RequestStats(output_tokens=12, steps=4, seconds=0.5)
    assert stats.acceptance_length == pytest.approx(3.0)
    assert stats.forwards_per_token == pytest.approx(1 / 3)
    assert stats.tokens_per_second == pytest.approx(24.0)


def test_ratios_of_a_request_that_never_ran() -> None:
    stats = RequestStats()
    stats.stop()
    ratios = (stats.acceptance_length, stats.forwards_per_token, stats.tokens_per_second)
    assert ratios == (0.0, 0.0, 0.0)
    assert stats.seconds == 0.0


def test_the_clock() -> None:
    stats = RequestStats()
    stats.start()
    stats.stop()
    assert 0 < stats.seconds < 60


def test_as_dict_is_json_and_hides_the_clock() -> None:
    stats = RequestStats(output_tokens=2, steps=1, seed=7)
    stats.start()
    record = json.loads(json.dumps(stats.as_dict()))
    assert record["acceptance_length"] == 2.0
    assert record["seed"] == 7
    assert not [name for name in record if name.startswith("_")]
