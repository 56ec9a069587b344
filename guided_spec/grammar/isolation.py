"""Worker processes for grammars.

Large grammars are tried out there, since they may hang, crash or take much memory. Small ones are
prepared there where many come, so that decoding in this process does not wait for the interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import warnings
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from guided_spec.errors import GrammarCompileError, GrammarError, GrammarWorkerError
from guided_spec.grammar.backends.registry import (
    GRAMMAR_BACKENDS,
    BackendFactory,
    importable_backends,
)
from guided_spec.grammar.demand import Demand
from guided_spec.grammar.document import SpecDocument, as_document_compiler
from guided_spec.grammar.limits import GrammarLimits, NoTableError, TableLimits, check_limits
from guided_spec.grammar.recipe import Recipe, RecipeGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import StepsSpentError, limit_steps
from guided_spec.home import Home

if TYPE_CHECKING:  # a worker starts by importing this module, and these load torch
    from guided_spec.grammar.completion.deferred_endings import HandedRules
    from guided_spec.grammar.completion.rule_endings import ReadRules
    from guided_spec.grammar.completion.rules import RuleSource
    from guided_spec.grammar.completion.spelling import Spellings
    from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
    from guided_spec.grammar.tables.token_table import TokenTable
    from guided_spec.grammar.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)

START_SECONDS = 120.0
_RESERVE = 2**20  # bytes of a worker, beyond the limit of a job
_GRACE_SECONDS = 5
_READY = "ready"
_OUT_OF_MEMORY = "out of memory"  # what else comes is no text
# What the native code is refused comes as one of its own errors: memory, or that of a thread.
_SIGNS_OF_NO_MEMORY = ("bad_alloc", "Resource temporarily unavailable")
# They load torch, for two seconds.
_OF_JOBS = (
    "guided_spec.grammar.completion.deferred_endings",
    "guided_spec.grammar.tables.table",
)
_PROGRAM = "from guided_spec.grammar.isolation import serve; serve()"
_TRIES = 3  # workers that may be killed over one job, of which one may have been dead before
_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # by somebody else
_LONGEST_RECIPE = 2**24  # bytes
_LONGEST_WAIT = 2**31 - 1  # milliseconds that ``select.poll`` takes
_NICENESS = 10  # of a worker: the threads of a forward wait for each other, and must not for it
_LONGEST_RULES = 2**20  # bytes, which are read back in some 20 ms
_FIX = "simplify the grammar: smaller counts, fewer alternatives, less nesting"


class Workers:
    """Processes in which grammars are tried out; safe to use from several threads.

    make: what builds the backend in a worker, a function or class that can be imported.

    A worker starts when the first grammar comes, within seconds, and stays. Each takes the memory
    of the imports and of the backend. There are no more of them than threads that try out grammars
    at one time. ``close`` ends them; so does the end of this process.
    """

    def __init__(self, make: BackendFactory, vocabulary: Vocabulary) -> None:
        self._make = make
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False
        self._home = Home("grammar backend")

    @property
    def pids(self) -> set[int]:
        """Of the processes, those that have begun."""
        with self._lock:
            return {worker.process.pid for worker in self._all}

    @property
    def num_idle(self) -> int:
        """How many have begun and have nothing to do."""
        with self._lock:
            return len(self._idle)

    @property
    def is_closed(self) -> bool:
        """Whether there will be no more workers."""
        return self._closed

    def close(self) -> None:
        """End the workers, also those at work; large grammars then fail. May be called again."""
        if not self._home.is_here:
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for worker in self._all:
                worker.process.kill()
        for worker in idle:
            self._end(worker)

    def try_out(
        self, spec: GrammarSpec, limits: GrammarLimits, demand: Demand | None = None
    ) -> TriedOut:
        """Compile ``spec`` in a worker, within the limits of its source, of time and of memory.

        demand: once it has no waiter left, the worker is killed.

        Raises what the backend raises, GrammarCompileError for a grammar that is beyond the limits
        or that crashes its worker, GrammarWorkerError where workers are killed or cannot be
        started, and AbandonedError where there is no waiter.
        """
        found: TriedOut = self._run(_Job(spec, limits), self._take(), demand)
        return found

    def make_table(
        self, spec: GrammarSpec, limits: GrammarLimits, tables: TableLimits
    ) -> TokenTable:
        """The table of ``spec``'s grammar, made in a worker that compiles it once more.

        Raises NoTableError where there is none, and what ``try_out`` raises.
        """
        table: TokenTable = self._run(_Job(spec, limits, tables), self._take())
        return table

    def prepare_if_idle(self, spec: GrammarSpec, limits: GrammarLimits) -> TriedOut | None:
        """Compile ``spec`` in an idle worker, and read the grammar's rules; None if there is none.

        Raises what ``try_out`` raises, and StepsSpentError beyond the steps of ``limits``.
        """
        worker = self._take_idle()
        if worker is None:
            return None
        found: TriedOut = self._run(_Job(spec, limits, is_small=True), worker)
        return found

    def read(self, source: RuleSource, limits: GrammarLimits) -> ReadRules:
        """The rules of a grammar, read by a worker.

        Raises what ``read_source`` raises, GrammarCompileError where the worker fails, and
        GrammarWorkerError where none can be started.
        """
        found: ReadRules = self._run(_Reading(source, limits), self._take())
        return found

    def start_one(self) -> None:
        """Start one worker more, within seconds. Raises GrammarWorkerError where that fails."""
        worker = self._new()
        try:
            worker.start()
        except BaseException:
            self._end(worker)
            raise
        self._give_back(worker)

    def _run(self, job: _Job | _Reading, worker: _Worker, demand: Demand | None = None) -> Any:
        """The job's result. Where its worker was killed, another one tries."""
        for tries_left in reversed(range(_TRIES)):
            try:
                with worker.killed_without(demand):
                    worker.start()
                    result = worker.run(job)
                break
            except _EndedError as ended:
                self._end(worker)
                if tries_left == 0 or not ended.was_killed:
                    raise ended.reason(job) from ended
                worker = self._take()
            except BaseException:
                self._end(worker)
                raise
        self._give_back(worker)
        if isinstance(result, Exception):
            raise result
        return result

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._idle.append(worker)
        if closed:
            self._end(worker)

    def _take(self) -> _Worker:
        """An idle worker, or a new one. Raises GrammarWorkerError where none can be started."""
        return self._take_idle() or self._new()

    def _new(self) -> _Worker:
        try:
            with self._lock:
                if self._closed:
                    raise GrammarCompileError("the grammar backend is closed; make a new one")
                worker = _Worker(self._make, self._vocabulary)
                self._all.add(worker)
                return worker
        except OSError as error:  # too many processes or open files
            message = f"no process can be started for a large grammar: {error}; try again later"
            raise GrammarWorkerError(message) from error

    def _take_idle(self) -> _Worker | None:
        """An idle worker; None where there is none. Ends those that were killed meanwhile."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.process.poll() is None:
                return worker
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            self._all.discard(worker)


class Interpreter(NamedTuple):
    """Another process, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection


