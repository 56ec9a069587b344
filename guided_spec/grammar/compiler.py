"""Compiles grammars in the background, so that a slow one holds up its own requests only."""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from guided_spec.errors import GrammarError
from guided_spec.grammar.document import is_large
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["GrammarCompileQueue"]

_LOG = logging.getLogger(__name__)

_SMALLEST_BYTES = 4096  # what an entry costs whose size is not known, or a failure
_Waiting = queue.SimpleQueue[GrammarSpec | None]


class GrammarCompileQueue:
    """A pool of compiling threads with a memory of what they compiled; thread-safe.

    max_workers: compiles that may run at once; further ones wait for a free worker. Grammars that
        are large at sight have as many workers of their own, so that small ones never wait for
        them.
    cache_size: finished grammars, and failures, that are remembered; the least recently asked for
        goes first.
    cache_bytes: what they may take together.
    size_of_more: bytes that hang on a grammar beside itself, and may grow while it is used.

    The threads are daemons: a native compile cannot be interrupted, and must not hold up the end
    of the process.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        *,
        max_workers: int = 2,
        cache_size: int = 256,
        cache_bytes: int = 2**30,
        size_of_more: Callable[[CompiledGrammar], int] = lambda grammar: 0,  # noqa: ARG005
    ) -> None:
        self._backend = backend
        self._cache_size = cache_size
        self._cache_bytes = cache_bytes
        self._size_of_more = size_of_more
        self._lock = threading.Lock()
        self._futures: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._sizes: dict[GrammarSpec, int] = {}  # of the finished ones, without what hangs on them
        self._waiting: _Waiting = queue.SimpleQueue()
        self._large: _Waiting = queue.SimpleQueue()
        self._workers = [
            threading.Thread(
                target=self._work, args=(source,), name=f"grammar-compile-{name}-{i}", daemon=True
            )
            for source, name in ((self._waiting, "small"), (self._large, "large"))
            for i in range(max_workers)
        ]
        self._closed = False
        for worker in self._workers:
            worker.start()

    @property
    def cache_bytes(self) -> int:
        """What the finished grammars that are remembered may take together."""
        return self._cache_bytes

    @property
    def cached_bytes(self) -> int:
        """What they take."""
        with self._lock:
            return sum(self._sizes_now().values())

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The future of ``spec``'s grammar; never blocks.

        Equal specs share one future while it is unfinished or successful, so it is not to be
        cancelled. A failure is remembered too. Raises GrammarError once the queue is closed.
        """
        if spec.value_type is not None:  # else it would be kept, and sent to a process
            spec = replace(spec, value_type=None)
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
        """Cancel what has not begun and let the workers end; does not wait for them.

        Closes the backend too, if it has a ``close``.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for future in self._futures.values():
                future.cancel()  # a running or finished one stays as it is
        for _ in self._workers:
            self._waiting.put(None)
            self._large.put(None)
        close = getattr(self._backend, "close", None)
        if close is not None:
            close()

    def _forget_old(self) -> None:
        """Called with the lock held."""
        sizes = self._sizes_now()
        excess = len(self._futures) - self._cache_size
        excess_bytes = sum(sizes.values()) - self._cache_bytes
        if excess <= 0 and excess_bytes <= 0:
            return
        for spec in [spec for spec, future in self._futures.items() if future.done()]:
            if excess <= 0 and excess_bytes <= 0:
                break
            _LOG.info("forgot a %s of %d bytes", spec.kind, sizes.get(spec, 0))
            del self._futures[spec]
            self._sizes.pop(spec, None)
            excess -= 1
            excess_bytes -= sizes.get(spec, 0)

    def _sizes_now(self) -> dict[GrammarSpec, int]:
        """Called with the lock held."""
        sizes = dict(self._sizes)
        for spec, future in self._futures.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                sizes[spec] += self._size_of_more(future.result())
        return sizes

    def _work(self, waiting: _Waiting) -> None:
        while (spec := waiting.get()) is not None:
            if waiting is self._waiting and _seems_large(spec):
                self._large.put(spec)
            else:
                self._compile(spec)

    def _compile(self, spec: GrammarSpec) -> None:
        with self._lock:
            future = self._futures.get(spec)
            begun = (
                future is not None
                and not future.done()
                and not future.running()
                and future.set_running_or_notify_cancel()
            )
        if future is None or not begun:
            return
        began = time.perf_counter()
        try:
            grammar = self._backend.compile(spec)
            size = _size_of(grammar)
        except BaseException as error:  # whatever happened belongs to those who wait for it
            _LOG.info("a %s of %d characters is refused: %s", spec.kind, len(spec.source), error)
            self._weigh(spec, future, _SMALLEST_BYTES)
            future.set_exception(error)
        else:
            seconds = time.perf_counter() - began
            _LOG.info("compiled a %s in %.3f s: %d bytes", spec.kind, seconds, size)
            self._weigh(spec, future, size)
            future.set_result(grammar)
        with self._lock:
            self._forget_old()

    def _weigh(self, spec: GrammarSpec, future: Future[CompiledGrammar], size: int) -> None:
        with self._lock:
            if self._futures.get(spec) is future:
                self._sizes[spec] = size + len(spec.source)


def _seems_large(spec: GrammarSpec) -> bool:
    try:
        return is_large(spec)
    except Exception:  # whatever is wrong is reported by the compile, to those who wait
        return True


def _size_of(grammar: Any) -> int:
    """Bytes of a compiled grammar, of the grammar inside it, and of its style."""
    own = getattr(grammar, "memory_size_bytes", None)
    if isinstance(own, int):
        return own
    parts = (getattr(grammar, name, None) for name in ("inner", "compiled", "style"))
    return _SMALLEST_BYTES + sum(_size_of(part) for part in parts if part is not None)


def _own_failure(future: Future[CompiledGrammar]) -> Future[CompiledGrammar]:
    """A failed future gets a copy of its error: each raise of one object grows its traceback."""
    error = future.exception() if future.done() and not future.cancelled() else None
    if error is None:
        return future
    own: Future[CompiledGrammar] = Future()
    own.set_exception(copy.copy(error).with_traceback(None))
    return own
