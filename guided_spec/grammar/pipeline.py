"""Compiles grammars in threads, from a user's spec to an object that makes matchers."""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from guided_spec.config import EngineConfig
from guided_spec.errors import GrammarCompileError, GrammarError, GrammarWorkerError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.redundancy import redundancies_of
from guided_spec.grammar.backends.registry import BackendFactory, import_path
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.deferred_endings import HandedRules
from guided_spec.grammar.completion.rule_endings import ReadRules
from guided_spec.grammar.completion.rules import RuleSource
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.demand import Demand
from guided_spec.grammar.document import DocumentCompiler, SpecDocument, as_document_compiler
from guided_spec.grammar.isolation import TriedOut, Workers
from guided_spec.grammar.limits import GrammarLimits, TableLimits, check_limits, check_source
from guided_spec.grammar.preparation import Preparation
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import StepsSpentError, limit_steps
from guided_spec.grammar.tables.table import proven_table
from guided_spec.grammar.tables.tabled import TEXTS, TableMaker, table_bytes
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.grammar.text.markers import AfterGrammar, Markers
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.home import Home, Homebound

_LOG = logging.getLogger(__name__)

_OWN_BYTES = 4096  # what an entry costs in addition to its source and its grammar
_MOST_LOOKED_AT = 20_000  # characters of EBNF that are searched for several readings of a text
_LATER = 64  # requests after which a grammar is weighed again, since its use makes it grow


@dataclass(eq=False)
class _Entry:
    """A spec and its grammar to come.

    document: the spec as it is read; None once that is over. demand: who waits for the grammar.
    own_bytes: of the spec and the compiled grammar. counted_bytes: with what hangs on the grammar,
    as last counted; 0 before it is compiled and once the entry is forgotten.
    """

    spec: GrammarSpec
    future: Future[CompiledGrammar]
    document: SpecDocument | None
    demand: Demand
    own_bytes: int = 0
    counted_bytes: int = 0


_WAKE = "wake"  # a thread, to look at what was dropped
_Waiting = queue.SimpleQueue[_Entry | str | None]


class PendingGrammar:
    """The pending grammar of one request; compiling ends early once all waiters have left.

    future: of the grammar, shared with others: not to be cancelled, and not to be waited for after
    ``release``.
    """

    def __init__(self, future: Future[CompiledGrammar], place: _Ticket | None) -> None:
        self.future = future
        self._place = place

    @classmethod
    def failed(cls, error: Exception) -> PendingGrammar:
        """One whose compiling has failed with ``error``."""
        pending = cls(Future(), None)
        pending.future.set_exception(error)
        return pending

    def share(self) -> PendingGrammar:
        """The same for another request."""
        return self if self._place is None else self._place.queue.ask(self._place.entry.spec)

    def release(self) -> None:
        """Stop waiting. May be called again; also happens when this object is dropped."""
        place, self._place = self._place, None
        if place is not None:
            place.queue._leave(place.entry)

    def __del__(self) -> None:
        if self._place is not None:  # anywhere, also where locks are held
            self._place.queue._dropped.append(self._place.entry)
            self._place.queue._waiting.put(_WAKE)


class _Ticket(NamedTuple):
    """One waiter for an entry of a queue."""

    queue: GrammarCompileQueue
    entry: _Entry


