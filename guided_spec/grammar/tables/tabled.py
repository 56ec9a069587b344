"""A compiled grammar that gets a table, which its texts go over to."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from guided_spec.errors import GrammarError
from guided_spec.grammar.completion.rules import tells_rules
from guided_spec.grammar.limits import NoTableError
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import tabled_part
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.grammar.text.markers import AfterGrammar
from guided_spec.grammar.text.parts import TextParts, new_parts
from guided_spec.grammar.text.state import TextState
from guided_spec.grammar.text.unique_keys import NotedGrammar, UniqueKeysGrammar

_LOG = logging.getLogger(__name__)


class TabledGrammar:
    """A compiled grammar, and its table once there is one; shared by requests.

    inner: what the table stands for. begin: starts to make it, elsewhere or at once. texts: how
    many texts have begun when it is called; 0 for now.
    table: None as long as there is none. reason: why there will be none, once that is known.

    The table may come while texts are written: they go over to it.
    """

    def __init__(
        self, inner: NotedGrammar, begin: Callable[[], Future[TokenTable]], texts: int
    ) -> None:
        self.inner = inner
        self.backend, self.notes, self.excluded = inner.backend, inner.notes, inner.excluded
        self.table: TokenTable | None = None
        self.reason: str | None = None
        self._begin = begin
        self._left = texts
        self._lock = threading.Lock()
        if texts == 0:
            begin().add_done_callback(self._end)

    @property
    def memory_size_bytes(self) -> int:
        """Bytes of the inner grammar; ``table_bytes`` returns those of the table."""
        return self.inner.memory_size_bytes

    def count_text(self) -> None:
        """Another text begins; ``new_parts`` counts its own."""
        with self._lock:
            self._left -= 1
            begins = self._left == 0
        if begins:
            self._begin().add_done_callback(self._end)

    def new_parts(self) -> TextParts:
        """Those of the grammar inside, and the table, if there may be one."""
        self.count_text()
        parts = new_parts(self.inner)
        return parts if self.reason is not None else parts._replace(tabled=self)

    def new_matcher(self) -> TextState:
        """A text at the start of the grammar."""
        return TextState.begin(self.new_parts())

    def new_style_matcher(self) -> GrammarMatcher | None:
        """The inner grammar's, since it is used for drafts only."""
        return self.inner.new_style_matcher()

    def _end(self, made: Future[TokenTable]) -> None:
        if made.cancelled() or made.exception() is not None:
            self.reason = "none is made any more" if made.cancelled() else str(made.exception())
        else:
            self.table = made.result()


TEXTS = 32  # of one grammar, before its table is made: what is sent a few times needs none


class TableMaker:
    """Adds tables to compiled grammars; safe to use from several threads.

    make: the table of a spec's grammar. Raises NoTableError, and GrammarError where it is made in
        a process that fails.
    texts: number of texts of a grammar after which its table is made. Tables are made one after
        another in a daemon thread, since no caller waits for them. 0 makes each at once.
    """

    def __init__(
        self,
        make: Callable[[GrammarSpec, CompiledGrammar], TokenTable],
        texts: int,
    ) -> None:
        self._make = make
        self._texts = texts
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def attach(self, spec: GrammarSpec, compiled: CompiledGrammar) -> CompiledGrammar:
        """``compiled``, the grammar of ``spec``, with a table where one may be had."""
        part = tabled_part(compiled)
        if not isinstance(part, NotedGrammar) or not tells_rules(part):
            return compiled
        tabled = TabledGrammar(part, partial(self._begin, spec, part), self._texts)
        if isinstance(compiled, UniqueKeysGrammar):
            return replace(compiled, inner=tabled)
        return tabled

    def close(self) -> None:
        """Make no more tables. May be called again."""
        with self._lock:
            self._closed = True
        self._waiting.put(None)

    def _begin(self, spec: GrammarSpec, part: CompiledGrammar) -> Future[TokenTable]:
        made: Future[TokenTable] = Future()
        make = partial(self._run, spec, part, made)
        if self._texts == 0:
            make()
            return made
        with self._lock:
            if self._closed:
                made.cancel()
                return made
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="grammar-tables", daemon=True
                )
                self._thread.start()
        self._waiting.put(make)
        return made

    def _work(self) -> None:
        while (make := self._waiting.get()) is not None:
            make()

    def _run(self, spec: GrammarSpec, part: CompiledGrammar, made: Future[TokenTable]) -> None:
        began = time.perf_counter()
        try:
            table = self._make(spec, part)
        except Exception as error:
            if isinstance(error, NoTableError | GrammarError):
                _LOG.info("no table of a %s: %s", spec.kind, error)
            else:
                _LOG.warning("no table of a %s", spec.kind, exc_info=error)
            made.set_exception(error)
        else:
            size, seconds = table.memory_size_bytes, time.perf_counter() - began
            share = "all" if table.is_whole else "a part"
            _LOG.info(
                "made the table of %s of a %s in %.3f s: %d states, %d bytes",
                *(share, spec.kind, seconds, table.num_states, size),
            )
            made.set_result(table)


def table_bytes(compiled: CompiledGrammar) -> int:
    """Bytes of the table inside a compiled grammar, as it is now."""
    while isinstance(compiled, AfterGrammar | UniqueKeysGrammar):
        compiled = compiled.inner
    table = compiled.table if isinstance(compiled, TabledGrammar) else None
    return 0 if table is None else table.memory_size_bytes
