"""How long tests take, for ``pytest -m "not gpu and not sweep" --write-durations FILE``.

A file of the slowest tests and the sum of each folder, for whoever looks for time to save; the
full run writes it anew before a release. The run that writes it fails if a test of the quick tier
takes more than ``LONGEST_QUICK`` seconds of CPU time itself, its child processes included, and not
counting fixtures that it shares: other work on the machine makes it no longer. Drawn tests are
judged by runs of the quick tier alone, since they draw few examples there.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import is_hypothesis_test

from tests.tiers import is_quick

LONGEST_QUICK = 5.0  # seconds
SHOWN = 0.5  # seconds of CPU time that a test needs to be listed by name
_STARTED = pytest.StashKey[float]()
_CALLED = pytest.StashKey[float]()


class Duration(NamedTuple):
    """What one item took, in seconds of CPU time of this process and of children that have ended.

    cpu: with its fixtures. call: without them. is_judged: whether ``call`` has a limit.
    """

    cpu: float
    call: float
    is_slow: bool
    is_judged: bool


def cpu_seconds() -> float:
    """The CPU time of this process so far, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def note_start(item: pytest.Item) -> None:
    """Remember when the item began."""
    item.stash[_STARTED] = cpu_seconds()


def note_call(item: pytest.Item) -> None:
    """Remember when its fixtures were there."""
    item.stash[_CALLED] = cpu_seconds()


def note_end(item: pytest.Item, report: pytest.TestReport) -> None:
    """Give the reports of an item what it took; a worker sends them to the main process."""
    if report.when == "call" and _CALLED in item.stash:
        item.stash[_CALLED] = cpu_seconds() - item.stash[_CALLED]
    if report.when == "teardown" and _STARTED in item.stash:
        is_slow = item.get_closest_marker("slow") is not None
        is_drawn = isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
        found = Duration(
            cpu=cpu_seconds() - item.stash[_STARTED],
            call=item.stash.get(_CALLED, 0.0),
            is_slow=is_slow,
            is_judged=not is_slow and (is_quick(item.config) or not is_drawn),
        )
        report.user_properties.extend(found._asdict().items())


class DurationsWriter:
    """A plugin of the process that hears of all items.

    path: the file that it writes. arguments: those of pytest, which the file names.
    """

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        self._path = path
        self._command = " ".join(["pytest", *arguments])
        self._started = time.monotonic()
        self._items: dict[str, Duration] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what items took."""
        found: dict[str, Any] = dict(report.user_properties)
        if "is_judged" in found:
            self._items[report.nodeid] = Duration(**{key: found[key] for key in Duration._fields})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file; fail if a quick test is too long."""
        self._path.write_text(json.dumps(self._summary(), indent=1) + "\n", encoding="utf-8")
        if self.too_long() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the quick tests that are too long."""
        for name, seconds in self.too_long().items():
            fix = f"make it shorter than {LONGEST_QUICK} s, or mark it slow"
            terminalreporter.write_line(f"{name}: {seconds:.1f} s of CPU time; {fix}", red=True)

    def too_long(self) -> dict[str, float]:
        """The items of the quick tier that took too long, and the seconds of each."""
        return {
            name: one.call
            for name, one in self._items.items()
            if one.is_judged and one.call > LONGEST_QUICK
        }

    def _summary(self) -> dict[str, object]:
        quick = [one for one in self._items.values() if not one.is_slow]
        return {
            "command": self._command,
            "cores": os.cpu_count(),
            "wall_seconds": round(time.monotonic() - self._started),
            "items": len(self._items),
            "quick_items": len(quick),
            "cpu_seconds": round(sum(one.cpu for one in self._items.values())),
            "quick_cpu_seconds": round(sum(one.cpu for one in quick)),
            "folders": self._sums(
                lambda name: name.partition("::")[0].rpartition("/")[0], at_least=0
            ),
            "tests": self._sums(lambda name: name.partition("[")[0], at_least=SHOWN),
        }

    def _sums(self, group_of: Callable[[str], str], *, at_least: float) -> dict[str, list[float]]:
        """Number of items and seconds of CPU time, by group; the dearest first."""
        groups: dict[str, list[float]] = defaultdict(list)
        for name, one in self._items.items():
            groups[group_of(name)].append(one.cpu)
        dearest = sorted(groups.items(), key=lambda group: -sum(group[1]))
        return {
            name: [len(found), round(sum(found), 1)]
            for name, found in dearest
            if sum(found) >= at_least
        }


def _folder(name: str) -> str:
    return name.partition("::")[0].rpartition("/")[0]
