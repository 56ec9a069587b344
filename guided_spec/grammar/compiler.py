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
from dataclasses import dataclass, replace

from guided_spec.errors import GrammarError
from guided_spec.grammar.document import SpecDocument, as_document_compiler
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["GrammarCompileQueue"]

_LOG = logging.getLogger(__name__)

_OWN_BYTES = 4096  # what an entry costs beside its source and its grammar


@dataclass(eq=False)
class _Entry:
    """A spec, its grammar to come, and the bytes of that, without what hangs on it.

    document: the spec as it is read; None once that is over.
    """

    spec: GrammarSpec
    future: Future[CompiledGrammar]
    document: SpecDocument | None
    size: int = 0


_Waiting = queue.SimpleQueue[_Entry | None]


class GrammarCompileQueue:
    """A pool of compiling threads with a memory of what they compiled; thread-safe.

    max_workers: compiles that may run at once; further ones wait for a free worker. Grammars that
        are large at sight have as many workers of their own, so that small ones never wait for
        them.
    cache_size: finished grammars, and failures, that are remembered; the least recently asked for
        goes first.
    cache_bytes: what they may take together.
    size_of_more: bytes that hang on a grammar beside itself, and may grow while it is used.
    close_backend: what ends with the queue.

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
        close_backend: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = as_document_compiler(backend)
        self._close_backend = close_backend
        self._cache_size = cache_size
        self.cache_bytes = cache_bytes
        self._size_of_more = size_of_more
        self._lock = threading.Lock()
        # In the order of use. No LRUCache: what compiles must stay, and sizes grow in it.
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
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
    def cached_bytes(self) -> int:
        """What the finished grammars that are remembered take together."""
        with self._lock:
            return sum(map(self._bytes_of, self._entries.values()))

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
            entry = self._entries.get(spec)
            if entry is None or entry.future.cancelled():
                entry = self._entries[spec] = _Entry(spec, Future(), SpecDocument(spec))
                self._waiting.put(entry)
            self._entries.move_to_end(spec)
            self._forget_old()
        return _own_failure(entry.future)

    def close(self) -> None:
        """Cancel what has not begun and let the workers end; does not wait for them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for entry in self._entries.values():
                entry.future.cancel()  # a running or finished one stays as it is
        for _ in self._workers:
            self._waiting.put(None)
            self._large.put(None)
        self._close_backend()

    def _forget_old(self) -> None:
        """Called with the lock held."""
        excess = len(self._entries) - self._cache_size
        excess_bytes = sum(map(self._bytes_of, self._entries.values())) - self.cache_bytes
        for spec, entry in list(self._entries.items()):
            if excess <= 0 and excess_bytes <= 0:
                break
            if entry.future.done():
                size = self._bytes_of(entry)
                _LOG.info("forgot a %s of %d bytes", spec.kind, size)
                del self._entries[spec]
                excess, excess_bytes = excess - 1, excess_bytes - size

    def _bytes_of(self, entry: _Entry) -> int:
        future = entry.future
        is_there = future.done() and not future.cancelled() and future.exception() is None
        return entry.size + (self._size_of_more(future.result()) if is_there else 0)

    def _work(self, waiting: _Waiting) -> None:
        while (entry := waiting.get()) is not None:
            if waiting is self._waiting and _seems_large(entry):
                self._large.put(entry)
            elif entry.future.set_running_or_notify_cancel():
                self._compile(entry)

    def _compile(self, entry: _Entry) -> None:
        spec, began = entry.spec, time.perf_counter()
        document, entry.document = entry.document or SpecDocument(spec), None
        try:
            grammar = self._backend.compile_document(document)
            size = _OWN_BYTES + grammar.memory_size_bytes
        except BaseException as error:  # whatever happened belongs to those who wait for it
            _LOG.info("a %s of %d characters is refused: %s", spec.kind, len(spec.source), error)
            entry.size = _OWN_BYTES + len(spec.source)
            entry.future.set_exception(error)
        else:
            seconds = time.perf_counter() - began
            _LOG.info("compiled a %s in %.3f s: %d bytes", spec.kind, seconds, size)
            entry.size = size + len(spec.source)
            entry.future.set_result(grammar)
        with self._lock:
            self._forget_old()


def _seems_large(entry: _Entry) -> bool:
    try:
        return entry.document is None or entry.document.is_large
    except Exception:  # whatever is wrong is reported by the compile, to those who wait
        return True


def _own_failure(future: Future[CompiledGrammar]) -> Future[CompiledGrammar]:
    """A failed future gets a copy of its error: each raise of one object grows its traceback."""
    error = future.exception() if future.done() and not future.cancelled() else None
    if error is None:
        return future
    own: Future[CompiledGrammar] = Future()
    own.set_exception(copy.copy(error).with_traceback(None))
    return own
