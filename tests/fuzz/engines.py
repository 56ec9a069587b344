"""Two ways to find inputs: Hypothesis draws them, atheris follows what the code does with them."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from guided_spec.grammar.spec import GrammarSpec
from tests.fuzz.examine import Examiner
from tests.fuzz.inputs import texts
from tests.fuzz.schemas import adversarial, of_metaschema, values
from tests.fuzz.stepping import check, keeps_nothing
from tests.fuzz.targets import TARGETS
from tests.fuzz.workloads import draw as draw_workload

NAMES = (*TARGETS, "validity", "workload")
HANG_SECONDS = 90.0
SLOW_SECONDS = 10.0  # of processor time here; workers have limits of their own
SLOW_WORKLOAD = 60.0  # likewise
_MOST_LARGE = 3  # each may start a worker anew
_BATCH = 200
_WORKLOADS = 3  # likewise: each takes seconds


class Finding(NamedTuple):
    """What went wrong: kind and place of an exception, and the shortest input found."""

    kind: str
    place: str
    message: str
    source: str


class Run(NamedTuple):
    """One hunt. folder: gets ``current.json``, the input being tried, and every finding."""

    target: str
    seconds: float
    seed: int
    folder: Path


def draw(run: Run) -> list[Finding]:
    """Hypothesis, for ``run.seconds``; goes on after a finding."""
    examiner = Examiner(_backends(run.target), _MOST_LARGE)
    findings: dict[str, Finding] = {}
    ends = time.monotonic() + run.seconds
    count = 0
    try:
        while time.monotonic() < ends:
            _draw_batch(run, examiner, findings, run.seed * 1_000_003 + count)
            count += 1
    finally:
        examiner.close()
    _save(run, findings)
    (run.folder / "counts.json").write_text(json.dumps(dict(examiner.counts), indent=1))
    return list(findings.values())


def _draw_batch(run: Run, examiner: Examiner, findings: dict[str, Finding], number: int) -> None:
    @seed(number)
    @settings(
        max_examples=_WORKLOADS if run.target == "workload" else _BATCH,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(_inputs(run.target), st.integers(0, 2**32))
    def try_one(given_input: tuple[str, list[Any]], dice: int) -> None:
        source, others = given_input
        _try(run, findings, source, lambda: _examine(run.target, examiner, source, others, dice))

    try_one()


def _inputs(target: str) -> st.SearchStrategy[tuple[str, list[Any]]]:
    if target == "workload":
        return st.tuples(st.integers(0, 2**32).map(str), st.just([]))
    if target == "validity":
        schemas = adversarial() | of_metaschema()
        return st.tuples(schemas.map(json.dumps), st.lists(values(), max_size=6))
    return st.tuples(texts(TARGETS[target]), st.just([]))


def _examine(target: str, examiner: Examiner, source: str, others: list[Any], dice: int) -> None:
    if target == "workload":
        with keeps_nothing():
            check(draw_workload(int(source)))
    elif target == "validity":
        examiner.spec(GrammarSpec.json_schema(source), dice, others)
    else:
        examiner.text(TARGETS[target], source, dice)


def _try(run: Run, findings: dict[str, Finding], source: str, examine: Callable[[], None]) -> None:
    (run.folder / "current.json").write_text(json.dumps(source))
    started = time.process_time()
    with _watched():
        try:
            examine()
        except Exception as error:
            finding = _finding(error, source)
        else:
            most = SLOW_WORKLOAD if run.target == "workload" else SLOW_SECONDS
            if time.process_time() - started < most:
                return
            finding = Finding("slow", "", f"{time.process_time() - started:.0f} s", source)
    key = f"{finding.kind} at {finding.place}"
    known = findings.get(key)
    if known is None or len(source) < len(known.source):
        findings[key] = finding
        _save(run, findings)


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """End the process, with a traceback, where one input holds it up; native code as well."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _finding(error: Exception, source: str) -> Finding:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "guided_spec" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the judge"
    return Finding(type(error).__name__, place, str(error)[:500], source)


def _save(run: Run, findings: dict[str, Finding]) -> None:
    text = json.dumps([finding._asdict() for finding in findings.values()], indent=1)
    (run.folder / "findings.json").write_text(text)


def follow_coverage(run: Run) -> None:
    """Atheris, for ``run.seconds``, after which it ends the process.

    The package must have been imported before this module, see ``tests.fuzz.__main__``. The folder
    also gets the corpus.
    """
    atheris: Any = importlib.import_module("atheris")
    examiner = Examiner(_backends(run.target))
    findings: dict[str, Finding] = {}
    corpus = run.folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for index, text in enumerate(TARGETS[run.target].seeds):
        (corpus / f"seed{index}").write_bytes(text.encode("utf-8", "surrogatepass"))
    words = run.folder / "words.dict"
    words.write_text("\n".join(map(_word, TARGETS[run.target].fragments)))

    def try_one(data: bytes) -> None:
        source = data.decode("utf-8", "replace")
        _try(run, findings, source, lambda: _examine(run.target, examiner, source, [], 0))

    options = [f"-max_total_time={int(run.seconds)}", f"-seed={run.seed + 1}", f"-dict={words}"]
    options += ["-handle_alrm=0", "-rss_limit_mb=6000", "-max_len=2000", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={run.folder}/", str(corpus)], try_one)
    atheris.Fuzz()


def _word(fragment: str) -> str:
    """One line of a libFuzzer dictionary."""
    data = fragment.encode("utf-8", "surrogatepass")
    return '"' + "".join(f"\\x{byte:02x}" for byte in data) + '"'


def _backends(target: str) -> tuple[str, ...]:
    """``auto`` chooses for schemas only; else it would do the same work once more."""
    both = ("xgrammar", "llguidance")
    return (*both, "auto") if target in ("schema", "validity") else both
