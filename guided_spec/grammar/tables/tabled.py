"""A compiled grammar with a table next to its matchers, and a text's place in either."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from guided_spec.errors import ConfigError, GrammarError, GrammarStateError
from guided_spec.grammar.completion.rules import tells_rules
from guided_spec.grammar.document import NoTableError
from guided_spec.grammar.markers import AfterGrammar
from guided_spec.grammar.protocol import (
    CompiledGrammar,
    GrammarMatcher,
    Matcher,
    Source,
    accept_tokens,
    as_matcher,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import tabled_part
from guided_spec.grammar.tables.token_table import ENDED, OUTSIDE, REFUSED, TableState, TokenTable
from guided_spec.grammar.unique_keys import NotedGrammar, UniqueKeysGrammar

_LOG = logging.getLogger(__name__)


WITHOUT_A_LOOK = 64  # tokens after which a text sees that its grammar has a table now


class TabledGrammar:
    """A compiled grammar, and its table once there is one; shared by requests.

    inner: what the table stands for. begin: starts to make it, elsewhere or at once. texts: how
    many texts have begun when it is called; 0 for now.
    table: None as long as there is none. reason: why there will be none, once that is known.

    The table may come while texts are written: their matchers go over to it.
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
        """Of the one inside; ``table_bytes`` has the table's."""
        return self.inner.memory_size_bytes

    def count_text(self) -> None:
        """Another text begins; ``new_matcher`` counts its own."""
        with self._lock:
            self._left -= 1
            begins = self._left == 0
        if begins:
            self._begin().add_done_callback(self._end)

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        self.count_text()
        return self.inner.new_matcher() if self.reason is not None else TabledMatcher(self)

    def new_style_matcher(self) -> GrammarMatcher | None:
        """The one inside's: it is asked for guesses alone."""
        return self.inner.new_style_matcher()

    def _end(self, made: Future[TokenTable]) -> None:
        if made.cancelled() or made.exception() is not None:
            self.reason = "none is made any more" if made.cancelled() else str(made.exception())
        else:
            self.table = made.result()


