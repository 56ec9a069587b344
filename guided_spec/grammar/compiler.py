"""Compiles grammars in the background, so that a slow one holds up its own requests only."""

from __future__ import annotations

import copy
import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future

from guided_spec.errors import GrammarError
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["GrammarCompileQueue"]


class GrammarCompileQueue:
    """A pool of compiling threads with a memory of what they compiled; thread-safe.

    max_workers: compiles that may run at once; further ones wait for a free worker.
    cache_size: finished grammars, and failures, that are remembered; the least recently asked for
        goes first.

    The threads are daemons: a native compile cannot be interrupted, and must not hold up the end
    of the process.
    """

    def __init__(
        self, backend: GrammarBackend, *, max_workers: int = 2, cache_size: int = 256
    ) -> None:
        self._backend = backend
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._futures: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._waiting: queue.SimpleQueue[GrammarSpec | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._work, name=f"grammar-compile-{i}", daemon=True)
            for i in range(max_workers)
        ]
        self._closed = False
        for worker in self._workers:
            worker.start()

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The future of ``spec``'s grammar; never blocks.

        Equal specs share one future while it is unfinished or successful, so it is not to be
        cancelled. A failure is remembered too. Raises GrammarError once the queue is closed.
        """
        with self._lock:
            if self._closed:
                raise GrammarError("the compile queue is closed; make a new one")
            future = self._futures.get(spec)
            if future is None or future.cancelled():
                future = Future()
                self._futures[spec] = future
                self._waiting.put(spec)
            self._futures.move_to_end(spec)
            self._forget_old()
        return _own_failure(future)

    def close(self) -> None:
        """Cancel what has not begun and let the workers end; does not wait for them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for future in self._futures.values():
                future.cancel()  # a running or finished one stays as it is
        for _ in self._workers:
            self._waiting.put(None)

    def _forget_old(self) -> None:
        excess = len(self._futures) - self._cache_size
        if excess > 0:
            finished = [spec for spec, future in self._futures.items() if future.done()]
            for spec in finished[:excess]:
                del self._futures[spec]

    def _work(self) -> None:
        while (spec := self._waiting.get()) is not None:
            with self._lock:
                future = self._futures.get(spec)
                begun = (
                    future is not None
                    and not future.done()
                    and not future.running()
                    and future.set_running_or_notify_cancel()
                )
            if future is None or not begun:
                continue
            try:
                grammar = self._backend.compile(spec)
            except BaseException as error:  # whatever happened belongs to those who wait for it
                future.set_exception(error)
            else:
                future.set_result(grammar)


def _own_failure(future: Future[CompiledGrammar]) -> Future[CompiledGrammar]:
    """A failed future gets a copy of its error: each raise of one object grows its traceback."""
    error = future.exception() if future.done() and not future.cancelled() else None
    if error is None:
        return future
    own: Future[CompiledGrammar] = Future()
    own.set_exception(copy.copy(error).with_traceback(None))
    return own
