from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from guided_spec.errors import (
    GrammarCompileError,
    GrammarError,
    GrammarWorkerError,
    UnsupportedSchemaError,
)
from guided_spec.grammar import isolation
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarCompileQueue, GrammarPipeline
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.markers import AfterGrammar
from tests.grammar.completion.spelled import MARKERS, SPELLED
from tests.grammar.hostile import NO_VOCABULARY, HostileBackend, large
from tests.masks.walks import BYTES, accepts
from tests.processes import in_fork

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")

Found = TypeVar("Found")
WAIT = 60
SHORT = GrammarLimits(compile_seconds=1.5, compile_bytes=2**28)
PATIENT = GrammarLimits(compile_seconds=WAIT, compile_bytes=2**28)
SMALL = GrammarSpec.regex("small")


@pytest.fixture(name="inner")
def _inner() -> HostileBackend:
    return HostileBackend(NO_VOCABULARY)


@pytest.fixture(name="isolated")
def _isolated(inner: HostileBackend) -> Iterator[GrammarPipeline]:
    backend = GrammarPipeline(inner, SHORT)
    yield backend
    backend.close()


def pids(backend: GrammarPipeline) -> set[int]:
    return backend._workers.pids


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_small_grammars_start_no_worker(isolated: GrammarPipeline, inner: HostileBackend) -> None:
    isolated.compile(SMALL)
    assert inner.compiled == ["small"]
    assert not pids(isolated)


@pytest.mark.slow
def test_a_fork_ends_no_worker(inner: HostileBackend) -> None:
    """Neither by closing it nor by letting go of it."""
    held = [GrammarPipeline(inner, PATIENT)]
    held[0].compile(large("fine"))
    (pid,) = pids(held[0])
    in_fork(held[0].close)

    def let_go() -> None:
        held.clear()
        gc.collect()

    in_fork(let_go)
    with closing(held[0]) as isolated:
        isolated.compile(large("fine"))
        assert pids(isolated) == {pid}
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "disasters"),
    [
        (SHORT, {"hang": "compile_seconds=1.5", "spin": "compile_seconds=1.5"}),
        # These end by themselves, but on a busy machine not within seconds.
        (PATIENT, {"swell": "compile_bytes", "exit": "exit status 3", "crash": "exit status -11"}),
    ],
)
def test_each_disaster_is_an_error_of_its_own_request(
    inner: HostileBackend, limits: GrammarLimits, disasters: dict[str, str]
) -> None:
    with closing(GrammarPipeline(inner, limits)) as isolated:
        isolated.compile(large("fine"))
        first = pids(isolated)
        assert len(first) == 1
        for what, kind, reason in (
            ("refuse", UnsupportedSchemaError, "not that"),
            ("fault", GrammarCompileError, "KeyError"),
        ):
            with pytest.raises(kind, match=reason):
                isolated.compile(large(what))
            assert pids(isolated) == first  # an error ends no worker
        for what, reason in disasters.items():
            before = pids(isolated)
            start = time.monotonic()
            with pytest.raises(GrammarCompileError, match=reason):
                isolated.compile(large(what))
            assert time.monotonic() - start < WAIT
            assert not any(map(is_alive, before))
            assert not pids(isolated)
            isolated.compile(SMALL)
            isolated.compile(large("fine"))
    assert set(inner.compiled) == {"fine", "small"}


@pytest.mark.slow
def test_workers_are_ended_by_close_and_with_the_backend() -> None:
    backend = GrammarPipeline(HostileBackend(NO_VOCABULARY), SHORT)
    backend.compile(large("fine"))
    (pid,) = pids(backend)
    backend.close()
    backend.close()
    assert not is_alive(pid)
    backend.compile(SMALL)
    with pytest.raises(GrammarCompileError, match="closed"):
        backend.compile(large("fine"))

    backend = GrammarPipeline(HostileBackend(NO_VOCABULARY), SHORT)
    backend.compile(large("fine"))
    (pid,) = pids(backend)
    del backend
    gc.collect()
    assert not is_alive(pid)


def test_the_queue_keeps_small_grammars_ahead_and_closes_the_workers() -> None:
    limits = GrammarLimits(compile_seconds=WAIT)
    isolated = GrammarPipeline(HostileBackend(NO_VOCABULARY), limits)
    compiling = GrammarCompileQueue(isolated, max_workers=1, close_backend=isolated.close)
    hanging = [compiling.submit(large("hang")), compiling.submit(large("fine"))]
    compiling.submit(SMALL).result(WAIT)
    assert not any(future.done() for future in hanging)
    while not pids(isolated):
        time.sleep(0.01)
    (pid,) = pids(isolated)
    compiling.close()
    with pytest.raises(GrammarError):
        hanging[0].result(WAIT)
    assert hanging[1].cancelled()
    assert not is_alive(pid)