class TabledMatcher(Matcher):
    """A ``GrammarMatcher`` that looks its rows up in a table.

    As long as there is none, and where the text leaves it, the grammar's own matcher goes along.
    """

    def __init__(self, grammar: TabledGrammar) -> None:
        self._grammar = grammar
        self._token_ids: list[int] = []
        self._states = [0]  # before every token and after the last one; of no use without a table
        self._table: TokenTable | None = None
        self._since = 0  # tokens before the table came
        self._own: Matcher | None = None  # the grammar's
        self._num_read = 0  # tokens that it has read

    @property
    def row_source(self) -> GrammarMatcher:
        """The grammar's own matcher's where the table has no row; else this one."""
        return self._matcher().row_source if self._state() == OUTSIDE else self

    @property
    def num_tabled(self) -> int:
        """Tokens of the text that the table judged."""
        if self._table is None:
            return 0
        return sum(state >= 0 for state in self._states[self._since : -1])

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        token_id = int(token_id)
        state, table = self._state(), self._table
        if state == OUTSIDE or table is None:
            if not self._matcher().accept_token(token_id):
                return False
            self._num_read += 1
            then = OUTSIDE
        elif state == ENDED or not 0 <= token_id < len(table.classes):
            return False
        else:
            then = table.after(state, token_id)
            if then == REFUSED:
                return False
        self._states.append(then)
        self._token_ids.append(token_id)
        return True

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        state, table = self._state(), self._table
        if state == OUTSIDE or table is None:
            return self._matcher().fill_next_token_bitmask(bitmask, index)
        if state == ENDED:
            raise GrammarStateError("the text is complete: no token can follow")
        np.asarray(bitmask)[index] = table.row(state)  # a view, also of a tensor
        return bool(table.forbids[table.row_of[state]])

    def fork(self) -> TabledMatcher:
        """An independent copy at the same position."""
        copy = TabledMatcher(self._grammar)
        copy._token_ids, copy._states = self._token_ids.copy(), self._states.copy()
        copy._table, copy._since = self._table, self._since
        if self._own is not None and self._state() == OUTSIDE:
            copy._own, copy._num_read = self._matcher().fork(), self._num_read
        return copy

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens. Raises ConfigError if there are fewer."""
        if not 0 <= num_tokens <= len(self._token_ids):
            fix = f"must be between 0 and {len(self._token_ids)}, the tokens accepted so far"
            raise ConfigError("num_tokens", num_tokens, fix)
        length = len(self._token_ids) - num_tokens
        del self._token_ids[length:]
        del self._states[length + 1 :]
        if self._own is not None and self._num_read > length:
            self._own.rollback(self._num_read - length)
            self._num_read = length

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        state = self._state()
        return self._matcher().is_terminated() if state == OUTSIDE else state == ENDED

    def table_state(self) -> TableState | None:
        """None without a table, and where the text has left it."""
        state, table = self._state(), self._table
        return None if table is None or state < 0 else TableState(table, state)

    def source(self) -> Source | None:
        """The grammar's own matcher's where the table has no row."""
        found = self._matcher().source() if self._state() == OUTSIDE else None
        return found and found._replace(reach=min(found.reach, WITHOUT_A_LOOK))

    def replay(self, token_ids: Sequence[int]) -> None:
        """See ``Matcher``; also where a table has come since."""
        assert self._own is not None
        self._own.replay(token_ids)
        self._num_read += len(token_ids)
        self._token_ids += token_ids
        self._states += [OUTSIDE] * len(token_ids)

    def read(self, token_ids: Sequence[int]) -> int:
        """As far as the text keeps to the table, a look-up for each token."""
        state, table = self._state(), self._table
        found = [] if table is None or state < 0 else table.states(state, token_ids)
        count = len(found)
        self._states += found
        self._token_ids += token_ids[:count]
        return count if count == len(token_ids) else count + super().read(token_ids[count:])

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether all these tokens are accepted, no stop token before the last; does not move."""
        if self._state() == OUTSIDE:
            return self._matcher().takes(token_ids)
        return super().takes(token_ids)

    def forced_bytes(self) -> bytes:
        """The grammar's own matcher's while it goes along; a table's rows are cheap to look at."""
        return self._matcher().forced_bytes() if self._state() == OUTSIDE else b""

    def _state(self) -> int:
        """Where the text stands in the table; ``OUTSIDE`` while there is none."""
        if self._table is None:
            table = self._grammar.table
            if table is None:
                return OUTSIDE
            self._take(table)
        return self._states[-1]

    def _take(self, table: TokenTable) -> None:
        """Go over to a table; the text so far is followed in it."""
        self._table, self._since = table, len(self._token_ids)
        state = 0
        for at, token_id in enumerate(self._token_ids, 1):
            state = table.after(state, token_id) if state >= 0 else OUTSIDE
            # What its matcher has taken is legal, whatever the table says.
            self._states[at] = state = OUTSIDE if state == REFUSED else state
        if state != OUTSIDE:
            self._own, self._num_read = None, 0

    def _matcher(self) -> Matcher:
        """The grammar's own matcher, after the text so far."""
        if self._own is None:
            self._own, self._num_read = as_matcher(self._grammar.inner.new_matcher()), 0
        if missing := self._token_ids[self._num_read :]:
            self._num_read += accept_tokens(self._own, missing)
            if self._num_read < len(self._token_ids):
                reason = f"refuses token {self._token_ids[self._num_read]}, which its table allows"
                raise GrammarStateError(f"the grammar's matcher {reason}")
        return self._own


TEXTS = 32  # of one grammar, before its table is made: what is sent a few times needs none


class TableMaker:
    """Puts tables next to compiled grammars; safe to use from several threads.

    make: the table of a spec's grammar. Raises NoTableError, and GrammarError where it is made in
        a process that fails.
    texts: of a grammar, after which its table is made, one after another in a thread of its own,
        which is a daemon, since nobody waits for it. 0 makes each at once.
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
