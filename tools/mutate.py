"""Plants faults in a copy of the checkout, and says which test finds each of them.

The faults are bugs that engines of this kind have had. They stand in ``tools/mutations``, a file
for each subsystem. A fault that no test finds breaks a promise that nothing guards. To run it:
``python -m tools.mutate [--tier named|quick|full] [--only NAME ...] [--write FILE] [-n WORKERS]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tools" / "mutations"
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "dist")
# The quick tier is what ``pytest`` runs by itself. Both draw the same examples in every run.
FULL = ("-m", "not gpu and not sweep", "--hypothesis-seed=0")
TIERS = ("named", "quick", "full")
NAMED_SECONDS = 600.0
TIER_SECONDS = 4 * 3600.0
BEGIN, END = "<!-- mutations: begin -->", "<!-- mutations: end -->"
FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
# Exit codes of pytest.
PASSED, FAILED, INTERRUPTED, NOTHING_RAN = 0, 1, 2, 5


class Fault(NamedTuple):
    """One planted bug.

    file: below the root of the checkout, in which ``old`` stands exactly once; ``new`` takes its
    place. promise: what it breaks, in a sentence for users. page: the page that makes the promise,
    "" where none does. tests: files or ids that are run first.
    """

    name: str
    subsystem: str
    file: str
    old: str
    new: str
    promise: str
    page: str
    tests: tuple[str, ...]

    def plant(self, source: str) -> str:
        """``source`` with the bug in it. Raises ValueError unless ``old`` stands there once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its old text stands {count} times in {self.file}")
        return source.replace(self.old, self.new)


class Stage(NamedTuple):
    """One run of pytest for a fault. is_full: with the slow tests. is_named: of its tests alone."""

    is_full: bool
    is_named: bool


class Verdict(NamedTuple):
    """What became of a fault.

    killed_by: the id of the test that failed, "timeout" where the tests did not end; "" where the
    fault survived. tier: "quick" or "full", the tier that the test belongs to; "" likewise.
    """

    fault: Fault
    killed_by: str
    tier: str


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """Every fault of the files in ``folder``; a file's name is the subsystem.

    Raises TypeError for a fault that lacks a field, or has one too many.
    """
    found = []
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            tests = tuple(row.pop("tests"))
            found.append(Fault(subsystem=path.stem, tests=tests, **{"page": "", **row}))
    return found


def choose(faults: Sequence[Fault], only: Iterable[str]) -> list[Fault]:
    """Those of these names or subsystems, or all. Raises ValueError for a name of neither."""
    wanted = set(only)
    unknown = wanted - {fault.name for fault in faults} - {fault.subsystem for fault in faults}
    if unknown:
        raise ValueError(f"no fault and no subsystem is named {', '.join(sorted(unknown))}")
    return [one for one in faults if not wanted or wanted & {one.name, one.subsystem}]


def copy_checkout(root: Path, folder: Path) -> Path:
    """Copy what tests read, to a new folder inside of ``folder``; returns the copy."""
    copy = folder / "checkout"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return copy


