"""One request's text in its grammar: the original, and a fork that is ahead of it by a draft.

Both are texts of their own. The original accepts committed tokens only. The fork accepts drafts;
it is made once per request and rolled back, because to fork copies the whole history while to roll
back does not.

The committed tokens are the truth: a text that disagrees with them is made anew. Where they do not
end the text, original and fork may accept them later, while the next step runs on the device, and
some steps later still where a table gives the text's state. The fork is not needed there, nor in
steps that draft nothing, where the original fills the row: it is copied from the original when it
is needed and has missed many tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.protocol import CompiledGrammar, RowSource
from guided_spec.grammar.tables.token_table import TableState
from guided_spec.grammar.text.state import TextState, new_text

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
    """A text, of whose tokens the last ones are a draft and may be taken back.

    text: committed tokens, and the draft. start: how many of them are committed.
    kept: the row of the committed text, where that was filled before; None where it was not.
    is_timed: whether the CPU time of its own rows counts, else that of a clock. seconds: that its
    text took in this step. cpu_seconds: those of them that are known to be the CPU's.
    """

    def __init__(self, text: TextState, start: int = 0) -> None:
        self.text = text
        self.start = start
        self.kept: KeptRow | None = None
        self.is_timed = False
        self.seconds = self.cpu_seconds = 0.0

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the draft, after the committed ones."""
        return self.text.token_ids[self.start :]

    @property
    def depth(self) -> int:
        """Tokens of the draft."""
        return len(self.text.token_ids) - self.start

    def now(self) -> float:
        """Seconds, by the clock that counts."""
        return time.thread_time() if self.is_timed else time.perf_counter()

    @property
    def row_source(self) -> RowSource:
        """What fills the next row."""
        return self.text if self.kept is None or self.depth else self.kept

    def rollback_to(self, depth: int) -> None:
        """Go back until only the first ``depth`` tokens of the draft are left."""
        self.text.rollback_to(self.start + depth)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Accept ``token_ids`` in place of the draft, as far as the grammar allows them.

        Returns how many of them it took: it stops at one that is refused, and at the text's end.
        """
        text, start, agreed = self.text, self.start, 0
        for wanted, drafted in zip(token_ids, text.token_ids[start:], strict=False):
            if wanted != drafted:
                break
            agreed += 1
        text.rollback_to(start + agreed)
        return agreed + text.accept_tokens(token_ids[agreed:])

    def commit(self) -> None:
        """The draft is committed: it cannot be taken back any more."""
        self.start = len(self.text.token_ids)
        self.kept = None


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
        self._original = new_text(compiled)
        self.is_terminated = self._original.is_terminated()
        self._fork = self._used = Fork(self._original.fork())
        self._plain = Fork(self._original)  # never has a draft
        self._num_noted = 0  # committed tokens whose rows ``steered`` knows of
        self._place: TableState | None = None  # of the committed text, as long as that is enough
        self._failure: GrammarStateError | None = None

    @property
    def has_row(self) -> bool:
        """Whether ``prepare`` has filled the row after the committed text."""
        return self._fork.kept is not None

    @property
    def is_timed(self) -> bool:
        """As of its fork: whether ``seconds`` are the CPU's."""
        return self._used.is_timed

    @is_timed.setter
    def is_timed(self, is_timed: bool) -> None:
        self._fork.is_timed = self._plain.is_timed = is_timed

    @property
    def seconds(self) -> float:
        """What its matchers took since ``fork`` or ``undrafted`` was called last, by a clock; where
        rows were filled with those of others, at least so much.
        """
        return self._used.seconds

    @property
    def cpu_seconds(self) -> float:
        """Those of them that are known to be the CPU's."""
        return self._used.seconds if self._used.is_timed else self._used.cpu_seconds

    def clear_seconds(self) -> None:
        """Forget them: where a table has the text's rows, ``fork`` may not be called for long."""
        self._used.seconds = self._used.cpu_seconds = 0.0

    @property
    def has_budget(self) -> bool:
        """Whether its grammar makes the text end in time, as long as a path to an end is known."""
        return self._original.budget is not None

    @property
    def num_tabled(self) -> int:
        """Committed tokens that a table judged, and no matcher was asked about."""
        unread = 0 if self._place is None else len(self._unread)
        return self._original.num_tabled + unread

    def table_state(self, ahead: int) -> TableState | None:
        """Where the committed text stands in a table that has its rows, up to ``ahead`` tokens on.

        None where one of these rows may be another than the table's. Costs little: the matchers
        need not have read the last tokens.
        """
        if self.has_row:
            return None
        place = self._place
        if place is None or (place.reach < ahead and not place.reaches(ahead)):
            place, unread = self._original.table_state(), self._unread
            is_there = place is not None and place.advance(unread) and place.reaches(ahead)
            self._place = place = place if is_there else None
        return place

    def may_end(self) -> bool:
        """Whether the committed text is complete: it has ended, or a stop token may come next."""
        if self._read_committed() is not None:
            return False
        text = self._original
        return text.is_terminated() or any(map(text.fork().accept_token, self._ends or ()))

    def fork(self) -> Fork:
        """The fork, standing at the end of the committed text. The previous draft is forgotten."""
        began = self._fork.now()
        self._used = self._fork
        self._advance_fork()
        fork = self._fork
        fork.rollback_to(0)
        fork.seconds, fork.cpu_seconds = fork.now() - began, 0.0
        return fork

    def undrafted(self) -> Fork:
        """``fork``, for a step that drafts nothing: the original, or the row of ``prepare``.

        So a token is read once. The fork lags behind until it is asked for again.
        """
        if self._used is not self._plain:
            fork = self.fork()
            if fork.kept is not None or self._failure is not None:
                return fork
        began = self._plain.now()
        self._advance_original()
        plain = self._used = self._plain
        plain.commit()
        plain.seconds, plain.cpu_seconds = plain.now() - began, 0.0
        return plain

    def prepare(self, num_words: int) -> None:
        """Bring original and fork to the end of the committed text, and fill the row after it.

        num_words: W of the row. May be called on another thread than those of the steps, while
        nobody else calls anything of this constraint.
        """
        fork = self.fork()
        self._read_committed()
        if self._failure is None and not fork.text.is_terminated():
            row = torch.full((1, num_words), -1, dtype=torch.int32)
            fork.text.fill_next_token_bitmask(row, 0)
            fork.kept = KeptRow(row[0])

    def commit(self, token_ids: Sequence[int]) -> list[int]:
        """Advance the original; returns the tokens up to the one that ended the text.

        Where original or fork refuses a token, both are made anew from the committed tokens and
        asked again. Raises GrammarStateError when the new one refuses a token too: the text is then
        no longer inside the grammar, and the request cannot go on. So it is where the library's
        matcher is at fault.
        """
        if (failure := self._read_committed()) is not None:
            raise failure
        original = self._original
        taken = list(token_ids[: original.accept_tokens(token_ids)])
        _require_working(original, self._used.text)
        is_refused = len(taken) < len(token_ids) and not original.is_terminated()
        if is_refused or (self._used is self._fork and self._fork_parts(taken)):
            taken = self._resync(token_ids)
        self.committed.extend(taken)
        self._place = None
        self.is_terminated = self._original.is_terminated()
        self._used.commit()
        self._note_rows()
        return taken

    def _fork_parts(self, taken: list[int]) -> bool:
        """Advance the fork, too; whether it disagrees with the original."""
        fork, is_over = self._fork, self._original.is_terminated()
        # One that takes the text for complete fills no more masks: nothing would be illegal.
        return fork.advance(taken) < len(taken) or fork.text.is_terminated() != is_over

    def commit_ahead(self, token_ids: Sequence[int]) -> list[int]:
        """``commit``, but original and fork accept the tokens later.

        So it costs next to nothing. Only where no token can end the text; every other text is
        committed at once, as is that of a matcher that can be at fault. Raises what ``catch_up``
        would have returned, too. Call it after ``catch_up``, or the unread tokens pile up.
        """
        place = self._place
        if place is None:
            self._read_committed()
        if self._failure is not None:
            raise self._failure
        may_fail = self._original.may_fail
        if place is None or may_fail or not place.advance(token_ids):
            self._place = None
            may_end = self._ends is None or not self._ends.isdisjoint(token_ids)
            if may_end or may_fail or not token_ids:
                return self.commit(token_ids)
        self.committed.extend(token_ids)
        return list(token_ids)

    def take_back(self, count: int) -> None:
        """The last ``count`` committed tokens are no part of the text: it ended before them."""
        if count == 0 or self._read_committed() is not None:
            return
        length = len(self.committed) - count
        del self.committed[length:]
        self._advance_fork()
        for text in (self._original, self._fork.text):
            text.rollback_to(length)
        self._fork.start = length
        self._place = None
        self._forget_rows(length)
        self.is_terminated = self._original.is_terminated()

    def restart(self, length: int) -> None:
        """Make original and fork anew, after the first ``length`` committed tokens.

        For a step that raised, which may have left them in any state. Raises GrammarStateError
        where a new matcher refuses one of these tokens.
        """
        del self.committed[length:]
        self._forget_rows(length)
        self._failure = None
        self._resync(())

    def catch_up(self) -> GrammarStateError | None:
        """Bring original and fork to the end of the committed text; returns why that cannot be.

        Where one refuses a token, both are made anew, as by ``commit``. They may lag in a text
        whose table gives its state, and the fork after ``undrafted``.
        """
        if self._place is None:
            began = self._used.now()
            self._read_committed()
            self._used.seconds += self._used.now() - began
        elif len(self._unread) >= MOST_UNREAD:
            self._advance_original()  # nobody may ever ask for the fork
        return self._failure

    def _read_committed(self) -> GrammarStateError | None:
        """``catch_up``, in any case."""
        if self._used is self._fork:
            self._advance_fork()
        self._advance_original()
        return self._failure

    @property
    def _unread(self) -> list[int]:
        """Committed tokens that the original has not accepted yet."""
        return self.committed[len(self._original.token_ids) :]

    def _advance_original(self) -> None:
        """Bring the original to the end of the committed text."""
        original = self._original
        unread = self.committed[len(original.token_ids) :]
        if unread:
            is_refused = original.accept_tokens(unread) < len(unread)
            if self._used is self._plain:
                self._note_rows_safely()
            if is_refused or original.is_terminated():
                self._rebuild()

    def _advance_fork(self) -> None:
        """Bring the fork to the end of the committed text."""
        fork, start = self._fork, self._fork.start
        unread = self.committed[start:]
        if not unread:
            return
        is_refused = False
        if fork.depth or len(unread) <= MOST_UNREAD + len(self.committed) // READ_BY_A_COPY:
            is_refused = fork.advance(unread) < len(unread)
        else:  # it has no draft: one of the original's stands there, too
            self._note_rows_safely()
            self._advance_original()
            fork = self._fork
            fork.text = self._original.fork()
        fork.commit()
        self._note_rows_safely()
        if is_refused or fork.text.is_terminated():
            self._rebuild()

    def _note_rows_safely(self) -> None:
        """``_note_rows`` of a text that is committed; why that cannot be is kept."""
        try:
            self._note_rows()
        except GrammarStateError as error:
            self._failure = error

    def _note_rows(self) -> None:
        """Note what rows of the committed text lacked; the last row of each was the original's, or
        the fork's.

        Raises GrammarStateError where no path to the end of a text is known that must be complete.
        """
        text, drafted, length = self._original, self._fork.text, len(self.committed)
        if text.steered or drafted.steered:
            new = range(self._num_noted, length)
            self.steered.extend(at for at in new if at in text.steered or at in drafted.steered)
        self._num_noted = length
        if self._used.text.has_lost_end and not self.has_lost_end:
            self._lose_end("no path to the end of the text within max_tokens is known")

    def _forget_rows(self, length: int) -> None:
        """Of all tokens but the first ``length``."""
        self.steered = [at for at in self.steered if at < length]
        self._num_noted = min(self._num_noted, length)

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
        """Make both anew and bring them to the end of ``token_ids``; returns these."""
        wanted = [*self.committed, *token_ids]
        text = new_text(self.compiled)
        end = self._accept(text, wanted)
        if end < len(wanted) and (budget := text.budget) is not None:
            # The budget is what refuses it, perhaps: the text goes on without one.
            own, refused = new_text(budget.grammar), wanted[end]
            if self._accept(own, wanted) == len(wanted):
                self._lose_end(f"the budget refuses token {refused}, which its row allowed")
                self.compiled, text, end = budget.grammar, own, len(wanted)
        if end < len(wanted):
            reason = f"the grammar refuses token {wanted[end]} at output position {end}"
            raise GrammarStateError(f"{reason}, which is committed; so does a new matcher")
        self._original = text
        self.is_terminated = text.is_terminated()
        before, self._fork = self._used, Fork(text.fork(), len(self.committed))
        self._used, self._plain = self._fork, Fork(text)
        self.is_timed, self._fork.seconds = before.is_timed, before.seconds
        self._place = None
        self.resyncs += 1
        return wanted[len(self.committed) : end]

    def _accept(self, text: TextState, wanted: list[int]) -> int:
        """How many tokens of ``wanted`` a new text takes; what follows its end is cut off."""
        end = text.accept_tokens(wanted)
        _require_working(text)
        if text.is_terminated() and end >= len(self.committed):
            del wanted[end:]
        return end


def _require_working(*texts: TextState) -> None:
    for text in texts:
        if text.fault is not None:
            raise GrammarStateError(text.fault)
