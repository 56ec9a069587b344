"""Texts that end in time: a grammar and a number of tokens become a grammar of whole texts.

Let ``remaining`` be the tokens that a text may still get, and ``cost(s)`` a number of tokens within
which it can be ended from state s, the stop token among them. A token is legal if the grammar
allows it and ``cost`` after it is less than ``remaining``. Two things follow:

* Every text ends within its budget. At the start the cost is within the budget; a legal token keeps
  it so; and there always is one, since from every state some token leads to a state that costs less
  by one. With one token left the cost is 1: the stop token.
* Speculation stays exact. What is legal depends on the tokens before, and on the budget, not on
  how they were drafted: the filter below clears bits of rows as any other does.

Far from the end every token fits, and the mask is the grammar's own (``Endings.is_free``). Where
costs are searched for, a text may lose its way to the end: the budget then steps aside, and refuses
nothing that the grammar allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import BudgetTooSmallError
from guided_spec.grammar.completion.deferred_endings import DeferredEndings, HandedRules
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
from guided_spec.grammar.completion.spelling import Spelling, Spellings
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.tables.tabled import TabledGrammar
from guided_spec.grammar.tables.token_table import UNBOUND
from guided_spec.grammar.text.markers import AfterGrammar, Marker
from guided_spec.grammar.text.parts import Budget, TextParts, new_parts
from guided_spec.grammar.text.row_filter import Mark, Probe
from guided_spec.grammar.text.state import WrappedGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import full_row, pack_row


class _Free(NamedTuple):
    """Before the marker: the state of its automaton."""

    marker: int


class AfterEndings(Endings):
    """``Endings`` of an ``AfterGrammar``: the shortest path spells the marker, and then ends.

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

    def after(self, state: Any, token_ids: Sequence[int], probe: Probe) -> Any:
        """The state after some tokens, no stop token among them; None where no path is known."""
        if not isinstance(state, _Free):
            return self._inner.after(state, token_ids, probe)
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

    def row(
        self, state: Any, remaining: int, probe: Probe, legal: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a state that costs less than ``remaining``."""
        if not isinstance(state, _Free):
            return self._inner.row(state, remaining, probe, legal)
        missing = self._next.get(state.marker)
        if missing is None:
            missing = self._next.setdefault(state.marker, self._missing_after(state.marker))
        return pack_row(missing < remaining - self._after)

    def admits(self, state: Any, token_id: int, remaining: int, probe: Probe) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        if not isinstance(state, _Free):
            return self._inner.admits(state, token_id, remaining, probe)
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


class EndingsCache:
    """The ``Endings`` of the grammars of one vocabulary; thread-safe.

    They live as long as their grammar, which somebody else keeps.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[CompiledGrammar, Endings] = WeakKeyDictionary()
        self._spellings = Spellings(vocabulary)

    def of(
        self,
        compiled: CompiledGrammar,
        read: Callable[[RuleSource], ReadRules] | None = None,
        rules: HandedRules | Exception | None = None,
    ) -> Endings:
        """The endings of a grammar, built on first use, which takes milliseconds.

        read: reads the grammar's rules, as ``read_here`` does; None is ``read_here``. rules: as
        another process has read them, or why it could not; None where none has tried.
        """
        with self._lock:
            known = self._known.get(compiled)
        # In time: a text that finds no room for its place loses its end, see ``EndLostError``.
        if known is not None and not known.is_filling_up:
            return known
        endings = self._make(compiled, read or self.read_here, rules)
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
        return ReadRules.of(read_source(source, self._spellings.of(source.named)))

    def _make(
        self,
        compiled: CompiledGrammar,
        read: Callable[[RuleSource], ReadRules],
        rules: HandedRules | Exception | None,
    ) -> Endings:
        if isinstance(compiled, TabledGrammar):
            return self.of(compiled.inner, read, rules)
        if isinstance(compiled, AfterGrammar):
            inner = self.of(compiled.inner, read, rules)
            return AfterEndings(compiled.marker, inner, self.vocabulary.vocab_size)
        if isinstance(rules, HandedRules):
            return DeferredEndings(rules, self._spellings.of(rules.named))
        endings = self._by_rules(compiled, read) if rules is None else None
        if endings is not None:
            return endings
        return SearchEndings(compiled, self.vocabulary, self.spelling, self._tokens)

    @cached_property
    def spelling(self) -> Spelling:
        """Its tokens byte by byte."""
        return self._spellings.of(frozenset())

    @cached_property
    def _tokens(self) -> SearchTokens:
        return SearchTokens(self.vocabulary)

    def _by_rules(
        self, compiled: CompiledGrammar, read: Callable[[RuleSource], ReadRules]
    ) -> RuleEndings | None:
        """None where no rules are known or understood, or where they say something else."""
        try:
            source = source_of(compiled)
            found = read(source)
            endings = RuleEndings(ParseStates(found.shortest), self._spellings.of(source.named))
        except (UnreadableGrammarError, EndLostError):
            return None
        return endings if found.agrees(compiled, source.named, self.spelling) else None


@dataclass(frozen=True, eq=False)
class CompletingGrammar(WrappedGrammar):
    """A compiled grammar whose texts end within ``max_tokens``, the stop token among them.

    is_required: whether a text that loses its path to the end gets a fault; else it continues
    without a budget.

    Raises BudgetTooSmallError where no text is known that is short enough.
    """

    endings: Endings
    max_tokens: int
    is_required: bool = False

    def __post_init__(self) -> None:
        least = self.endings.cost(self.endings.start)
        if least > self.max_tokens:
            raise BudgetTooSmallError(self.max_tokens, None if least >= NEVER else least)

    def new_parts(self) -> TextParts:
        """Those of the inner grammar, and the budget."""
        limit = BudgetFilter(self.endings, self.max_tokens)
        budget = Budget(self.inner, self.is_required)
        return new_parts(self.inner)._replace(limit=limit, budget=budget)


class BudgetFilter:
    """Clears tokens after which a text could not end within its budget, see ``RowFilter``.

    Its state is one of ``endings``. Where it is None no path to the end is known any more: the
    filter then forbids nothing.
    """

    wakes: frozenset[int] = frozenset()

    def __init__(self, endings: Endings, max_tokens: int) -> None:
        self._endings, self._max_tokens = endings, max_tokens

    def start(self, length: int) -> Mark:
        """The whole budget is left."""
        return self._mark(self._endings.start, length)

    def admits(self, mark: Mark, token_id: int, text: Probe) -> bool:
        """Whether ``restrict`` leaves the token's bit."""
        if mark.until > mark.at:
            return True
        remaining = self._max_tokens - mark.at
        try:
            return self._endings.admits(mark.state, token_id, remaining, text)
        except EndLostError:
            return True

    def after(self, mark: Mark, text: Probe) -> Mark:
        """The mark after the tokens that were accepted since ``mark``."""
        length = len(text.token_ids)
        if text.is_terminated():
            return mark
        try:
            state = self._endings.after(mark.state, text.token_ids[mark.at :], text)
        except EndLostError:
            state = None
        if state is None or self._endings.cost(state) > self._max_tokens - length:
            return Mark(length, None)
        return self._mark(state, length)

    def restrict(self, mark: Mark, row: NDArray[np.int32], text: Probe) -> bool:
        """Clear the tokens that lead to where too few are left."""
        # After the last token the grammar's row may hold anything.
        legal = row & full_row(self._endings.vocab_size)
        try:
            fitting = self._endings.row(mark.state, self._max_tokens - mark.at, text, legal)
        except EndLostError:
            return False
        row &= fitting
        return bool((legal & ~fitting).any())

    def tokens_left(self, mark: Mark, length: int) -> int | None:
        """What the budget leaves."""
        if mark.state is None:
            return UNBOUND
        if self._endings.is_exact:
            return self._max_tokens - length
        # Where costs are searched for, a table's ends say little: as far as nobody has to look.
        return None if length >= mark.until else mark.until - length

    def fork(self) -> BudgetFilter:
        """Itself: it remembers nothing."""
        return self

    def _mark(self, state: Any, length: int) -> Mark:
        remaining = self._max_tokens - length
        try:
            is_free = self._endings.is_free(state, remaining)
        except EndLostError:
            is_free = True
        until = length + self._endings.stride(state, remaining) if is_free else length
        return Mark(length, state, until)
