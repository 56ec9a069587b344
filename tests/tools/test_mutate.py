"""The mutation net: its faults can be planted, and the tool tells killed ones from survivors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tools.mutate import (
    BEGIN,
    END,
    ROOT,
    Fault,
    Verdict,
    as_json,
    choose,
    copy_checkout,
    judge,
    judge_all,
    read_faults,
    report,
    require_own_package,
    require_passing,
    stages,
    write_report,
)

FAULTS = read_faults()
SUBSYSTEMS = ("completion", "engine", "grammar", "law", "masks", "server")
TEST = """
from toy.sums import double


def test_double():
    assert double(2) == 4
"""


def toy_fault(new: str, tests: tuple[str, ...] = ("tests/test_sums.py",)) -> Fault:
    old = "return value + value"
    return Fault("wrong", "law", "toy/sums.py", old, new, "Sums are right.", "", tests)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two lines, and one test. What it is run with starts with one plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin")  # for its seed
    root = tmp_path / "toy root"
    for name, text in (
        ("toy/__init__.py", ""),
        ("toy/sums.py", "def double(value):\n    return value + value\n"),
        ("tests/test_sums.py", TEST),
        (".git/HEAD", "ref"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        planted = fault.plant(source)
        assert planted != source, fault.name
        compile(planted, fault.file, "exec")


def test_every_fault_names_tests_and_a_page_that_are_there() -> None:
    for fault in FAULTS:
        assert fault.tests, fault.name
        for test in fault.tests:
            path, _, name = test.partition("::")
            source = (ROOT / path).read_text(encoding="utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in source, fault.name
        assert fault.promise.endswith("."), fault.name
        assert (ROOT / fault.page).is_file(), fault.name


def test_names_are_unique_and_each_subsystem_has_ten_or_more() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    counts = Counter(fault.subsystem for fault in FAULTS)
    assert sorted(counts) == sorted(SUBSYSTEMS)
    assert min(counts.values()) >= 10
    assert not {fault.name for fault in FAULTS} & counts.keys()


def test_faults_are_chosen_by_name_or_subsystem() -> None:
    first = FAULTS[0]
    assert choose(FAULTS, []) == FAULTS
    assert choose(FAULTS, [first.name]) == [first]
    assert {fault.subsystem for fault in choose(FAULTS, ["law"])} == {"law"}
    with pytest.raises(ValueError, match="named nothing"):
        choose(FAULTS, ["law", "nothing"])


@pytest.mark.every_case
@pytest.mark.parametrize("source", ["", "return value + value\n" * 2])
def test_a_fault_that_has_no_one_place_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="stands"):
        toy_fault("return 3").plant(source)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("new", "killed_by", "tier"),
    [
        ("return value * 3", "tests/test_sums.py::test_double", "quick"),
        ("return value * 2", "", ""),
        ("from toy import nothing", "tests/test_sums.py::test_double", "quick"),
        ("while True: pass", "timeout", "quick"),
    ],
)
def test_killed_and_survived(
    toy: Path, tmp_path: Path, new: str, killed_by: str, tier: str
) -> None:
    copy = copy_checkout(toy, tmp_path / "copy")
    seconds = 1.0 if killed_by == "timeout" else 60.0
    fault = toy_fault(new)
    assert judge(copy, fault, "named", seconds) == Verdict(fault, killed_by, tier)
    source = (toy / fault.file).read_text(encoding="utf-8")
    assert (copy / fault.file).read_text(encoding="utf-8") == source


def test_two_faults_in_one_second_are_two(toy: Path, tmp_path: Path) -> None:
    """Of one size, so that nothing but the cache of compiled modules could mix them up."""
    copy = copy_checkout(toy, tmp_path / "copy")
    verdicts = [judge(copy, toy_fault(f"return value * {by}"), "named") for by in (3, 2)]
    assert [bool(verdict.killed_by) for verdict in verdicts] == [True, False]


def test_all_are_judged_in_copies(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [toy_fault("return value * 3"), toy_fault("return value * 4")]
    verdicts = judge_all(toy, faults, "quick", 2)
    assert verdicts == [
        Verdict(fault, "tests/test_sums.py::test_double", "quick") for fault in faults
    ]
    assert capsys.readouterr().out == "law/wrong: tests/test_sums.py::test_double\n" * 2
    assert not list(toy.rglob("*.pyc"))


def test_a_test_that_fails_without_a_fault_says_nothing(toy: Path) -> None:
    (toy / "tests/test_sums.py").write_text(TEST.replace("4", "5"), encoding="utf-8")
    with pytest.raises(RuntimeError, match="test_double fails without a fault"):
        require_passing(toy, [toy_fault("return 3")])


def test_tests_that_are_not_there_are_an_error(toy: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 4"):
        judge(toy, toy_fault("return 3", ("tests/test_nothing.py",)), "named")


def test_the_copy_is_what_is_imported(toy: Path, tmp_path: Path) -> None:
    copy = copy_checkout(toy, tmp_path / "copy")
    assert not (copy / ".git").exists()
    require_own_package(copy, "toy")
    with pytest.raises(RuntimeError, match="json would be imported from"):
        require_own_package(copy, "json")


def test_what_a_tier_runs_in_its_order() -> None:
    assert [(one.is_full, one.is_named) for one in stages("full")] == [
        (False, True),
        (False, False),
        (True, True),
        (True, False),
    ]
    assert stages("quick") == stages("full")[:2]
    assert all(one.is_named for one in stages("named"))


def test_the_report(tmp_path: Path) -> None:
    fault = toy_fault("return a | b")
    killed = Verdict(fault._replace(page="docs/api.md"), "tests/a.py::test_b[c|d]", "quick")
    slowly = Verdict(fault, "timeout", "full")
    text = report([killed, slowly, Verdict(fault, "", "")])
    assert text.startswith("The quick tier kills 1 of 3, all tests that were run kill 2.\n")
    assert r"Sums are right. (docs/api.md) | `tests/a.py::test_b[c\|d]` | quick |" in text
    assert "| **survives** | none |" in text
    page = tmp_path / "page.md"
    write_report(text, page)
    assert page.read_text(encoding="utf-8") == text
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nEnd.\n", encoding="utf-8")
    write_report(text, page)
    assert page.read_text(encoding="utf-8") == f"# Title\n\n{BEGIN}\n{text}{END}\n\nEnd.\n"
    rows = json.loads(as_json([killed, slowly]))
    assert [(row["name"], row["killed_by"]) for row in rows] == [
        ("wrong", "tests/a.py::test_b[c|d]"),
        ("wrong", "timeout"),
    ]
