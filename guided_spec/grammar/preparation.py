"""Small grammars, prepared where nobody waits for the interpreter.

Where grammars are new all the time, some milliseconds of Python for each would hold up every step
of the texts that decode in this process. So workers prepare them: they read the schema, compile it,
read the grammar's rules, and hand over what this process compiles once more, in native code.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from guided_spec.errors import GrammarError, GrammarWorkerError
from guided_spec.grammar.completion.rule_endings import ReadRules
from guided_spec.grammar.completion.rules import RuleSource
from guided_spec.grammar.isolation import TriedOut, Workers
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import StepsSpentError, limit_steps, spend_on_text

_LOG = logging.getLogger(__name__)
FEW = 32  # grammars, which this process prepares before workers are started


class Preparation:
    """Prepares small grammars in idle workers. Safe to use from several threads.

    count: workers that are started, once 32 grammars have come or ``warm_up`` is called; each takes
        a core, if there are so many. read_here: as ``read_source``.

    No caller waits for a worker: while none is idle, this process does the work.
    """

    def __init__(
        self,
        workers: Workers,
        limits: GrammarLimits,
        read_here: Callable[[RuleSource], ReadRules],
        count: int = 1,
    ) -> None:
        self._workers, self._limits, self._read_here = workers, limits, read_here
        self._count = max(1, min(count, (os.cpu_count() or 1) // 2))
        self._lock = threading.Lock()
        self._until_start = FEW

    def warm_up(self) -> None:
        """Start the workers in the background, within seconds."""
        threading.Thread(target=self._start, name="grammar-preparation", daemon=True).start()

    def try_out(self, spec: GrammarSpec) -> TriedOut | None:
        """What a worker has compiled; None where this process has to.

        Raises what ``Workers.try_out`` raises, and StepsSpentError beyond the limit.
        """
        try:
            found = self._workers.prepare_if_idle(spec, self._limits)
        except GrammarWorkerError:  # killed over and over: not the grammar's fault
            found = None
        if found is None:
            with self._lock:
                self._until_start -= 1
                starts = self._until_start == 0
            if starts:
                self.warm_up()
        return found

    def read(self, source: RuleSource, steps: int) -> ReadRules:
        """The rules of a grammar that was compiled here.

        steps: that this process may spend on it; rules that take more are left to a worker.

        Raises what ``read_source`` raises, and GrammarCompileError where a worker fails at it.
        """
        try:
            with limit_steps(steps):
                spend_on_text(source.text)
                return self._read_here(source)
        except StepsSpentError:
            return self._workers.read(source, self._limits)

    def _start(self) -> None:
        try:
            while len(self._workers.pids) < self._count:
                self._workers.start_one()
        except GrammarError as error:
            is_over = self._workers.is_closed or not threading.main_thread().is_alive()
            if not is_over:  # at the end of the program its workers end too
                _LOG.warning("grammars are prepared in this process: %s", error)
        with self._lock:
            self._until_start = FEW
