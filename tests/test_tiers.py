"""Which tests the quick tier runs, and what a run says of their durations."""

from __future__ import annotations

import json

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from tests import durations
from tests.conftest import pytest_addoption, pytest_runtest_call
from tests.conftest import pytest_runtest_makereport, pytest_runtest_setup
from tests.tiers import leave_to_the_full_tier

durations.LONGEST_QUICK = 0.2

def pytest_configure(config):
    path = config.getoption("--write-durations")
    for mark in ("slow", "gpu", "sweep", "every_case"):
        config.addinivalue_line("markers", mark)
    if path is not None:
        config.pluginmanager.register(durations.DurationsWriter(path, ["all"]))

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    leave_to_the_full_tier(items)
"""
CASES = """
import pytest

@pytest.mark.parametrize("b", ["x", "y", "z"])
@pytest.mark.parametrize("a", [1, 2])
def test_a_product(a, b): pass

@pytest.mark.every_case
@pytest.mark.parametrize("a", [1, 2, 3])
def test_promises(a): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_some_are_slow(a): pass

def test_alone(): pass
"""
BUSY = """
import pytest, time

def work():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass

def test_quick(): pass
def test_idle(): time.sleep(0.3)
def test_busy(): work()

@pytest.mark.slow
def test_slow(): work()
"""


def names_of(result: pytest.RunResult) -> list[str]:
    lines = (line.partition("::")[2] for line in result.outlines if "PASSED" in line)
    return sorted(line.split()[0] for line in lines)


def test_two_cases_of_a_test_are_quick(pytester: pytest.Pytester) -> None:
    """Those that share no value; and all of them where each is a promise."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(CASES)
    arguments = ("-v", "-n0", "-p", "no:cacheprovider")
    quick = names_of(pytester.runpytest_inprocess(*arguments, "-m", "not slow"))
    assert quick == [
        "test_a_product[1-x]",
        "test_a_product[2-z]",
        "test_alone",
        *(f"test_promises[{a}]" for a in (1, 2, 3)),
        *(f"test_some_are_slow[{a}]" for a in (1, 3)),
    ]
    assert len(names_of(pytester.runpytest_inprocess(*arguments))) == 6 + 3 + 3 + 1


def test_a_quick_test_that_takes_long_fails_the_run(pytester: pytest.Pytester) -> None:
    """By its own work: a test that waits is no burden to others."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_times=BUSY)
    path = pytester.path / "durations.json"
    result = pytester.runpytest_inprocess("-n0", "--write-durations", path)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines("test_times.py::test_busy: 0.* s of CPU time; make it shorter *")
    result.stdout.no_fnmatch_line("test_times.py::test_slow: *")
    found = json.loads(path.read_text())
    assert (found["items"], found["quick_items"], found["command"]) == (4, 3, "pytest all")
    assert found["folders"] == {"": [4, found["folders"][""][1]]}
    assert 0.6 <= found["folders"][""][1] < 2
