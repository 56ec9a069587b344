"""Texts that end in time: a grammar and a number of tokens become a grammar of whole texts.

Let ``remaining`` be the tokens that a text may still get, and ``cost(s)`` a number of tokens within
which it can be ended from state s, the stop token among them. A token is legal if the grammar
allows it and ``cost`` after it is less than ``remaining``. Two things follow:

* Every text ends within its budget. At the start the cost is within the budget; a legal token keeps
  it so; and there always is one, since from every state some token leads to a state that costs less
  by one. With one token left the cost is 1: the stop token.
* Speculation stays exact. What is legal depends on the tokens before, and on the budget, not on
  how they were drafted: the matcher below is one like any other.

Far from the end every token fits, and the mask is the grammar's own (``Endings.is_free``). Where
costs are searched for, a text may lose its way to the end: the budget then steps aside, and refuses
nothing that the grammar allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import BudgetTooSmallError
from guided_spec.grammar.completion.endings import (
    NEVER,
    Endings,
    EndLostError,
    UnreadableGrammarError,
)
from guided_spec.grammar.completion.rule_endings import (
    ParseStates,
    ReadRules,
    RuleEndings,
    read_source,
)
from guided_spec.grammar.completion.rules import RuleSource, source_of
from guided_spec.grammar.completion.search import SearchEndings, SearchTokens
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.markers import AfterGrammar, AfterMatcher, Marker
from guided_spec.grammar.protocol import (
    Budget,
    CompiledGrammar,
    GrammarMatcher,
    Matcher,
    Source,
    WrappedGrammar,
    WrappedMatcher,
    legal_row,
)
from guided_spec.grammar.tables.tabled import TabledGrammar
from guided_spec.grammar.tables.token_table import TableState
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import full_row, pack_row


class _Free(NamedTuple):
    """Before the marker: the state of its automaton."""

    marker: int


class AfterEndings(Endings):
    """``Endings`` of an ``AfterGrammar``: the shortest way spells the marker, and then ends.

    inner: of the grammar after the marker. vocab_size: V.
    """

    def __init__(self, marker: Marker, inner: Endings, vocab_size: int) -> None:
        self._marker = marker
        self._inner = inner
        self.vocab_size, self.is_exact = vocab_size, inner.is_exact
        self._missing = [self._spelled(state) for state in range(len(marker) + 1)]
        self._after = inner.cost(inner.start)
        self._next: dict[int, NDArray[np.int32]] = {}

    @property
    def is_filling_up(self) -> bool:
        """As the inner grammar's are."""
        return self._inner.is_filling_up

    @property
    def memory_size_bytes(self) -> int:
        """The rows of the marker, and what the inner grammar's take."""
        return self._inner.memory_size_bytes + 4 * self.vocab_size * len(self._next)

    @property
    def start(self) -> Any:
        """Before any token."""
        return _Free(0) if len(self._marker) else self._inner.start

    def cost(self, state: Any) -> int:
        """Tokens within which the text can be ended: the rest of the marker, and the grammar's."""
        if not isinstance(state, _Free):
            return self._inner.cost(state)
        return min(NEVER, self._missing[state.marker] + self._after)

    def stride(self, state: Any, remaining: int) -> int:
        """Every token counts before the marker."""
        return 1 if isinstance(state, _Free) else self._inner.stride(state, remaining)

    def after(self, state: Any, token_ids: Sequence[int], matcher: GrammarMatcher) -> Any:
        """The state after some tokens, no stop token among them; None where no way is known."""
        if not isinstance(state, _Free):
            return self._inner.after(state, token_ids, _inside(matcher))
        (token_id,) = token_ids
        then = self._marker.step(state.marker, token_id)
        if then is None:
            return None
        return self._inner.start if then == len(self._marker) else _Free(then)

    def is_free(self, state: Any, remaining: int) -> bool:
        """Whether every token leads to a state that costs less than ``remaining``."""
        if not isinstance(state, _Free):
            return self._inner.is_free(state, remaining)
        return max(self._missing) + self._after < remaining

    def row(self, state: Any, remaining: int, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a state that costs less than ``remaining``."""
        if not isinstance(state, _Free):
            return self._inner.row(state, remaining, _inside(matcher))
        missing = self._next.get(state.marker)
        if missing is None:
            missing = self._next.setdefault(state.marker, self._missing_after(state.marker))
        return pack_row(missing < remaining - self._after)

    def admits(self, state: Any, token_id: int, remaining: int, matcher: GrammarMatcher) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        if not isinstance(state, _Free):
            return self._inner.admits(state, token_id, remaining, _inside(matcher))
        then = self._marker.step(state.marker, token_id)
        return then is not None and self._missing[then] + self._after < remaining

    def _spelled(self, state: int) -> int:
        """Tokens that spell the rest of the marker."""
        count = 0
        while state < len(self._marker):
            then = self._marker.step(state, self._marker.spelling[state])
            assert then is not None
            state, count = then, count + 1
        return count

    def _missing_after(self, state: int) -> NDArray[np.int32]:
        """int32 [V]: tokens that spell the rest of the marker after each token."""
        step, missing = self._marker.step, [*self._missing, NEVER]
        thens = (step(state, token) for token in range(self.vocab_size))
        return np.array([missing[-1 if then is None else then] for then in thens], dtype=np.int32)


def _inside(matcher: GrammarMatcher) -> Matcher:
    """The matcher of the grammar after the marker, which alone moves there."""
    assert isinstance(matcher, AfterMatcher)
    return matcher.inner


class EndingsCache:
    """The ``Endings`` of the grammars of one vocabulary; thread-safe.

    They live as long as their grammar, which somebody else keeps.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[CompiledGrammar, Endings] = WeakKeyDictionary()

    def of(
        self, compiled: CompiledGrammar, read: Callable[[RuleSource], ReadRules] | None = None
    ) -> Endings:
        """The endings of a grammar: made when it is first asked for, which takes milliseconds.

        read: as ``read_here``, which reads the grammar's rules where None is given.
        """
        with self._lock:
            known = self._known.get(compiled)
        # In time: a text that finds no room for its place loses its end, see ``EndLostError``.
        if known is not None and not known.is_filling_up:
            return known
        endings = self._make(compiled, read or self.read_here)
        with self._lock:
            self._known[compiled] = endings
        return endings

    def size_of(self, compiled: CompiledGrammar) -> int:
        """Bytes of a grammar's endings, as they are now."""
        with self._lock:
            known = self._known.get(compiled)
        inner = self.size_of(compiled.inner) if isinstance(compiled, AfterGrammar) else 0
        return max(inner, 0 if known is None else known.memory_size_bytes)

    def bound(
        self, compiled: CompiledGrammar, max_tokens: int, *, is_required: bool
    ) -> CompiledGrammar:
        """The grammar of its texts of at most ``max_tokens``.

        is_required: whether its texts must end in time. Else, where no end is known that is short
            enough and a shorter one may exist, the grammar is returned as it is.

        Raises BudgetTooSmallError where the shortest text is too long, or where it may be and
        ``is_required``.
        """
        endings = self.of(compiled)
        least = endings.cost(endings.start)
        is_lost = not is_required and (not endings.is_exact or least >= NEVER)
        if least > max_tokens and is_lost:
            return compiled
        return CompletingGrammar(compiled, endings, max_tokens, is_required=is_required)

    def read_here(self, source: RuleSource) -> ReadRules:
        """What a grammar's rules say, see ``read_source``."""
        return read_source(source, self.spelling)

    def _make(self, compiled: CompiledGrammar, read: Callable[[RuleSource], ReadRules]) -> Endings:
        if isinstance(compiled, TabledGrammar):
            return self.of(compiled.inner, read)
        if isinstance(compiled, AfterGrammar):
            inner = self.of(compiled.inner, read)
            return AfterEndings(compiled.marker, inner, self.vocabulary.vocab_size)
        endings = self._by_rules(compiled, read)
        if endings is not None:
            return endings
        return SearchEndings(compiled, self.vocabulary, self.spelling, self._tokens)

    @cached_property
    def spelling(self) -> Spelling:
        """Its tokens byte by byte."""
        return Spelling(self.vocabulary)

    @cached_property
    def _tokens(self) -> SearchTokens:
        return SearchTokens(self.vocabulary)

    def _by_rules(
        self, compiled: CompiledGrammar, read: Callable[[RuleSource], ReadRules]
    ) -> RuleEndings | None:
        """None where no rules are known or understood, or where they say something else."""
        try:
            shortest, first = read(source_of(compiled))
            endings = RuleEndings(ParseStates(shortest), self.spelling)
        except (UnreadableGrammarError, EndLostError):
            return None
        own = legal_row(compiled.new_matcher(), self.vocabulary.vocab_size)
        return endings if np.array_equal(first, own) else None


@dataclass(frozen=True, eq=False)
class CompletingGrammar(WrappedGrammar):
    """A compiled grammar whose texts end within ``max_tokens``, the stop token among them.

    is_required: whether a text that loses its way to the end is at fault; else it goes on without
    a budget.

    Raises BudgetTooSmallError where no text is known that is short enough.
    """

    endings: Endings
    max_tokens: int
    is_required: bool = False

    def __post_init__(self) -> None:
        least = self.endings.cost(self.endings.start)
        if least > self.max_tokens:
            raise BudgetTooSmallError(self.max_tokens, None if least >= NEVER else least)

    def new_matcher(self) -> CompletingMatcher:
        """A matcher at the start of the grammar, with the whole budget."""
        return CompletingMatcher(self, self.inner.new_matcher())


class _Known(NamedTuple):
    """Where a text stands, as far as that was asked for.

    state: of the endings; None once no way to the end is known. since: tokens before it. until:
    tokens before the next one that is asked for.
    """

    state: Any
    since: int
    until: int


class CompletingMatcher(WrappedMatcher):
    """A ``GrammarMatcher`` that keeps a way to the end of the text within the budget.

    inner: at the start of the grammar.

    A token is refused if the inner matcher refuses it, or if the row has no bit for it. Where no
    way to the end is known any more, the matcher steps aside: it is then the inner one.
    """

    def __init__(self, grammar: CompletingGrammar, inner: GrammarMatcher) -> None:
        self._endings = grammar.endings
        self._grammar = grammar
        super().__init__(inner)
        self._token_ids: list[int] = []
        self._known = [self._at(grammar.endings.start, 0)]
        self._steered: set[int] = set()

    @property
    def budget(self) -> Budget:
        """As the grammar was made with it."""
        return Budget(self._grammar.inner, self._grammar.is_required)

    @property
    def steered(self) -> Set[int]:
        """Positions in the text at which a row was filled that lacks tokens for the budget."""
        return self._steered

    @property
    def has_lost_end(self) -> bool:
        """Whether no way to the end of the text is known any more: it may be cut off."""
        return self._known[-1].state is None

    @property
    def remaining(self) -> int:
        """Tokens that the text may still get."""
        return self._grammar.max_tokens - len(self._token_ids)

    @property
    def row_source(self) -> GrammarMatcher:
        """The inner matcher's while every token fits the budget; else this one."""
        return self._inner.row_source if self._is_free() else self

    def table_state(self) -> TableState | None:
        """The inner matcher's, with what the budget leaves."""
        found, known = self._inner.table_state(), self._known[-1]
        if found is None or known.state is None:
            return found
        if self._endings.is_exact:
            found.spare = self.remaining
            return found
        # Where costs are searched for, a table's ends say little: as far as nobody has to look.
        found.spare = known.until - len(self._token_ids)
        return found if self._is_free() else None

    def source(self) -> Source | None:
        """The inner matcher's, up to where an end is looked for again."""
        found, known = self._inner.source(), self._known[-1]
        if found is None or known.state is None:
            return found
        reach = known.until - 1 - len(self._token_ids)
        return found._replace(reach=min(found.reach, reach)) if self._is_free() else None

    def replay(self, token_ids: Sequence[int]) -> None:
        """Note tokens that were accepted while every token fitted the budget."""
        self._inner.replay(token_ids)
        self._token_ids += token_ids
        self._known += [self._known[-1]] * len(token_ids)

    def read(self, token_ids: Sequence[int]) -> int:
        """Tokens after which nobody has to look for an end are the inner matcher's alone."""
        known = self._known[-1]
        count = len(token_ids)
        if known.state is not None:
            count = min(count, known.until - 1 - len(self._token_ids))
        if count < 1 or not self._is_free():
            return super().read(token_ids)
        taken = self._inner.read(token_ids[:count])
        self._token_ids += token_ids[:taken]
        self._known += [known] * taken
        if taken < count or taken == len(token_ids):
            return taken
        return taken + super().read(token_ids[taken:])

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        is_legal = self._is_free() or self._admits(token_id)
        if not is_legal or not self._inner.accept_token(token_id):
            return False
        self._token_ids.append(token_id)
        self._known.append(self._next())
        return True

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        forbids = self._inner.fill_next_token_bitmask(bitmask, index)
        if self._is_free():
            return forbids
        try:
            fitting = self._endings.row(self._known[-1].state, self.remaining, self._inner)
        except EndLostError:
            return forbids
        row = np.asarray(bitmask)[index]  # a view, also of a tensor
        lost = (row & ~fitting).view(np.uint32)
        row &= fitting
        # After the last token the grammar's row may hold anything.
        if (lost & full_row(self._endings.vocab_size).view(np.uint32)).any():
            self._steered.add(len(self._token_ids))
        return True

    def fork(self) -> CompletingMatcher:
        """An independent copy at the same position."""
        copy = CompletingMatcher(self._grammar, self._inner.fork())
        copy._token_ids = self._token_ids.copy()
        copy._known = self._known.copy()
        copy._steered = self._steered.copy()
        return copy

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        self._inner.rollback(num_tokens)
        if num_tokens > 0:
            del self._known[-num_tokens:]
            del self._token_ids[-num_tokens:]
            # The row of the position that is left now stays as it was.
            self._steered = {at for at in self._steered if at <= len(self._token_ids)}

    def _at(self, state: Any, since: int) -> _Known:
        stride = self._endings.stride(state, self._grammar.max_tokens - since)
        return _Known(state, since, since + stride)

    def _next(self) -> _Known:
        """What is known after the token accepted last."""
        known, length = self._known[-1], len(self._token_ids)
        if known.state is None or length < known.until or self._inner.is_terminated():
            return known
        try:
            state = self._endings.after(known.state, self._token_ids[known.since :], self._inner)
        except EndLostError:
            state = None
        if state is None or self._endings.cost(state) > self.remaining:
            return known._replace(state=None)
        return self._at(state, length)

    def _is_free(self) -> bool:
        """Whether every token that the inner matcher allows is legal here."""
        known = self._known[-1]
        if known.state is None or len(self._token_ids) > known.since:
            return True
        try:
            return self._endings.is_free(known.state, self.remaining)
        except EndLostError:
            return True

    def _admits(self, token_id: int) -> bool:
        try:
            state = self._known[-1].state
            return self._endings.admits(state, token_id, self.remaining, self._inner)
        except EndLostError:
            return True


def without_budget(matcher: GrammarMatcher) -> GrammarMatcher:
    """The grammar's own matcher at the same position, for guesses; whoever moves it, takes it back.

    Its rows cost less near the end of a budget.
    """
    return matcher.inner if isinstance(matcher, CompletingMatcher) else matcher
