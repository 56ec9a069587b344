"""One request's state in its grammar: the original matcher, and a fork that runs ahead of it.

The original accepts committed tokens only. The fork accepts drafts; it is made once per request
and reset by rollback, because forking copies the whole history while rollback does not.

The committed tokens are the truth. A matcher that disagrees with them is rebuilt from them. The
fork has seen most of them in its draft; the original reads them all. Where they do not end the
text, both may do so later, while the next step runs on the device, and some steps later still where
a table gives the text's state. The fork is not needed there: it is rebuilt when it is needed and
many tokens have passed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.protocol import (
    CompiledGrammar,
    GrammarMatcher,
    Matcher,
    RowSource,
    Source,
    as_matcher,
)
from guided_spec.grammar.tables.token_table import TableState

_LOG = logging.getLogger(__name__)

# Tokens after which the original of a text in its table reads all the same: many at once cost each
# less, and too many would hold up the other texts.
MOST_UNREAD = 64
# A fork that lags further is rebuilt, unless the text is so long that copying it costs more:
# to read a token costs as much as to copy eight.
READ_BY_A_COPY = 8


class KeptRow:
    """A mask row that was filled before the step that needs it; fills as its matcher would.

    row: int32 [W] on the host.
    """

    def __init__(self, row: Tensor) -> None:
        self._row = row

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        """Write the row; True: it may forbid tokens."""
        bitmask[index].copy_(self._row)
        return True


class Fork:
    """A matcher ahead of the committed text by ``token_ids``, which may all be taken back.

    excluded: tokens to refuse without asking the matcher. Used by one thread at a time.

    kept: the row of the committed text, where that was filled before; None where it was not.
    clock: returns seconds. seconds: that its text took in this step. cpu_seconds: those of them
    that are known to be the CPU's.

    After ``begin`` only the library's own matcher advances, as long as it may: the wrappers around
    it cost more than it does, and get the tokens when ``matcher`` is read.
    """

    def __init__(self, matcher: GrammarMatcher, excluded: frozenset[int] = frozenset()) -> None:
        self._matcher = as_matcher(matcher)
        self._excluded = excluded
        self.token_ids: list[int] = []
        self.kept: KeptRow | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self.seconds = self.cpu_seconds = 0.0
        self._source: Source | None = None  # goes alone
        self._pending: list[int] = []  # what it took, committed tokens among them

    @property
    def matcher(self) -> Matcher:
        """The matcher, after the draft."""
        if self._source is not None:
            self._synchronize()
        return self._matcher

    @matcher.setter
    def matcher(self, matcher: Matcher) -> None:
        self._synchronize()
        self._matcher = matcher

    @property
    def is_alone(self) -> bool:
        """Whether a library's own matcher goes alone: no budget has decided anything since."""
        return self._source is not None

    @property
    def is_timed(self) -> bool:
        """Whether the CPU time of its own rows counts, else that of a clock."""
        return self.clock is time.thread_time

    @property
    def is_terminated(self) -> bool:
        """Whether the last token ended the text."""
        if self._source is None:
            return self._matcher.is_terminated()
        return bool(self._pending) and self._pending[-1] in self._source.stops

    @property
    def row_source(self) -> RowSource:
        """See ``Matcher``; of what fills the next row nothing else is asked."""
        if self.kept is not None and not self.token_ids:
            return self.kept
        return self._matcher.row_source if self._source is None else self._source.matcher

    def begin(self) -> None:
        """What is accepted next is a draft."""
        if self._source is None or len(self._pending) >= self._source.reach:
            self._synchronize()
            source = self._matcher.source()
            self._source = source if source is not None and source.reach > 0 else None

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, when the grammar refuses it."""
        if token_id in self._excluded:
            return False
        source = self._source
        if source is not None and len(self._pending) >= source.reach:
            self.begin()
            source = self._source
        if not (self._matcher if source is None else source.matcher).accept_token(token_id):
            return False
        self.token_ids.append(token_id)
        if source is not None:
            self._pending.append(token_id)
            if token_id in source.leads:
                self._synchronize()
        return True

    def rollback_to(self, length: int) -> None:
        """Go back until only the first ``length`` tokens of the draft are left."""
        surplus = len(self.token_ids) - length
        if surplus <= 0:
            return
        if self._source is not None and surplus <= len(self._pending):
            self._source.matcher.rollback(surplus)
            del self._pending[-surplus:]
        else:
            self.matcher.rollback(surplus)
        del self.token_ids[length:]

    def advance(self, token_ids: Sequence[int]) -> int:
        """Accept ``token_ids`` in place of the draft, as far as the grammar allows them.

        Returns how many of them it took: it stops at one that is refused, and at the text's end.
        """
        agreed = 0
        for wanted, ahead in zip(token_ids, self.token_ids, strict=False):
            if wanted != ahead:
                break
            agreed += 1
        self.rollback_to(agreed)
        rest = token_ids[agreed:]
        if not self._excluded.isdisjoint(rest):
            rest = list(takewhile(lambda token_id: token_id not in self._excluded, rest))
        if self._source is None:
            self.token_ids += rest[: self._matcher.read(rest)]
        else:
            for token_id in rest:
                if self.is_terminated or not self.accept(token_id):
                    break
        return len(self.token_ids)

    def commit(self) -> None:
        """What the fork is ahead by is committed: it cannot be taken back any more."""
        self.token_ids.clear()
        self.kept = None

    def _synchronize(self) -> None:
        """Bring the matcher to where its source went."""
        self._source = None
        if self._pending:
            self._matcher.replay(self._pending)
            self._pending = []


class Constraint:
    """One request's grammar, at the end of its committed text.

    compiled: shared with other requests; this constraint makes its own matchers from it.
    ends: the tokens that can end the text; None where only the matchers know.
    committed: the output tokens so far. resyncs: how often the matchers were rebuilt from them.
    steered: indices of those at which a budget took tokens out of the mask, see
        ``guided_spec.grammar.completion.completion``.
    is_terminated: whether a stop token was committed: the text is complete.
    has_lost_end: whether the budget is no longer kept, since no path to an end in time is known.
    """

    def __init__(self, compiled: CompiledGrammar, ends: Iterable[int] | None = None) -> None:
        self.compiled = compiled
        self._ends = None if ends is None else frozenset(ends)
        self.committed: list[int] = []
        self.steered: list[int] = []
        self.resyncs = 0
        self.has_lost_end = False
        self._original = as_matcher(compiled.new_matcher())
        self.is_terminated = self._original.is_terminated()
        self._fork = Fork(self._original.fork(), compiled.excluded)
        self._may_fail = self._original.may_fail
        self._num_read = self._num_fork_read = 0  # committed tokens that the two have read
        self._place: TableState | None = None  # of the committed text, as long as that is enough
        self._failure: GrammarStateError | None = None

    @property
    def has_row(self) -> bool:
        """Whether ``prepare`` has filled the row after the committed text."""
        return self._fork.kept is not None

    @property
    def is_timed(self) -> bool:
        """As of its fork: whether ``seconds`` are the CPU's."""
        return self._fork.is_timed

    @is_timed.setter
    def is_timed(self, is_timed: bool) -> None:
        self._fork.clock = time.thread_time if is_timed else time.perf_counter

    @property
    def seconds(self) -> float:
        """What its matchers took since ``fork`` was called last, by a clock; where rows were filled
        with those of others, at least so much.
        """
        return self._fork.seconds

    @property
    def cpu_seconds(self) -> float:
        """Those of them that are known to be the CPU's."""
        return self._fork.seconds if self._fork.is_timed else self._fork.cpu_seconds

    def clear_seconds(self) -> None:
        """Forget them: where a table has the text's rows, ``fork`` may not be called for long."""
        self._fork.seconds = self._fork.cpu_seconds = 0.0

    @property
    def has_budget(self) -> bool:
        """Whether its grammar makes the text end in time, as long as a path to an end is known."""
        return self._original.budget is not None

    @property
    def num_tabled(self) -> int:
        """Committed tokens that a table judged, and no matcher was asked about."""
        unread = 0 if self._place is None else len(self.committed) - self._num_read
        return self._original.num_tabled + unread

    def table_state(self, ahead: int) -> TableState | None:
        """Where the committed text stands in a table that has its rows, up to ``ahead`` tokens on.

        None where one of these rows may be another than the table's. Costs little: the matchers
        need not have read the last tokens.
        """
        if self.has_row:
            return None
        place = self._place
        if place is None or (place.room < ahead and not place.reaches(ahead)):
            place, unread = self._original.table_state(), self.committed[self._num_read :]
            is_there = place is not None and place.advance(unread) and place.reaches(ahead)
            self._place = place = place if is_there else None
        return place

    def may_end(self) -> bool:
        """Whether the committed text is complete: it has ended, or a stop token may come next."""
        if self._read_committed() is not None:
            return False
        matcher = self._original
        return matcher.is_terminated() or any(map(matcher.fork().accept_token, self._ends or ()))

    def fork(self) -> Fork:
        """The fork, standing at the end of the committed text. The previous draft is forgotten."""
        fork = self._fork
        began = fork.clock()
        self._advance_fork()
        fork = self._fork
        fork.rollback_to(0)
        fork.begin()
        fork.seconds, fork.cpu_seconds = fork.clock() - began, 0.0
        return fork

    def prepare(self, num_words: int) -> None:
        """Bring both matchers to the end of the committed text, and fill the row after it.

        num_words: W of the row. May be called on another thread than those of the steps, while
        nobody else calls anything of this constraint.
        """
        fork = self.fork()
        self._read_committed()
        if self._failure is None and not fork.is_terminated:
            row = torch.full((1, num_words), -1, dtype=torch.int32)
            fork.row_source.fill_next_token_bitmask(row, 0)
            fork.kept = KeptRow(row[0])

    def commit(self, token_ids: Sequence[int]) -> list[int]:
        """Advance the original; returns the tokens up to the one that ended the text.

        Where a matcher refuses a token, both are rebuilt once from the committed tokens and asked
        again. Raises GrammarStateError when the new one refuses a token too: the text is then no
        longer inside the grammar, and the request cannot go on. So it is with a matcher at fault.
        """
        if (failure := self._read_committed()) is not None:
            raise failure
        original, fork = self._original, self._fork
        taken = list(token_ids[: original.read(token_ids)])
        if self._may_fail:
            _require_working(original, fork.matcher)
        is_refused = len(taken) < len(token_ids) and not original.is_terminated()
        if (
            is_refused
            or fork.advance(taken) < len(taken)
            # A fork that takes the text for complete fills no more masks: nothing would be illegal.
            or fork.is_terminated != original.is_terminated()
        ):
            taken = self._resync(token_ids)
        start = len(self.committed)
        self.committed.extend(taken)
        self._num_read = self._num_fork_read = len(self.committed)
        self._place = None
        self.is_terminated = self._original.is_terminated()
        self._commit_fork(fork, start)
        return taken

    def commit_ahead(self, token_ids: Sequence[int]) -> list[int]:
        """``commit``, but the matchers read the tokens later: the fork when it is asked for.

        So it costs next to nothing. Only where no token can end the text; every other text is
        committed at once, as is that of a matcher that can be at fault. Raises what ``catch_up``
        would have returned, too. Call it after ``catch_up``, or the unread tokens pile up.
        """
        place = self._place
        if place is None:
            self._read_committed()
        if self._failure is not None:
            raise self._failure
        if place is None or self._may_fail or not place.advance(token_ids):
            self._place = None
            may_end = self._ends is None or not self._ends.isdisjoint(token_ids)
            if may_end or self._may_fail or not token_ids:
                return self.commit(token_ids)
        self.committed.extend(token_ids)
        return list(token_ids)

    def take_back(self, count: int) -> None:
        """The last ``count`` committed tokens are no part of the text: it ended before them."""
        if count == 0 or self._read_committed() is not None:
            return
        length = len(self.committed) - count
        del self.committed[length:]
        self._num_read = self._num_fork_read = length
        self._fork.rollback_to(0)
        for matcher in (self._original, self._fork.matcher):
            matcher.rollback(count)
        self._place = None
        self.steered = [at for at in self.steered if at < length]
        self.is_terminated = self._original.is_terminated()

    def restart(self, length: int) -> None:
        """Rebuild both matchers, after the first ``length`` committed tokens.

        For a step that raised, which may have left them in any state. Raises GrammarStateError
        where a new matcher refuses one of these tokens.
        """
        del self.committed[length:]
        self.steered = [at for at in self.steered if at < length]
        self._failure = None
        self._resync(())

    def catch_up(self) -> GrammarStateError | None:
        """Bring both matchers to the end of the committed text; returns why that cannot be.

        Where one refuses a token, both are rebuilt, as by ``commit``. Those of a text whose table
        gives its state may lag.
        """
        if self._place is None:
            fork = self._fork
            began = fork.clock()
            self._read_committed()
            fork = self._fork
            fork.seconds += fork.clock() - began
        elif len(self.committed) - self._num_read >= MOST_UNREAD:
            self._advance_original()  # nobody may ever ask for the fork
        return self._failure

    def _read_committed(self) -> GrammarStateError | None:
        """``catch_up`` of both, in any case."""
        self._advance_fork()
        self._advance_original()
        return self._failure

    def _advance_original(self) -> None:
        """Bring the original to the end of the committed text."""
        behind = self.committed[self._num_read :]
        if behind:
            self._num_read = len(self.committed)
            is_refused = self._original.read(behind) < len(behind)
            if is_refused or self._original.is_terminated():
                self._rebuild()

    def _advance_fork(self) -> None:
        """Bring the fork to the end of the committed text."""
        start = self._num_fork_read
        behind = self.committed[start:]
        if not behind:
            return
        self._num_fork_read = len(self.committed)
        fork, is_refused = self._fork, False
        if fork.token_ids or len(behind) <= MOST_UNREAD + len(self.committed) // READ_BY_A_COPY:
            is_refused = fork.advance(behind) < len(behind)
        else:  # it has no draft: one of the original's stands there, too
            self._commit_fork_safely(fork, start)
            self._advance_original()
            fork = self._fork
            fork.matcher = self._original.fork()
        self._commit_fork_safely(fork, start)
        if is_refused or fork.is_terminated:
            self._rebuild()

    def _commit_fork_safely(self, fork: Fork, start: int) -> None:
        """``_commit_fork`` of a text that is committed; why that cannot be is kept."""
        try:
            self._commit_fork(fork, start)
        except GrammarStateError as error:
            self._failure = error

    def _commit_fork(self, fork: Fork, start: int) -> None:
        """Commit the draft of ``fork``, from ``start`` on.

        It filled the rows, and still knows those of the committed path. Raises GrammarStateError
        where it knows no path to the end of a text that must be complete.
        """
        fork.commit()
        if fork.is_alone:
            return
        matcher = fork.matcher
        if steered := matcher.steered:
            self.steered.extend(at for at in range(start, len(self.committed)) if at in steered)
        if matcher.has_lost_end and not self.has_lost_end:
            self._lose_end("no path to the end of the text within max_tokens is known")

    def _lose_end(self, reason: str) -> None:
        self.has_lost_end = True
        reason = f"{reason}, after output token {len(self.committed)}"
        if (budget := self._original.budget) is not None and budget.is_required:
            fix = "complete=True requires complete texts: allow more tokens, or pass complete=None"
            raise GrammarStateError(f"{reason}; {fix}")
        _LOG.warning("%s; it may be cut off", reason)

    def _rebuild(self) -> None:
        """``_resync`` of a text that is committed; why that cannot be is kept for ``catch_up``."""
        try:
            self._resync(())
        except GrammarStateError as error:
            self._failure = error

    def _resync(self, token_ids: Sequence[int]) -> list[int]:
        """Rebuild both matchers and bring them to the end of ``token_ids``; returns these."""
        text = [*self.committed, *token_ids]
        matcher = as_matcher(self.compiled.new_matcher())
        end = self._read(matcher, text)
        if end < len(text) and (budget := matcher.budget) is not None:
            # The budget is what refuses it, perhaps: the text goes on without one.
            own, refused = as_matcher(budget.grammar.new_matcher()), text[end]
            if self._read(own, text) == len(text):
                self._lose_end(f"the budget refuses token {refused}, which its row allowed")
                self.compiled, matcher, end = budget.grammar, own, len(text)
        if end < len(text):
            reason = f"the grammar refuses token {text[end]} at output position {end}"
            raise GrammarStateError(f"{reason}, which is committed; so does a new matcher")
        self._original, self._may_fail = matcher, matcher.may_fail
        self.is_terminated = matcher.is_terminated()
        before, self._fork = self._fork, Fork(matcher.fork(), self.compiled.excluded)
        self._fork.clock, self._fork.seconds = before.clock, before.seconds
        self._num_read = self._num_fork_read = len(self.committed)
        self._place = None
        self.resyncs += 1
        return text[len(self.committed) : end]

    def _read(self, matcher: Matcher, text: list[int]) -> int:
        """How many tokens of ``text`` a new matcher takes; what follows its end is cut off."""
        end = matcher.read(text)
        _require_working(matcher)
        if matcher.is_terminated() and end >= len(self.committed):
            del text[end:]
        return end


def _require_working(*matchers: Matcher) -> None:
    for matcher in matchers:
        if matcher.fault is not None:
            raise GrammarStateError(matcher.fault)