def environment(copy: Path) -> dict[str, str]:
    """The child's variables: what it and its own children import comes from the copy."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables["PYTHONPATH"] = str(copy)
    return variables


def require_own_package(copy: Path, package: str) -> None:
    """Raise RuntimeError where ``package`` would be imported from elsewhere than the copy."""
    code = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(
        command, cwd=copy, env=environment(copy), check=True, capture_output=True, text=True
    )
    if not Path(answer.stdout.strip()).is_relative_to(copy):
        raise RuntimeError(f"{package} would be imported from {answer.stdout.strip()}")


def run_tests(copy: Path, arguments: Sequence[str], seconds: float) -> str:
    """Run pytest in the copy up to the first failure.

    Returns the id of the test that failed, "timeout" where it took longer than ``seconds``, or ""
    where nothing failed. Raises RuntimeError where pytest could not run these tests.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", *arguments]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        # A session of its own: what the tests started ends with them.
        child = subprocess.Popen(
            [*command, "-p", "no:cacheprovider"],
            cwd=copy,
            env=environment(copy),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            _end_group(child)
        output.seek(0)
        text = output.read()
    if code in (PASSED, NOTHING_RAN):
        return ""
    failures = FAILURE.findall(text)
    if code not in (FAILED, INTERRUPTED) or not failures:
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with {code}:\n{text[-3000:]}")
    return str(failures[0])


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def stages(tier: str) -> list[Stage]:
    """The runs of a tier, which stop at the first failure: a fault's own tests are the fastest."""
    named = [Stage(is_full=False, is_named=True), Stage(is_full=True, is_named=True)]
    if tier == "named":
        return named
    quick = [named[0], Stage(is_full=False, is_named=False)]
    return quick if tier == "quick" else [*quick, named[1], Stage(is_full=True, is_named=False)]


def judge(copy: Path, fault: Fault, tier: str, seconds: float | None = None) -> Verdict:
    """Plant the fault in the copy, run its tests, and take it out again.

    tier: one of ``TIERS``. seconds: for each run of pytest; None: as long as such runs may take.

    Raises what ``Fault.plant`` and ``run_tests`` raise.
    """
    path = copy / fault.file
    source = path.read_text(encoding="utf-8")
    _write_source(path, fault.plant(source))
    try:
        for stage in stages(tier):
            marks = FULL if stage.is_full else ()
            tests = fault.tests if stage.is_named else ()
            limit = seconds or (NAMED_SECONDS if stage.is_named else TIER_SECONDS)
            if killed_by := run_tests(copy, [*marks, *tests], limit):
                return Verdict(fault, killed_by, "full" if stage.is_full else "quick")
    finally:
        _write_source(path, source)
    return Verdict(fault, "", "")


def _write_source(path: Path, source: str) -> None:
    path.write_text(source, encoding="utf-8")
    # Python goes by a file's size and second of change, which two faults may share.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def require_passing(copy: Path, faults: Sequence[Fault]) -> None:
    """Raise RuntimeError where a test that a fault names fails without any fault."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    if failed := run_tests(copy, [*FULL, *tests], TIER_SECONDS):
        raise RuntimeError(f"{failed} fails without a fault")


def judge_all(root: Path, faults: Sequence[Fault], tier: str, workers: int) -> list[Verdict]:
    """The verdict of each fault, in order; says each on standard output as it is known.

    workers: runs at once, each in a copy of ``root`` of its own.

    Raises what ``judge``, ``require_own_package`` and ``require_passing`` raise.
    """
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copies = SimpleQueue[Path]()
        for number in range(workers):
            copies.put(copy_checkout(root, Path(folder) / str(number)))
        first = copies.get()
        for package in sorted({Path(fault.file).parts[0] for fault in faults}):
            require_own_package(first, package)
        require_passing(first, faults)
        copies.put(first)

        def judge_one(fault: Fault) -> Verdict:
            copy = copies.get()
            try:
                verdict = judge(copy, fault, tier)
            finally:
                copies.put(copy)
            sys.stdout.write(f"{fault.subsystem}/{fault.name}: {verdict.killed_by or 'SURVIVED'}\n")
            sys.stdout.flush()
            return verdict

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(judge_one, faults))


def report(verdicts: Sequence[Verdict]) -> str:
    """How many are killed, in a sentence, and a Markdown table with a row for each fault."""
    quick = sum(verdict.tier == "quick" for verdict in verdicts)
    full = sum(bool(verdict.killed_by) for verdict in verdicts)
    total = len(verdicts)
    lines = [f"The quick tier kills {quick} of {total}, all tests that were run kill {full}.", ""]
    lines += ["| Fault | Subsystem | Promise that it breaks | Killed by | Tier |", "|---" * 5 + "|"]
    for fault, killed_by, tier in verdicts:
        promise = f"{fault.promise} ({fault.page})" if fault.page else fault.promise
        killer = f"`{killed_by}`" if killed_by else "**survives**"
        cells = (f"`{fault.name}`", fault.subsystem, promise, killer, tier or "none")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write_report(text: str, path: Path) -> None:
    """Write it between the two markers of the file, or as the whole file where it has none."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    if BEGIN in page and END in page:
        before, _, rest = page.partition(BEGIN)
        text = f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}"
    path.write_text(text, encoding="utf-8")


def as_json(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a JSON list of objects, the fields of each fault among theirs."""
    rows = [
        {**fault._asdict(), "killed_by": killed_by, "tier": tier}
        for fault, killed_by, tier in verdicts
    ]
    return json.dumps(rows, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if a fault survived."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    tier = "the named tests of each fault alone, or those of this tier behind them (quick)"
    parser.add_argument("--tier", choices=TIERS, default="quick", help=tier)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME|SUBSYSTEM")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the table, in Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the verdicts, for programs")
    parser.add_argument("-n", type=int, default=1, metavar="WORKERS", help="runs at once (1)")
    given = parser.parse_args(arguments)
    verdicts = judge_all(ROOT, choose(read_faults(), given.only), given.tier, given.n)
    text = report(verdicts)
    sys.stdout.write(f"\n{text}")
    if given.write is not None:
        write_report(text, given.write)
    if given.json is not None:
        given.json.write_text(as_json(verdicts), encoding="utf-8")
    return int(any(not verdict.killed_by for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
