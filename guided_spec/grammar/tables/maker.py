"""Makes the tables of a pipeline's grammars: at once, or in the background, elsewhere."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from guided_spec.errors import GrammarError
from guided_spec.grammar.completion.rules import tells_rules
from guided_spec.grammar.limits import NoTableError
from guided_spec.grammar.markers.after import AfterGrammar
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.proof import tabled_part
from guided_spec.grammar.tables.table import TokenTable
from guided_spec.grammar.tables.tabled import TabledGrammar
from guided_spec.grammar.unique_keys import NotedGrammar, UniqueKeysGrammar

__all__ = ["TableMaker", "table_bytes"]

_LOG = logging.getLogger(__name__)

_TEXTS = 32  # of one grammar, before its table is made: what is sent a few times needs none


class TableMaker:
    """Puts tables beside compiled grammars; safe to use from several threads.

    make: the table of a spec's grammar. Raises NoTableError, and GrammarError where it is made in
        a process that fails.
    when: "always" makes each at once, "auto" once 32 texts of it have begun, one after another
        in a thread of its own, which is a daemon, since nobody waits for it.
    """

    def __init__(
        self,
        make: Callable[[GrammarSpec, CompiledGrammar], TokenTable],
        when: Literal["auto", "always"],
    ) -> None:
        self._make = make
        self._when = when
        self._waiting: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def attach(self, spec: GrammarSpec, compiled: CompiledGrammar) -> CompiledGrammar:
        """``compiled``, the grammar of ``spec``, with a table where one may be had."""
        part = tabled_part(compiled)
        if not isinstance(part, NotedGrammar) or not tells_rules(part):
            return compiled
        begin = self._make_now if self._when == "always" else self._make_later
        texts = 0 if self._when == "always" else _TEXTS
        tabled = TabledGrammar(part, partial(begin, spec, part), texts)
        if isinstance(compiled, UniqueKeysGrammar):
            return replace(compiled, inner=tabled)
        return tabled

    def close(self) -> None:
        """Make no more tables. May be called again."""
        with self._lock:
            self._closed = True
        self._waiting.put(None)

    def _make_now(self, spec: GrammarSpec, part: CompiledGrammar) -> Future[TokenTable]:
        made: Future[TokenTable] = Future()
        self._run(_Order(spec, part, made))
        return made

    def _make_later(self, spec: GrammarSpec, part: CompiledGrammar) -> Future[TokenTable]:
        made: Future[TokenTable] = Future()
        with self._lock:
            if self._closed:
                made.cancel()
                return made
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="grammar-tables", daemon=True
                )
                self._thread.start()
        self._waiting.put(_Order(spec, part, made))
        return made

    def _work(self) -> None:
        while (order := self._waiting.get()) is not None:
            self._run(order)

    def _run(self, order: _Order) -> None:
        began = time.perf_counter()
        try:
            table = self._make(order.spec, order.part)
        except (NoTableError, GrammarError) as error:
            _LOG.info("no table of a %s: %s", order.spec.kind, error)
            order.made.set_exception(error)
        except Exception as error:
            _LOG.warning("no table of a %s", order.spec.kind, exc_info=error)
            order.made.set_exception(error)
        else:
            size, seconds = table.memory_size_bytes, time.perf_counter() - began
            share = "all" if table.is_whole else "a part"
            _LOG.info(
                "made the table of %s of a %s in %.3f s: %d states, %d bytes",
                *(share, order.spec.kind, seconds, table.num_states, size),
            )
            order.made.set_result(table)


class _Order(NamedTuple):
    """part: of the grammar of ``spec``, what the table stands for."""

    spec: GrammarSpec
    part: CompiledGrammar
    made: Future[TokenTable]


def table_bytes(compiled: CompiledGrammar) -> int:
    """Bytes of the table inside a compiled grammar, as it is now."""
    while isinstance(compiled, AfterGrammar | UniqueKeysGrammar):
        compiled = compiled.inner
    table = compiled.table if isinstance(compiled, TabledGrammar) else None
    return 0 if table is None else table.memory_size_bytes
