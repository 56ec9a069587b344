"""What nobody waits for ends: compiles that have not begun, and workers that are at it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing

import pytest

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.demand import AbandonedError, Demand
from guided_spec.grammar.document import DocumentCompiler, SpecDocument
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarCompileQueue, GrammarPipeline, PendingGrammar
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import StepsSpentError
from guided_spec.types import SamplingParams
from tests.grammar.hostile import NO_VOCABULARY, Compiled, HostileBackend, large
from tests.tiny_llm import make_llm

WAIT = 20


class Backend(DocumentCompiler[CompiledGrammar]):
    """Compiles "slow" once ``gate`` is set; "dear" is found to be so at first."""

    def __init__(self) -> None:
        self.vocabulary = NO_VOCABULARY
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.calls = Counter[str]()

    def compile_document(self, document: SpecDocument) -> CompiledGrammar:
        source = document.spec.source
        self.calls[source] += 1
        if source == "dear" and self.calls[source] == 1:
            raise StepsSpentError(1)
        if source in ("slow", "dear"):
            self.begun.set()
            assert self.gate.wait(WAIT)
        return Compiled()


def spec(source: str) -> GrammarSpec:
    return GrammarSpec.regex(source)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def busy(backend: Backend) -> tuple[GrammarCompileQueue, Future[CompiledGrammar]]:
    """A queue whose only thread for small grammars is at work."""
    queue = GrammarCompileQueue(backend, max_workers=1)
    future = queue.submit(spec("slow"))
    assert backend.begun.wait(WAIT)
    return queue, future


def test_a_compile_that_nobody_waits_for_does_not_begin() -> None:
    backend = Backend()
    queue, slow = busy(backend)
    with closing(queue):
        released, dropped, kept = (queue.ask(spec(name)) for name in ("a", "b", "c"))
        shared = [released.share(), queue.ask(spec("c"))]
        library = queue.submit(spec("d"))
        also = queue.ask(spec("d"))
        for one in (released, *shared, also, also):
            one.release()
        del dropped
        gc.collect()
        backend.gate.set()
        slow.result(WAIT)
        kept.future.result(WAIT)
        library.result(WAIT)
    assert backend.calls == {"slow": 1, "c": 1, "d": 1}
    assert released.future.cancelled()


def test_who_asks_again_gets_it() -> None:
    backend = Backend()
    queue, slow = busy(backend)
    with closing(queue):
        queue.ask(spec("a")).release()
        again = queue.ask(spec("a"))
        backend.gate.set()
        slow.result(WAIT)
        again.future.result(WAIT)
        again.release()
        assert queue.ask(spec("a")).future is again.future  # what is finished is remembered
    assert backend.calls["a"] == 1


def test_a_compile_that_has_begun_here_is_kept() -> None:
    backend = Backend()
    with closing(GrammarCompileQueue(backend, max_workers=1)) as queue:
        pending = queue.ask(spec("slow"))
        assert backend.begun.wait(WAIT)
        pending.release()
        again = queue.ask(spec("slow"))
        backend.gate.set()
        again.future.result(WAIT)
    assert backend.calls["slow"] == 1


def test_what_turns_out_to_be_dear_leaves_the_threads_of_small_ones() -> None:
    backend = Backend()
    with closing(GrammarCompileQueue(backend, max_workers=1)) as queue:
        dear = queue.ask(spec("dear"))
        assert backend.begun.wait(WAIT)
        queue.submit(spec("small")).result(WAIT)
        assert not dear.future.done()
        backend.gate.set()
        dear.future.result(WAIT)
    assert backend.calls == {"dear": 2, "small": 1}


def test_the_last_one_that_leaves_ends_the_work() -> None:
    demand, ended = Demand(), list[int]()
    assert demand.join()
    assert demand.join()

    def work() -> None:
        demand.leave()
        assert not ended
        demand.leave()
        raise OSError("its pipe is broken")

    with pytest.raises(AbandonedError) as caught, demand.ended_by(lambda: ended.append(1)):
        work()
    assert isinstance(caught.value.__cause__, OSError)
    assert ended == [1]
    assert demand.is_over
    assert not demand.join()


def test_work_that_is_over_is_not_ended() -> None:
    demand, ended = Demand(), list[int]()
    demand.join()
    with pytest.raises(KeyError), demand.ended_by(lambda: ended.append(1)):
        raise KeyError
    demand.leave()
    assert not ended
    with pytest.raises(AbandonedError), demand.ended_by(lambda: ended.append(1)):
        pytest.fail("nobody waits")


def test_a_request_that_ends_lets_go_of_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[PendingGrammar] = []
    ask = GrammarCompileQueue.ask

    def remember(queue: GrammarCompileQueue, wanted: GrammarSpec) -> PendingGrammar:
        asked.append(ask(queue, wanted))
        return asked[-1]

    released: list[PendingGrammar] = []
    monkeypatch.setattr(GrammarCompileQueue, "ask", remember)
    monkeypatch.setattr(PendingGrammar, "release", lambda pending: released.append(pending))
    with make_llm("llama") as llm:
        params = SamplingParams(grammar=spec("[ab]{3}"), n=2)
        llm.generate(["A"], params)
    assert len(asked) == 2
    assert released == asked


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_an_abandoned_worker_is_killed_and_its_thread_is_free() -> None:
    limits = GrammarLimits(compile_seconds=10 * WAIT)
    pipeline = GrammarPipeline(HostileBackend(NO_VOCABULARY), limits)
    queue = GrammarCompileQueue(pipeline, max_workers=1, close_backend=pipeline.close)
    with closing(queue):
        queue.submit(large("fine")).result(WAIT)
        (pid,) = pipeline._workers.pids
        pending = [queue.ask(large("hang")) for _ in range(2)]
        until(pending[0].future.running)
        pending[0].release()
        time.sleep(0.2)
        os.kill(pid, 0)  # one of them still waits
        del pending[1]
        queue.submit(large("other")).result(WAIT)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(AbandonedError):
            pending[0].future.result(WAIT)
        with pytest.raises(GrammarCompileError):  # it is tried again for others
            queue.submit(large("exit")).result(WAIT)