class GrammarCompileQueue(Homebound):
    """A pool of compiling threads with a memory of what they compiled; thread-safe.

    max_workers: compiles that may run at once; further ones wait for a free worker. Grammars that
        are large at sight have as many workers of their own, so that small ones never wait for
        them.
    cache_bytes: what finished grammars, and failures, that are remembered may take together; the
        least recently asked for is forgotten first.
    cache_size: how many are remembered at most.
    size_of_more: bytes that a grammar holds besides itself; they may grow with use. They
        are counted when it is asked for and some requests later, so that no call takes longer
        for a full cache.
    close_backend: what ends with the queue.

    The threads are daemons: a native compile cannot be interrupted, and must not hold up the end
    of the process.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        *,
        max_workers: int = 2,
        cache_size: int = 2**16,
        cache_bytes: int = 2**30,
        size_of_more: Callable[[CompiledGrammar], int] = lambda grammar: 0,  # noqa: ARG005
        close_backend: Callable[[], None] = lambda: None,
    ) -> None:
        self.home = Home("compile queue")
        self._backend = as_document_compiler(backend)
        self._close_backend = close_backend
        self._cache_size = cache_size
        self.cache_bytes = cache_bytes
        self._size_of_more = size_of_more
        self._lock = threading.Lock()
        # In the order of use. No LRUCache: what compiles must stay, and sizes grow in it.
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._counted_bytes = 0  # the sum over all entries
        self._grow: deque[GrammarSpec] = deque()  # asked for lately: to be counted once more
        self._dropped: deque[_Entry] = deque()  # of which one who waited is gone
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
        """What the finished grammars that are remembered take together, at most ``cache_bytes``.

        They grow while they are used: what is too much by now is forgotten first.
        """
        with self._lock:
            for entry in list(self._entries.values()):
                self._count(entry)
            self._forget_old()
            return self._counted_bytes

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The future of ``spec``'s grammar; never blocks.

        Equal specs share one future while it is unfinished or successful, so it is not to be
        cancelled. A failure is remembered too. Raises GrammarError once the queue is closed, and
        OtherProcessError in a fork.
        """
        return _own_failure(self._join(spec).future)

    def ask(self, spec: GrammarSpec) -> PendingGrammar:
        """As ``submit``, for a request that may end before its grammar is there."""
        entry = self._join(spec)
        return PendingGrammar(_own_failure(entry.future), _Ticket(self, entry))

    def _join(self, spec: GrammarSpec) -> _Entry:
        self.home.require()
        if spec.value_type is not None:  # else it would be kept, and sent to a process
            spec = replace(spec, value_type=None)
        with self._lock:
            if self._closed:
                raise GrammarError("the compile queue is closed; make a new one")
            entry = self._entries.get(spec)
            if entry is None or entry.future.cancelled() or not entry.demand.join():
                demand = Demand()
                demand.join()
                entry = _Entry(spec, Future(), SpecDocument(spec, demand), demand)
                self._entries[spec] = entry
                self._waiting.put(entry)
            self._entries.move_to_end(spec)
            self._count(entry)
            self._grow.append(spec)
            if len(self._grow) > _LATER:
                older = self._entries.get(self._grow.popleft())
                if older is not None:
                    self._count(older)
            self._forget_old()
        return entry

    def _leave(self, entry: _Entry) -> None:
        """Remove a waiter of an entry; the last one ends the work if it can be ended."""
        entry.demand.leave()
        with self._lock:
            if not entry.demand.is_wanted and (entry.future.cancel() or entry.demand.is_over):
                self._forget(entry)

    def close(self) -> None:
        """Cancel what has not begun and let the workers end; does not wait for them."""
        if not self.home.is_here:
            return
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
        """Called with the lock held. What is not finished stays."""
        while len(self._entries) > self._cache_size or self._counted_bytes > self.cache_bytes:
            entry = next((one for one in self._entries.values() if one.future.done()), None)
            if entry is None:
                return
            _LOG.info("forgot a %s of %d bytes", entry.spec.kind, entry.counted_bytes)
            self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        """Called with the lock held."""
        if self._entries.get(entry.spec) is entry:
            del self._entries[entry.spec]
            self._counted_bytes -= entry.counted_bytes
            entry.counted_bytes = 0

    def _count(self, entry: _Entry) -> None:
        """Count what an entry takes now. Called with the lock held."""
        future = entry.future
        if not future.done() or self._entries.get(entry.spec) is not entry:
            return
        is_compiled = not future.cancelled() and future.exception() is None
        more = self._size_of_more(future.result()) if is_compiled else 0
        self._counted_bytes += entry.own_bytes + more - entry.counted_bytes
        entry.counted_bytes = entry.own_bytes + more

    def _work(self, waiting: _Waiting) -> None:
        while (entry := waiting.get()) is not None:
            while self._dropped:
                with suppress(IndexError):  # another thread was faster
                    self._leave(self._dropped.popleft())
            if isinstance(entry, str):
                continue
            if waiting is self._waiting and _seems_large(entry):
                self._large.put(entry)
            elif entry.future.running() or entry.future.set_running_or_notify_cancel():
                self._compile(entry)

    def _put_back(self, entry: _Entry, document: SpecDocument) -> None:
        """Leave an entry that turned out to be dear to the threads for large ones."""
        entry.document = document
        with self._lock:
            if not self._closed:
                self._large.put(entry)
                return
        entry.future.set_exception(GrammarError("the compile queue is closed; make a new one"))

    def _compile(self, entry: _Entry) -> None:
        spec, began = entry.spec, time.perf_counter()
        document, entry.document = entry.document or SpecDocument(spec), None
        try:
            grammar = self._backend.compile_document(document)
            size = _OWN_BYTES + grammar.memory_size_bytes
        except StepsSpentError:
            self._put_back(entry, document)
            return
        except BaseException as error:  # whatever happened belongs to those who wait for it
            _LOG.info("a %s of %d characters is refused: %s", spec.kind, len(spec.source), error)
            entry.own_bytes = _OWN_BYTES + len(spec.source)
            entry.future.set_exception(error)
        else:
            seconds = time.perf_counter() - began
            _LOG.info("compiled a %s in %.3f s: %d bytes", spec.kind, seconds, size)
            if spec.kind == "ebnf" and len(spec.source) <= _MOST_LOOKED_AT:
                for one in redundancies_of(grammar):
                    _LOG.warning("%s: %s, which is slow; %s", one.rule, one.reason, one.fix)
            entry.own_bytes = size + len(spec.source)
            entry.future.set_result(grammar)
        with self._lock:
            self._count(entry)
            if isinstance(entry.future.exception(), GrammarWorkerError):
                self._forget(entry)  # no fault of the grammar's
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