@pytest.mark.slow
def test_several_threads_share_the_workers(isolated: GrammarPipeline) -> None:
    barrier = threading.Barrier(2)

    def compile_after(spec: GrammarSpec) -> object:
        barrier.wait(WAIT)
        return isolated.compile(spec)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(compile_after, [large("fine"), large("other")]))
    assert 1 <= len(pids(isolated)) <= 2


@pytest.mark.slow
def test_a_worker_that_does_not_start_is_reported() -> None:
    backend = GrammarPipeline(HostileBackend(NO_VOCABULARY), SHORT, make=os._exit)
    with pytest.raises(GrammarWorkerError, match="does not start"):
        backend.compile(large("fine"))
    assert not pids(backend)


@pytest.mark.slow
def test_a_worker_that_was_killed_is_no_fault_of_the_grammar_s(
    inner: HostileBackend, tmp_path: Path
) -> None:
    """Killed while idle, and once while at work: another worker compiles it."""
    flag = tmp_path / "perish"
    with closing(GrammarPipeline(inner, PATIENT)) as isolated:
        isolated.compile(large("fine"))
        (first,) = pids(isolated)
        os.kill(first, signal.SIGKILL)
        wait_for_end(first)
        flag.touch()
        isolated.compile(large(str(flag)))
        assert first not in pids(isolated)
        assert not flag.exists()


def wait_for_end(pid: int) -> None:
    """Until it is a zombie, which its parent has not noticed yet."""
    for _ in range(1000):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z"):
            return
        time.sleep(0.01)


@pytest.mark.slow
def test_what_workers_are_killed_over_may_be_sent_again(inner: HostileBackend) -> None:
    isolated = GrammarPipeline(inner, PATIENT)
    compiling = GrammarCompileQueue(isolated, close_backend=isolated.close)
    for _ in range(2):
        with pytest.raises(GrammarWorkerError, match="exit status -9; the machine may be out of"):
            compiling.submit(large("perish")).result(WAIT)
        while compiling.cached_bytes:
            time.sleep(0.01)
    compiling.close()


def test_without_file_descriptors_a_grammar_may_be_sent_again(
    monkeypatch: pytest.MonkeyPatch, inner: HostileBackend
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with closing(GrammarPipeline(inner, PATIENT)) as isolated, monkeypatch.context() as patch:
        patch.setattr(isolation, "start_interpreter", refuse)
        compiling = GrammarCompileQueue(isolated)
        with pytest.raises(GrammarWorkerError, match="Too many open files; try again"):
            compiling.submit(large("fine")).result(WAIT)
        while compiling.cached_bytes:
            time.sleep(0.01)
        patch.undo()
        compiling.submit(large("fine")).result(WAIT)
        compiling.close()


def test_with_xgrammar() -> None:
    backend = GrammarPipeline(XGrammarBackend(BYTES, compile_threads=1), GrammarLimits())
    grammar = backend.compile(GrammarSpec.json_schema({"type": "string", "maxLength": 300}))
    assert pids(backend)
    assert accepts(grammar, '"abc"')
    assert not accepts(grammar, f'"{"x" * 301}"')
    with pytest.raises(UnsupportedSchemaError, match="not"):
        backend.compile(GrammarSpec.json_schema({"not": {"pattern": "a{300}"}}))
    backend.close()


@pytest.mark.slow
def test_a_marker_is_dropped_nowhere() -> None:
    """Without markers a spec with a start is refused, also where a worker compiles it."""
    with closing(GrammarPipeline(XGrammarBackend(SPELLED), GrammarLimits())) as pipeline:
        for source in ("[abc]+", "[abc]{1,300}"):
            with pytest.raises(GrammarCompileError, match="has a start"):
                pipeline.compile(GrammarSpec.regex(source).after("cab"))


@pytest.mark.slow
def test_a_constraint_behind_a_marker_is_tried_out_without_it() -> None:
    backend = GrammarPipeline(XGrammarBackend(SPELLED), GrammarLimits(), markers=MARKERS)
    with closing(backend):
        grammar = backend.compile(GrammarSpec.regex("[abc]{1,300}").after("cab"))
        assert isinstance(grammar, AfterGrammar)
        assert pids(backend)
        with pytest.raises(GrammarCompileError, match="lookahead"):
            backend.compile(GrammarSpec.regex("(?=[ab]{300})").after("cab"))


def test_a_file_of_the_folder_hides_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    started = isolation.start_interpreter("import queue; queue.Queue")
    with started.connection:
        assert started.process.wait() == 0
