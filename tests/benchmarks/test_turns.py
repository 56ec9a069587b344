"""Whose turn it is, among some of whom one leaves early."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.turns import Turns

ROUNDS = {"a": 4, "b'(c)": 2, "d": 4}


def test_they_take_turns(tmp_path: Path) -> None:
    Turns.begin(tmp_path, [*ROUNDS])
    seen, running = list[str](), list[str]()

    def run(name: str, rounds: int) -> None:
        turns = Turns(tmp_path, name)
        for _ in range(rounds):
            with turns.turn():
                running.append(name)
                seen.append(name)
                time.sleep(0.002)
                assert running.pop() == name
                assert running == []
        turns.leave()

    with ThreadPoolExecutor(len(ROUNDS)) as pool:
        for done in [pool.submit(run, *one) for one in ROUNDS.items()]:
            done.result(60)
    assert seen == [*ROUNDS] * 2 + ["a", "d"] * 2


def test_who_never_came_is_left_behind(tmp_path: Path) -> None:
    Turns.begin(tmp_path, ["gone", "here"])
    Turns(tmp_path, "gone").leave()
    with Turns(tmp_path, "here").turn():
        pass
    Turns(tmp_path, "here").wait()