_LONGEST_MESSAGE = 2_000  # characters


class _Compiled(NamedTuple):
    """A grammar, and its rules as a worker has read them: None where none has."""

    grammar: CompiledGrammar
    rules: HandedRules | Exception | None = None


class GrammarPipeline(DocumentCompiler[CompiledGrammar]):
    """Any backend with limits, markers, endings and tables; safe to use from several threads.

    limits: what one grammar may cost; None for any. What can be seen in its source is checked at
        once. A grammar that is large at sight, or whose preparation takes too many steps, is
        compiled by a worker process under the limits of time and memory. If that succeeds, what the
        worker wrote for the backend is compiled here once more: a compiled grammar can cost far
        more to hand over (454 MB of text for 3 MB of grammar). Without POSIX there is no worker:
        what takes more steps is refused.
    markers: for specs with a ``start``: these are compiled without it, and apply after the marker.
    endings: prepared where grammars are compiled, not while others wait. With them, small grammars
        are prepared by ``num_workers`` workers where many come, see ``Preparation``.
    tables: whether grammars get tables: "auto" in a worker once they are asked for again and again,
        "always" here, at once; None for none.
    make: what builds the backend in a worker, a function or class that can be imported; None
        takes the backend's class.
    name: of the registered backend that compiles specs which name none; None where ``make`` builds
        whatever that is. A worker knows registered backends by their import path. One that has
        none, such as a class in a notebook, compiles here alone: what takes more steps is refused.
    """

    def __init__(  # noqa: PLR0913 - the parts around a backend
        self,
        backend: GrammarBackend,
        limits: GrammarLimits | None = None,
        *,
        markers: Markers | None = None,
        endings: EndingsCache | None = None,
        tables: Literal["auto", "always"] | None = None,
        make: BackendFactory | None = None,
        name: str | None = None,
        num_workers: int = 1,
    ) -> None:
        self.vocabulary: Vocabulary = backend.vocabulary
        self.limits = limits
        self.markers = markers
        self._backend = as_document_compiler(backend)
        self._endings = endings
        self._name = name
        self._workers = Workers(type(backend) if make is None else make, self.vocabulary)
        self._preparation: Preparation | None = None
        if endings is not None and self._has_worker_of(name):
            own = limits or GrammarLimits()
            self._preparation = Preparation(self._workers, own, endings.read_here, num_workers)
        self._tables: TableMaker | None = None
        if tables is not None:
            is_at_once = tables == "always"
            make_table = self._table_here if is_at_once else self._table_elsewhere
            self._tables = TableMaker(make_table, 0 if is_at_once else TEXTS)

    @classmethod
    def of(
        cls, name: str, vocabulary: Vocabulary, limits: GrammarLimits | None = None
    ) -> GrammarPipeline:
        """One of our backends by its name, or "auto", within limits; None takes the defaults.

        Raises ConfigError for a backend that is not known or not installed.
        """
        make = partial(BackendChoice, name)
        return cls(make(vocabulary), limits or GrammarLimits(), make=make)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """As ``compile_document``, and in a worker where it turns out to be dear."""
        document = SpecDocument(spec)
        try:
            return self.compile_document(document)
        except StepsSpentError:
            return self.compile_document(document)

    def compile_document(self, document: SpecDocument) -> CompiledGrammar:
        """Compile its spec.

        Raises what the backend raises, and GrammarCompileError for a grammar beyond the limits, and
        for a marker that is not known or that the vocabulary cannot write. Raises StepsSpentError,
        once, for a document that turns out to be dear: the next call compiles it in a worker.
        """
        try:
            return self._compile(document)
        except StepsSpentError:
            document.is_dear = True
            raise

    def _compile(self, document: SpecDocument) -> CompiledGrammar:
        start = None if self.markers is None else document.spec.start
        if start is not None:
            document = document.without_start()
        try:
            marker = None if self.markers is None or start is None else self.markers.find(start)
            compiled, rules = self._within_limits(document)
        except GrammarError as error:
            _shorten(error)
            raise
        if self._tables is not None:
            compiled = self._tables.attach(document.spec, compiled)
        if marker is not None and start is not None:
            compiled = AfterGrammar(compiled, marker, start.reasoning_budget)
        if self._endings is not None:
            self._endings.of(compiled, self._read_rules(document), rules)
        return compiled

    def warm_up(self) -> None:
        """Start the workers that prepare small grammars, in the background."""
        if self._preparation is not None:
            self._preparation.warm_up()

    @property
    def num_idle(self) -> int:
        """How many workers have nothing to do."""
        return self._workers.num_idle

    def _read_rules(self, document: SpecDocument) -> Callable[[RuleSource], ReadRules] | None:
        if self._preparation is None:
            return None
        steps = (self.limits or GrammarLimits()).steps
        spent = steps if document.is_dear else document.num_steps
        return partial(self._preparation.read, steps=max(steps - spent, steps // 4))

    def close(self) -> None:
        """End the workers, also those at work; large grammars then fail. May be called again."""
        if self._tables is not None:
            self._tables.close()
        self._workers.close()

    def _within_limits(self, document: SpecDocument) -> _Compiled:
        if self.limits is None:
            return _Compiled(self._backend.compile_document(document))
        check_source(document.spec, self.limits)
        has_worker = self._has_worker(document.spec)
        if has_worker and self._preparation is not None and not document.is_large:
            tried = self._preparation.try_out(document.spec)
            if tried is not None:
                return _Compiled(self._rebuild(document, tried), tried.rules)
        try:
            with limit_steps(self.limits.steps) as count:
                if not (has_worker and document.is_large):
                    check_limits(document, self.limits)
                    compiled = self._backend.compile_document(document)
                    document.num_steps = count.spent
                    return _Compiled(compiled)
        except StepsSpentError as error:
            if not has_worker:
                raise _refuse(document.spec, error) from error
            raise
        tried = self._workers.try_out(document.spec, self.limits, document.demand)
        return _Compiled(self._rebuild(document, tried))

    def _rebuild(self, document: SpecDocument, tried: TriedOut) -> CompiledGrammar:
        """Compile here what a worker has written, or all of it where it tells nothing."""
        compiled = None
        if tried.recipe is not None:
            compiled = self._backend.rebuild(document.spec, tried.recipe)
        if compiled is None:
            return self._backend.compile_document(document)
        for text in tried.warnings:
            warnings.warn(text, UserWarning, stacklevel=2)
        return compiled

    def _has_worker(self, spec: GrammarSpec) -> bool:
        return self._has_worker_of(spec.backend or self._name)

    @staticmethod
    def _has_worker_of(name: str | None) -> bool:
        return os.name == "posix" and (name is None or import_path(name) is not None)

    def _table_here(self, spec: GrammarSpec, part: CompiledGrammar) -> TokenTable:
        del spec
        return proven_table(part, self._spelling, TableLimits())

    def _table_elsewhere(self, spec: GrammarSpec, part: CompiledGrammar) -> TokenTable:
        if not self._has_worker(spec):
            return self._table_here(spec, part)
        limits = self.limits or GrammarLimits()
        return self._workers.make_table(spec, limits, TableLimits())

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.vocabulary) if self._endings is None else self._endings.spelling


class RequestGrammars(NamedTuple):
    """The parts that every request's grammar meets, in this order.

    markers: bind a spec to its prompt, where it begins after a marker.
    queue: compiles it in threads, within limits, and keeps it.
    endings: how its texts end, to end one within its budget; None ends none.
    warm_up: starts what compiles many grammars, in the background.
    """

    markers: Markers
    queue: GrammarCompileQueue
    endings: EndingsCache | None
    warm_up: Callable[[], None] = lambda: None

    @classmethod
    def build(cls, config: EngineConfig, vocabulary: Vocabulary, tokenizer: Any) -> RequestGrammars:
        """As ``config`` says: its ``grammar_*`` fields and ``compile_threads``.

        Raises ConfigError for a backend that is not registered, not installed, or cannot be made.
        """
        name = config.grammar_backend
        markers = Markers.from_tokenizer(vocabulary, tokenizer)
        endings = EndingsCache(vocabulary)
        pipeline = GrammarPipeline(
            BackendChoice(name, vocabulary),
            config.grammar_limits or GrammarLimits(),
            markers=markers,
            endings=endings,
            tables=None if config.grammar_tables == "off" else config.grammar_tables,
            # Where no other process can import it, that one is for specs which name another.
            make=partial(BackendChoice, name if import_path(name) else "auto"),
            name=name,
            num_workers=config.compile_threads,
        )
        queue = GrammarCompileQueue(
            pipeline,
            max_workers=config.compile_threads,
            cache_bytes=config.grammar_cache_bytes,
            size_of_more=lambda grammar: endings.size_of(grammar) + table_bytes(grammar),
            close_backend=pipeline.close,
        )
        return cls(markers, queue, endings, pipeline.warm_up)


def _refuse(spec: GrammarSpec, spent: StepsSpentError) -> GrammarCompileError:
    return GrammarCompileError(
        f"preparing the {spec.kind} goes beyond the limit steps={spent.most}, and no worker "
        "process can do it; simplify the grammar: fewer alternatives, less nesting, smaller counts"
    )


def _shorten(error: GrammarError) -> None:
    """Messages quote the source, which may be a megabyte."""
    message = str(error)
    if len(message) > _LONGEST_MESSAGE:
        half = _LONGEST_MESSAGE // 2
        error.args = (f"{message[:half]} […] {message[-half:]}",)
