"""One text in one grammar: the only owner of its tokens, and the row of what may come next.

A text is judged by the library's matcher, or by a table where the grammar has one, and before a
marker by the marker. Filters take further tokens out of the rows: they hold no tokens and no
matcher, and are asked only where they may forbid something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import ConfigError, GrammarStateError
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher, Matcher
from guided_spec.grammar.tables.token_table import (
    ENDED,
    OUTSIDE,
    REFUSED,
    UNBOUND,
    TableState,
    TokenTable,
)
from guided_spec.grammar.text.parts import Budget, TextParts, new_parts
from guided_spec.grammar.text.row_filter import Mark, RowFilter


def new_text(compiled: CompiledGrammar) -> TextState:
    """A text at the start of a grammar."""
    return TextState.begin(new_parts(compiled))


@dataclass(frozen=True, eq=False)  # without slots, which leave no room for weak references
class WrappedGrammar:
    """A grammar around another one, ``inner``, whose size and whitespace style are its own."""

    inner: CompiledGrammar

    @property
    def excluded(self) -> frozenset[int]:
        """Of the one inside."""
        return self.inner.excluded

    @property
    def memory_size_bytes(self) -> int:
        """Of the one inside."""
        return self.inner.memory_size_bytes

    def new_parts(self) -> TextParts:
        """Those of the one inside, with what this grammar adds."""
        raise NotImplementedError

    def new_matcher(self) -> TextState:
        """A text at the start of the grammar."""
        return TextState.begin(self.new_parts())

    def new_style_matcher(self) -> GrammarMatcher | None:
        """The one inside's: drafts are cut where this grammar refuses them."""
        return self.inner.new_style_matcher()


