"""Texts whose grammars take long for a step: others do not wait for them.

The engine's thread moves the matchers of all texts and fills their mask rows. A text whose part of
that takes long leaves it: between two of its steps another thread does its part, and it decodes in
a step once its next row is there, one token at a time. Other texts of its grammar begin so, until
many rows in succession have not taken long. A text that has taken too much of the CPU fails.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

from guided_spec.engine.request import Request, State
from guided_spec.errors import GrammarError, GrammarTooSlowError, GuidedSpecError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.filler import LONG

ROWS_TO_RETURN = 32  # that do not take long, before texts of a grammar are as all others
MOST_GRAMMARS = 1024  # that are remembered
THREADS = 2
PATIENCE = 0.05  # seconds until somebody may have come or cancelled


class Failed(NamedTuple):
    """A request that has to end, and why."""

    request: Request
    error: GuidedSpecError


@dataclass
class _SlowText:
    """row: the CPU seconds of its next row, once it is there; None if that has not begun.

    is_counted: whether ``seconds``, of the rows so far that took long, hold it. error: what the
    request ends with as soon as the other thread is done.
    """

    row: Future[float] | None = None
    is_counted: bool = False
    seconds: float = 0.0
    error: GuidedSpecError | None = None

    @property
    def is_busy(self) -> bool:
        return self.row is not None and not self.row.done()


class SlowTexts:
    """Those of an engine; used by its thread.

    num_words: of a mask row. most_seconds: CPU time that the long rows of one text may take.
    """

    def __init__(self, num_words: int, most_seconds: float) -> None:
        self._num_words, self._most_seconds = num_words, most_seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="guided-spec-slow-rows")
        self._texts: dict[Request, _SlowText] = {}
        self._grammars: OrderedDict[GrammarSpec, int] = OrderedDict()  # rows until they return

    def __bool__(self) -> bool:
        return bool(self._texts)

    def holds(self, request: Request) -> bool:
        """Whether the request's text takes long, or others of its grammar do."""
        return request in self._texts or self._is_remembered(request)

    def is_busy(self, request: Request) -> bool:
        """Whether another thread uses the request's constraint."""
        return request in self._texts and self._texts[request].is_busy

    def end_later(self, request: Request, error: GuidedSpecError) -> None:
        """Let a busy request end with an error as soon as the other thread is done."""
        self._texts[request].error = error

    def forget(self, request: Request) -> None:
        """The request ends, or begins anew; waits for the other thread."""
        text = self._texts.pop(request, None)
        if text is not None and text.row is not None:
            wait([text.row])

    def take_failed(self) -> list[Failed]:
        """Those that have to end now, which are forgotten."""
        found = []
        for request, text in list(self._texts.items()):
            error = None if text.is_busy else text.error or self._count(request, text)
            if error is not None:
                found.append(Failed(request, error))
                del self._texts[request]
        return found

    def ready(self, requests: Iterable[Request]) -> list[Request]:
        """Those that may decode now; of the others, rows are begun."""
        if not self._grammars and not self._texts:
            return list(requests)
        found = []
        for request in requests:
            text = self._texts.get(request)
            if text is None and self.holds(request):
                text = self._texts[request] = _SlowText()
            if text is not None and text.row is None:
                constraint = request.text.constraint
                assert constraint is not None, "it has a grammar"
                text.row = self._pool.submit(_prepare, constraint, self._num_words)
                text.is_counted = False
            if text is None or not text.is_busy:
                found.append(request)
        return found

    def note(self, requests: Sequence[Request]) -> None:
        """A step of these is committed: see what their parts of it took."""
        for request in requests:
            constraint = request.text.constraint
            if constraint is None:
                continue
            text = self._texts.get(request) if self._texts else None
            if text is not None:
                text.row = None  # that step had it
                if request.state is State.FINISHED or not self._is_remembered(request):
                    del self._texts[request]
            elif constraint.seconds > LONG:
                self._note_long(request, constraint)
            elif constraint.is_timed:
                constraint.is_timed = False

    def wait(self) -> None:
        """Wait for any row, for a while."""
        rows = [text.row for text in self._texts.values() if text.row is not None]
        if rows:
            wait(rows, timeout=PATIENCE, return_when="FIRST_COMPLETED")

    def _note_long(self, request: Request, constraint: Constraint) -> None:
        """A clock sees others at work, so the next step asks the CPU where this one has not."""
        is_sure = constraint.cpu_seconds > LONG
        if is_sure and request.state is not State.FINISHED:
            self._remember(request)
            self._texts[request] = _SlowText(seconds=constraint.cpu_seconds)
        constraint.is_timed = not is_sure and not constraint.is_timed
        constraint.clear_seconds()

    def _count(self, request: Request, text: _SlowText) -> GuidedSpecError | None:
        """Count what its row took, once; why the text cannot go on."""
        if text.row is None or text.is_counted:
            return None
        if (error := text.row.exception()) is not None:
            return GrammarError(f"the grammar cannot be used: {error!r}")
        text.is_counted, seconds = True, text.row.result()
        if seconds <= LONG:
            self._trust(request)
            return None
        self._remember(request)
        text.seconds += seconds
        if text.seconds <= self._most_seconds:
            return None
        return GrammarTooSlowError(
            f"the rows of the grammar's masks took {text.seconds:.1f} s, the last one alone "
            f"{seconds:.2f} s; text_seconds={self._most_seconds:g} allows no more: make the "
            "grammar less ambiguous, for one text has many ways through it"
        )

    def _is_remembered(self, request: Request) -> bool:
        return bool(self._grammars) and request.job.params.grammar in self._grammars

    def _remember(self, request: Request) -> None:
        spec = request.job.params.grammar
        if spec is not None:
            self._grammars[spec] = ROWS_TO_RETURN
            self._grammars.move_to_end(spec)
            if len(self._grammars) > MOST_GRAMMARS:
                self._grammars.popitem(last=False)

    def _trust(self, request: Request) -> None:
        """One row more has not taken long."""
        spec = request.job.params.grammar
        left = self._grammars.pop(spec, 1) - 1 if spec is not None else 0
        if spec is not None and left > 0:
            self._grammars[spec] = left


def _prepare(constraint: Constraint, num_words: int) -> float:
    """The CPU seconds of the next row, which is there then."""
    began = time.thread_time()
    constraint.prepare(num_words)
    return time.thread_time() - began