def start_interpreter(program: str, **options: Any) -> Interpreter:
    """A fresh interpreter that runs ``program``, and the connection to it.

    program: its ``sys.argv[1]`` is the file descriptor of its end. options: of ``Popen``.

    A fork would copy locks and CUDA's state, and multiprocessing's spawn would run the user's main
    module once more.
    """
    ours, theirs = Pipe()
    path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    with theirs:
        process = subprocess.Popen(
            # -P: a file of the current folder may have the name of a module.
            [sys.executable, "-P", "-c", program, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            **options,
        )
    return Interpreter(process, ours)


class _Worker:
    """One process with a backend in it; used by one thread at a time, killed by any."""

    def __init__(self, make: BackendFactory, vocabulary: Vocabulary) -> None:
        self._first_message: Any = (make, vocabulary, importable_backends())
        self.process, self._connection = start_interpreter(
            _PROGRAM,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the native compiler's warnings, seen here once more
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._reply = select.poll()  # the connection's own poll makes a new selector each time
        self._reply.register(self._connection.fileno(), select.POLLIN)
        home = Home("worker")
        self.end = home.finalize(self, _end_process, self.process, self._connection)

    def start(self) -> None:
        """Hand over the vocabulary, once. Raises GrammarWorkerError where the start fails."""
        if self._first_message is None:
            return
        try:
            self._connection.send(self._first_message)
            reply = self._connection.recv() if self._connection.poll(START_SECONDS) else None
        except (EOFError, OSError):
            reply = None
        if reply != _READY:
            raise GrammarWorkerError(
                "the process that tries out large grammars does not start; see whether "
                f"`{Path(sys.executable).name} -c 'import guided_spec.grammar.isolation'` works"
            )
        self._first_message = None

    def killed_without(self, demand: Demand | None) -> contextlib.AbstractContextManager[None]:
        """Within the block, the process is killed once its work has no waiter left."""
        if demand is None:
            return contextlib.nullcontext()
        return demand.ended_by(self.process.kill)

    def run(self, job: _Job | _Reading) -> Any:
        """What was found wrong, or made.

        Raises GrammarCompileError beyond the limits, and _EndedError where the process has ended.
        """
        try:
            self._connection.send((job, importable_backends()))
            if not self._reply.poll(min(1000 * job.seconds, _LONGEST_WAIT)):
                raise _refuse(job, f"compile_seconds={job.limits.compile_seconds:g}")
            reply = self._connection.recv()
        except (EOFError, OSError) as error:
            raise _EndedError(self._status()) from error
        if isinstance(reply, str):
            raise _refuse(job, f"compile_bytes={job.limits.compile_bytes}")
        return reply

    def _status(self) -> int:
        """The exit status of the process, which has closed its connection."""
        try:  # its own: it closes that some time before it ends
            return self.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class _EndedError(Exception):
    """A worker has ended over a job. status: of its process, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    @property
    def was_killed(self) -> bool:
        """Whether something else ended it than the grammar, such as the out-of-memory killer."""
        return -self.status in _KILLED

    def reason(self, job: _Job | _Reading) -> GrammarError:
        """The error of the job's request."""
        ended = f"its compiler ended with exit status {self.status}"
        if self.was_killed:
            fix = "the machine may be out of memory; try again later"
            return GrammarWorkerError(f"the {job.kind} was not compiled: {ended}; {fix}")
        return GrammarCompileError(f"the {job.kind} does not compile: {ended}")


class _Job(NamedTuple):
    """A spec to compile; and to make a table of, where there are limits for one.

    is_small: it takes few steps, and its rules are read too.
    """

    spec: GrammarSpec
    limits: GrammarLimits
    tables: TableLimits | None = None
    is_small: bool = False

    @property
    def kind(self) -> str:
        """Of the grammar."""
        return self.spec.kind

    @property
    def seconds(self) -> float:
        """That it may take."""
        return self.limits.compile_seconds + (0.0 if self.tables is None else self.tables.seconds)


class TriedOut(NamedTuple):
    """What a worker has compiled.

    recipe: to compile it again; None where the backend tells none. warnings: of what it left out.
    rules: of a small grammar, or why they cannot be read; None where they were not.
    """

    recipe: Recipe | None
    warnings: tuple[str, ...] = ()
    rules: HandedRules | Exception | None = None


class _Reading(NamedTuple):
    """Rules to read, and what follows from them."""

    source: RuleSource
    limits: GrammarLimits
    kind: str = "grammar"

    @property
    def seconds(self) -> float:
        """That it may take."""
        return self.limits.compile_seconds


def serve() -> None:
    """A worker's main program: a backend, then specs to compile, until the parent goes away."""
    os.nice(_NICENESS)
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(EOFError, OSError):
        make, vocabulary, registered = connection.recv()
        GRAMMAR_BACKENDS.update(registered)
        bench = _Bench(make(vocabulary))
        connection.send(_READY)
        while True:
            job, registered = connection.recv()
            GRAMMAR_BACKENDS.update(registered)
            connection.send(_attempt(bench, job))


class _Bench:
    """What a worker works with. What jobs import is loaded before the first one's time runs."""

    def __init__(self, backend: GrammarBackend) -> None:
        self._backend = backend
        for name in _OF_JOBS:
            importlib.import_module(name)

    @cached_property
    def _spellings(self) -> Spellings:
        from guided_spec.grammar.completion.spelling import Spellings

        return Spellings(self._backend.vocabulary)

    def do(self, job: _Job | _Reading) -> TokenTable | ReadRules | TriedOut:
        """The job's result."""
        from guided_spec.grammar.tables.table import proven_table, tabled_part

        if isinstance(job, _Reading):
            return self._read(job.source)
        document = SpecDocument(job.spec)
        limit = limit_steps(job.limits.steps) if job.is_small else contextlib.nullcontext()
        with warnings.catch_warnings(record=True) as caught, limit:
            warnings.simplefilter("always", UserWarning)
            check_limits(document, job.limits)
            compiled = as_document_compiler(self._backend).compile_document(document)
        if job.tables is None:
            texts = [str(one.message) for one in caught if one.category is UserWarning]
            rules = self._rules_of(compiled) if job.is_small else None
            return TriedOut(_recipe_of(job, compiled), tuple(texts), rules)
        return proven_table(tabled_part(compiled), self._spellings.of(frozenset()), job.tables)

    def _rules_of(self, compiled: CompiledGrammar) -> HandedRules | Exception:
        from guided_spec.grammar.completion.deferred_endings import HandedRules
        from guided_spec.grammar.completion.endings import EndLostError, UnreadableGrammarError
        from guided_spec.grammar.completion.rule_endings import ReadRules, read_source
        from guided_spec.grammar.completion.rules import source_of

        try:
            source = source_of(compiled)
            spelling = self._spellings.of(source.named)
            endings, plain = read_source(source, spelling), self._spellings.of(frozenset())
            if not ReadRules.of(endings).agrees(compiled, source.named, plain):
                raise UnreadableGrammarError("its matchers begin with other tokens")
            handed = HandedRules.pack(endings, source.named)
            _require_short(handed.rules)
        except (UnreadableGrammarError, EndLostError) as error:
            return error.with_traceback(None)
        return handed

    def _read(self, source: RuleSource) -> ReadRules:
        from guided_spec.grammar.completion.rule_endings import ReadRules, read_source

        spelling = self._spellings.of(source.named)
        found = ReadRules.of(read_source(source, spelling))
        found.shortest.by_tokens(spelling.num_tokens)  # goes along
        _require_short(pickle.dumps(found))
        return found


def _require_short(rules: bytes) -> None:
    from guided_spec.grammar.completion.endings import UnreadableGrammarError

    if len(rules) > _LONGEST_RULES:
        raise UnreadableGrammarError("its rules are too long to be handed over")


def _recipe_of(job: _Job, compiled: CompiledGrammar) -> Recipe | None:
    recipe = compiled.recipe() if isinstance(compiled, RecipeGrammar) else None
    if recipe is not None and len(pickle.dumps(recipe)) > _LONGEST_RECIPE:
        raise _refuse(job, f"of {_LONGEST_RECIPE} bytes, written out")
    return recipe


def _attempt(bench: _Bench, job: _Job | _Reading) -> Any:
    from guided_spec.grammar.completion.endings import EndLostError, UnreadableGrammarError

    # For a parent that died meanwhile: a native compile notices nothing but a signal's default.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(job.seconds) + _GRACE_SECONDS)
    try:
        return _do_within_memory(bench, job)
    except (NoTableError, UnreadableGrammarError, EndLostError, StepsSpentError) as error:
        return error.with_traceback(None)
    except GrammarError as error:
        is_refused = any(sign in str(error) for sign in _SIGNS_OF_NO_MEMORY)
        return _OUT_OF_MEMORY if is_refused else error.with_traceback(None)
    except (MemoryError, SystemError):  # the second where C code was refused memory
        return _OUT_OF_MEMORY
    except Exception as error:  # a defect of the compiler, and this request's alone
        return GrammarCompileError(f"the {job.kind} does not compile: {error!r}")
    finally:
        signal.alarm(0)


def _do_within_memory(bench: _Bench, job: _Job | _Reading) -> Any:
    reserve = bytearray(_RESERVE)
    _limit_memory(job.limits.compile_bytes)
    try:
        return bench.do(job)
    finally:
        del reserve  # else there may be none left to lift the limit with
        _lift_limit()  # to tell what has come of it


def _limit_memory(more: int) -> None:
    """Let this process take ``more`` bytes than it has now. Where /proc is missing: any number."""
    import resource  # not on every platform

    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        # Not RLIMIT_AS: libraries reserve addresses that they never use.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = pages * resource.getpagesize() + more
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _lift_limit() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _refuse(job: _Job | _Reading, limit: str) -> GrammarCompileError:
    return GrammarCompileError(f"compiling the {job.kind} goes beyond the limit {limit}; {_FIX}")


def _end_process(process: subprocess.Popen[bytes], connection: Any) -> None:
    process.kill()
    process.wait()
    connection.close()