class TextState:
    """A text, token by token; a ``GrammarMatcher`` itself. Used by one thread at a time.

    Made by ``begin``.

    token_ids: the text so far. Read only.
    steered: lengths of the text at which a row was filled that lacks tokens for the budget.
    """

    def __init__(self, parts: TextParts) -> None:
        self.token_ids: list[int] = []
        self.steered: set[int] = set()
        self._parts = parts
        self._filters: list[RowFilter] = [*parts.filters]
        if parts.limit is not None:
            self._filters.append(parts.limit)
        self._wakes = [one.wakes for one in self._filters]
        self._alarms = [wakes for wakes in self._wakes if wakes]
        # Of each filter, by ``at``; none before the grammar has begun.
        self._marks: list[list[Mark]] = [[] for _ in self._filters]
        self._until = UNBOUND  # the least of the last marks
        # Whether the library's matcher stands at the end of the text and judges the next token,
        # and the tokens are known that end a text: most are so, and cost little then.
        self._is_plain = False
        self._start: int | None = None  # tokens before the grammar begins
        self._states = [0]  # of the preamble, before every token and after the last one
        self._own: GrammarMatcher | None = None  # the library's
        self._own_more: Matcher | None = None  # the same, where it can be asked more
        self._num_unread = 0  # tokens at the end that it has not accepted
        self._awaited = parts.tabled  # until its table is there
        self._table: TokenTable | None = None
        self._table_states: list[int] = []  # before every token of the grammar, and after the last
        self._since = 0  # tokens of the grammar before the table came

    @classmethod
    def begin(cls, parts: TextParts) -> TextState:
        """A text without tokens."""
        text = cls(parts)
        if parts.tabled is None:
            text._hold(parts.new_matcher())
        if parts.limit is not None:
            text._marks[-1].append(parts.limit.start(0))
        if parts.preamble is None or parts.preamble.end == 0:
            text._bind()
        text._update()
        return text

    @property
    def is_bound(self) -> bool:
        """Whether the grammar rules: no marker is missing."""
        return self._start is not None

    @property
    def budget(self) -> Budget | None:
        """What the text ends within; None where it may have any length."""
        return self._parts.budget

    @property
    def has_lost_end(self) -> bool:
        """Whether there is a budget, and no path to an end of the text within it is known."""
        return self._parts.limit is not None and self._marks[-1][-1].state is None

    @property
    def fault(self) -> str | None:
        """Why no more can be expected of the library's matcher; None while it works."""
        return None if self._own_more is None else self._own_more.fault

    @property
    def may_fail(self) -> bool:
        """Whether it can ever have a ``fault``."""
        return self._own_more is not None and self._own_more.may_fail

    @property
    def num_tabled(self) -> int:
        """Tokens of the text that a table judged, see ``guided_spec.grammar.tables``."""
        return sum(state >= 0 for state in self._table_states[self._since : -1])

    @property
    def own_matcher(self) -> GrammarMatcher | None:
        """The library's matcher, if it fills the next row; None where a table or a marker does.

        Rows of many matchers may be filled in one call; ``restrict`` completes them.
        """
        if self._is_plain and (self._awaited is None or self._awaited.table is None):
            return self._own
        return self._read() if self._start is not None and self._state() == OUTSIDE else None

    @property
    def is_restricted(self) -> bool:
        """Whether filters may forbid more than the library's matcher in the next row."""
        return len(self.token_ids) >= self._until

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        if len(self.token_ids) + 1 >= self._until:
            return self._advance(token_id, len(self._filters))
        for wakes in self._alarms:
            if token_id in wakes:
                return self._advance(token_id, len(self._filters))
        return self._take(token_id)

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the end of the text or the first refused one; returns how many."""
        table = self._table
        if table is not None and self._table_states[-1] >= 0 and not self._filters_see(token_ids):
            states = table.states(self._table_states[-1], token_ids)
            count = len(states)
            self._table_states += states
            self.token_ids += token_ids[:count]
            self._num_unread += count
            token_ids = token_ids[count:]
        else:
            count = 0
        stops, accept = self._parts.stops, self.accept_token
        is_over = self.is_terminated()
        for token_id in token_ids:
            if is_over or not accept(token_id):
                break
            count += 1
            is_over = self.is_terminated() if stops is None else token_id in stops
        return count

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens. Raises ConfigError if there are fewer."""
        if not 0 <= num_tokens <= len(self.token_ids):
            fix = f"must be between 0 and {len(self.token_ids)}, the tokens accepted so far"
            raise ConfigError("num_tokens", num_tokens, fix)
        self.rollback_to(len(self.token_ids) - num_tokens)

    def rollback_to(self, length: int) -> None:
        """Go back to the first ``length`` tokens; nothing where there are no more."""
        surplus = len(self.token_ids) - length
        if surplus <= 0:
            return
        del self.token_ids[length:]
        start, own = self._start, self._own
        if self._is_plain and own is not None and start is not None and length >= start:
            own.rollback(surplus)
        else:
            self._rollback_others(length, surplus)
        if self.steered:  # the row of the position that is left now stays as it was
            self.steered = {at for at in self.steered if at <= length}
        is_changed = start is not self._start
        for marks in self._marks:
            while marks and marks[-1].at > length:
                marks.pop()
                is_changed = True
        if is_changed:
            self._update()

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        start, stops = self._start, self._parts.stops
        if start is None:
            return False
        has_begun = len(self.token_ids) > start
        if not self._is_plain and (state := self._state()) != OUTSIDE:
            return state == ENDED
        if stops is not None and has_begun:
            return self.token_ids[-1] in stops
        if self._parts.preamble is not None and not has_begun:
            return False
        return self._read().is_terminated()

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        return self._fill(bitmask, index, len(self._filters))

    def restrict(self, row: NDArray[np.int32]) -> None:
        """Take what filters forbid out of the next row, int32 [W], as ``own_matcher`` filled it."""
        self._restrict(row, len(self._filters))

    def fork(self) -> TextState:
        """An independent copy at the same position."""
        state = OUTSIDE if self._start is None else self._state()
        copy = TextState(self._parts.fork())
        copy.token_ids, copy.steered = self.token_ids.copy(), self.steered.copy()
        copy._marks = [marks.copy() for marks in self._marks]
        copy._start, copy._states = self._start, self._states.copy()
        copy._awaited, copy._table, copy._since = self._awaited, self._table, self._since
        copy._table_states = self._table_states.copy()
        if self._own is not None and state == OUTSIDE:
            copy._hold(self._own.fork())
            copy._num_unread = self._num_unread
        elif self._start is not None:
            copy._num_unread = len(self.token_ids) - self._start
        copy._update()
        return copy

    def table_state(self) -> TableState | None:
        """Where the text stands in a table; None where its rows may be others than the table's.

        The caller's own, who may move it on.
        """
        state = OUTSIDE if self._start is None else self._state()
        if self._table is None or state < 0:
            return None
        found = TableState(self._table, state)
        for one, marks in zip(self._filters, self._marks, strict=True):
            left = one.tokens_left(marks[-1], len(self.token_ids))
            if left is None:
                return None
            found.spare = min(found.spare, left)
        return found

    def without_budget(self) -> TextProbe:
        """The text as the grammar alone sees it; whoever moves it, moves it back."""
        return TextProbe(self, len(self._parts.filters))

    def _filters_see(self, token_ids: Sequence[int]) -> bool:
        """Whether any filter has to look at one of the next tokens."""
        if len(self.token_ids) + len(token_ids) >= self._until:
            return True
        return not all(wakes.isdisjoint(token_ids) for wakes in self._alarms)

    def _advance(self, token_id: int, count: int) -> bool:
        """``accept_token``, as the first ``count`` filters see the text."""
        then, marks = len(self.token_ids) + 1, self._marks
        asked = [
            at
            for at in range(count)
            if marks[at] and (then >= marks[at][-1].until or token_id in self._wakes[at])
        ]
        for at in asked:
            if not self._filters[at].admits(marks[at][-1], token_id, TextProbe(self, at)):
                return False
        if not self._take(token_id):
            return False
        for at in asked:
            mark = self._filters[at].after(marks[at][-1], TextProbe(self, at))
            if mark is None:
                self.rollback_to(then - 1)
                return False
            if mark is not marks[at][-1]:
                marks[at].append(mark)
        if asked:
            self._update()
        return True

    def _take(self, token_id: int) -> bool:
        """Advance by one token whatever filters say; False, and no change, where it is refused."""
        parts, own = self._parts, self._own
        is_out = not 0 <= token_id < parts.vocab_size or token_id in parts.excluded
        awaited = self._awaited
        if self._is_plain and own is not None and (awaited is None or awaited.table is None):
            if is_out or not own.accept_token(token_id):
                return False
            self.token_ids.append(token_id)
            return True
        if self._start is None:
            return self._take_free(token_id)
        if is_out:
            return False
        state = self._state()
        if state == OUTSIDE:
            if not self._read().accept_token(token_id):
                return False
            then = OUTSIDE
        else:
            then = self._look_up(state, token_id)
            if then == REFUSED:
                return False
            self._num_unread += 1
        if self._table is not None:
            self._table_states.append(then)
        self.token_ids.append(token_id)
        return True

    def _look_up(self, state: int, token_id: int) -> int:
        """The table's state after a token, which may be ``REFUSED``."""
        table = self._table
        assert table is not None
        if state == ENDED or not 0 <= token_id < len(table.classes):
            return REFUSED
        return table.after(state, int(token_id))

    def _take_free(self, token_id: int) -> bool:
        """A token before the grammar begins."""
        preamble = self._parts.preamble
        assert preamble is not None
        state = preamble.after(self._states[-1], token_id, len(self.token_ids))
        if state is None:
            return False
        self._states.append(state)
        self.token_ids.append(token_id)
        if state == preamble.end:
            self._bind()
            self._update()
        return True

    def _bind(self) -> None:
        """The grammar begins here."""
        self._start = len(self.token_ids)
        self._table_states = [] if self._table is None else [0]
        for one, marks in zip(self._parts.filters, self._marks, strict=False):
            marks.append(one.start(self._start))

    def _rollback_others(self, length: int, surplus: int) -> None:
        """Bring all but the tokens back, where the library's matcher does not judge alone."""
        if self._start is not None:
            self._rollback_grammar(length - self._start, surplus)
        if self._start is None:
            del self._states[length + 1 :]

    def _rollback_grammar(self, length: int, surplus: int) -> None:
        """Go back to the first ``length`` tokens of the grammar; below 0 it has not begun."""
        own = min(surplus, surplus + length)  # of its tokens
        if self._own is not None and own > self._num_unread:
            self._own.rollback(own - self._num_unread)
        self._num_unread = max(0, self._num_unread - own)
        if self._table is not None:
            del self._table_states[max(length, 0) + 1 :]
        if length < 0:
            self._start = None

    def _fill(self, bitmask: Any, index: int, count: int) -> bool:
        """``fill_next_token_bitmask``, as the first ``count`` filters see the text."""
        forbids = self._fill_unfiltered(bitmask, index)
        if len(self.token_ids) >= self._until:
            row: NDArray[np.int32] = np.asarray(bitmask)[index]  # a view, also of a tensor
            forbids = self._restrict(row, count) or forbids
        return forbids

    def _fill_unfiltered(self, bitmask: Any, index: int) -> bool:
        if self._start is None:
            preamble = self._parts.preamble
            assert preamble is not None
            np.asarray(bitmask)[index] = preamble.row(self._states[-1], len(self.token_ids))
            return True
        state, table = self._state(), self._table
        if state == OUTSIDE or table is None:
            return self._read().fill_next_token_bitmask(bitmask, index)
        if state == ENDED:
            raise GrammarStateError("the text is complete: no token can follow")
        np.asarray(bitmask)[index] = table.row(state)
        return bool(table.forbids[table.row_of[state]])

    def _restrict(self, row: NDArray[np.int32], count: int) -> bool:
        """Returns whether any legal token was taken out of the row."""
        length, is_less = len(self.token_ids), False
        for at in range(count):
            marks = self._marks[at]
            if not marks or length < marks[-1].until:
                continue
            if self._filters[at].restrict(marks[-1], row, TextProbe(self, at)):
                is_less = True
                if at == len(self._parts.filters):
                    self.steered.add(length)
        return is_less

    def _update(self) -> None:
        until = UNBOUND
        for marks in self._marks:
            if marks and marks[-1].until < until:
                until = marks[-1].until
        self._until = until
        has_own = self._own is not None and self._num_unread == 0
        is_known = self._start is not None and self._parts.stops is not None
        self._is_plain = self._table is None and has_own and is_known

    def _state(self) -> int:
        """Where a text of the grammar stands in the table; ``OUTSIDE`` while there is none."""
        if self._awaited is not None and self._awaited.table is not None:
            self._go_over(self._awaited.table)
        return OUTSIDE if self._table is None else self._table_states[-1]

    def _go_over(self, table: TokenTable) -> None:
        """Go over to a table; the text so far is followed in it."""
        assert self._start is not None
        text = self.token_ids[self._start :]
        self._awaited, self._table, self._since = None, table, len(text)
        state, states = 0, [0]
        for token_id in text:
            state = table.after(state, token_id) if state >= 0 else OUTSIDE
            # What its matcher has taken is legal, whatever the table says.
            state = OUTSIDE if state == REFUSED else state
            states.append(state)
        self._table_states = states
        if state != OUTSIDE:
            self._own = self._own_more = None
            self._num_unread = len(text)
        self._update()

    def _hold(self, own: GrammarMatcher) -> None:
        self._own = own
        self._own_more = own if isinstance(own, Matcher) else None

    def _read(self) -> GrammarMatcher:
        """The library's matcher, after the text so far."""
        if self._own is not None and not self._num_unread:
            return self._own
        if self._own is None:
            assert self._start is not None
            self._hold(self._parts.new_matcher())
            self._num_unread = len(self.token_ids) - self._start
        own = self._own
        assert own is not None
        for token_id in self.token_ids[len(self.token_ids) - self._num_unread :]:
            if not own.accept_token(token_id):
                reason = f"refuses token {token_id}, which its table allows"
                raise GrammarStateError(f"the grammar's matcher {reason}")
            self._num_unread -= 1
        self._update()
        return own


class TextProbe:
    """A text as its first filters see it, for one who looks ahead: moved, it is moved back.

    count: of these filters.
    """

    def __init__(self, text: TextState, count: int) -> None:
        self._text = text
        self._count = count

    @property
    def token_ids(self) -> Sequence[int]:
        """The text so far. Read only."""
        return self._text.token_ids

    @property
    def unfiltered(self) -> TextProbe:
        """The same text without filters: its rows cost less, and may hold tokens refused here."""
        return TextProbe(self._text, 0)

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        return self._text._advance(token_id, self._count)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens."""
        self._text.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._text.is_terminated()

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        return self._text._fill(bitmask, index, self._count)

    def fork(self) -> TextProbe:
        """A probe of an independent copy."""
        return TextProbe(self._text.fork(), self._count)

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether all these tokens are accepted, no stop token before the last; does not move."""
        text, marks = self._text, self._text._marks
        more = text._own_more if text.own_matcher is not None else None
        if more is not None:
            is_taken = more.takes(token_ids)
        else:
            length = len(text.token_ids)
            is_taken = all(map(text._take, token_ids))
            text.rollback_to(length)
        filters = text._parts.filters[: self._count]
        return is_taken and all(
            one.takes(marks[at][-1], token_ids) for at, one in enumerate(filters) if marks[at]
        )

    def takes_each(self, texts: Sequence[Sequence[int]]) -> list[bool]:
        """``takes`` of each of them; most of its time is not the matcher's."""
        text = self._text
        more = text._own_more if text.own_matcher is not None else None
        if more is None or text._parts.filters[: self._count]:
            return list(map(self.takes, texts))
        return list(map(more.takes, texts))

    def interchangeable(self, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [W]: of some legal tokens those that others like them may stand for."""
        marks = self._text._marks
        for at, one in enumerate(self._text._parts.filters[: self._count]):
            if marks[at]:
                row = one.interchangeable(marks[at][-1], row)
        return row

    def forced_bytes(self) -> bytes:
        """What must come next in every text, as far as that is known; does not move."""
        more = self._text._own_more if self._text.own_matcher is not None else None
        return b"" if more is None else more.forced_bytes()


def probe(matcher: GrammarMatcher) -> TextProbe:
    """Any matcher as a text that one may look ahead in."""
    if isinstance(matcher, TextProbe):
        return matcher
    if not isinstance(matcher, TextState):
        matcher = TextState.begin(TextParts(lambda: matcher))
    return matcher.without_budget()
