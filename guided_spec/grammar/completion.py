"""Texts that end in time: a grammar and a number of tokens become a grammar of whole texts.

Let ``remaining`` be the tokens that a text may still get, and ``cost(s)`` a number of tokens within
which it can be ended from state s, the stop token among them. A token is legal if the grammar
allows it and ``cost`` behind it is less than ``remaining``. Two things follow:

* Every text ends within its budget. At the start the cost is within the budget, or the request is
  refused; a legal token keeps it so; and there always is one, since from every state some token
  leads to a state that costs less by one. With one token left the cost is 1: the stop token.
* Speculation stays exact. What is legal depends on the tokens before, and on the budget, not on
  how they were drafted: the matcher below is one like any other.

Far from the end every token fits, and the mask is the grammar's own (``Endings.is_free``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from guided_spec.errors import BudgetTooSmallError
from guided_spec.grammar.after import AfterGrammar
from guided_spec.grammar.completion_after import AfterEndings
from guided_spec.grammar.completion_costs import RuleEndings
from guided_spec.grammar.completion_endings import NEVER, Endings, EndLostError
from guided_spec.grammar.completion_places import Places
from guided_spec.grammar.completion_search import SearchEndings
from guided_spec.grammar.completion_spelling import Spelling
from guided_spec.grammar.completion_states import UnreadableGrammarError
from guided_spec.grammar.completion_tokens import SearchTokens
from guided_spec.grammar.protocol import (
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    row_source,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarGrammar

__all__ = [
    "CompletingGrammar",
    "CompletingMatcher",
    "EndingsCache",
    "PreparingBackend",
    "without_budget",
]

_KEPT = 256
_LOST = object()  # the state behind the end of a text, or one that is not known


class EndingsCache:
    """The ``Endings`` of the grammars of one vocabulary; thread-safe. Those last used are kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._spelling: Spelling | None = None
        self._tokens: SearchTokens | None = None
        self._known: OrderedDict[int, tuple[CompiledGrammar, Endings]] = OrderedDict()

    def of(self, compiled: CompiledGrammar) -> Endings:
        """The endings of a grammar: made when it is first asked for, which takes milliseconds."""
        with self._lock:
            known = self._known.get(id(compiled))
            # In time: a text that finds no room for its place loses its end, see ``EndLostError``.
            if known is not None and not known[1].is_filling_up:
                self._known.move_to_end(id(compiled))
                return known[1]
        endings = self._make(compiled)
        with self._lock:
            self._known[id(compiled)] = (compiled, endings)
            self._known.move_to_end(id(compiled))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return endings

    def bound(
        self, compiled: CompiledGrammar, max_tokens: int, *, is_required: bool
    ) -> CompiledGrammar:
        """The grammar of its texts of at most ``max_tokens``.

        is_required: whether a grammar without any known end raises BudgetTooSmallError, as one
            whose shortest text is too long does; else it is returned as it is.
        """
        endings = self.of(compiled)
        if not is_required and endings.cost(endings.start) >= NEVER:
            return compiled
        return CompletingGrammar(compiled, endings, max_tokens)

    def _make(self, compiled: CompiledGrammar) -> Endings:
        if isinstance(compiled, AfterGrammar):
            inner = self.of(compiled.inner)
            return AfterEndings(compiled.marker, inner, self._vocabulary.vocab_size)
        if isinstance(compiled, XGrammarGrammar):
            endings = self._by_rules(compiled)
            if endings is not None:
                return endings
        if self._tokens is None:
            self._tokens = SearchTokens(self._vocabulary)
        return SearchEndings(compiled, self._vocabulary, self._tokens)

    def _by_rules(self, compiled: XGrammarGrammar) -> RuleEndings | None:
        """None where the printed grammar is not understood, or says something else."""
        if self._spelling is None:
            self._spelling = Spelling(self._vocabulary)
        try:
            places = Places(str(compiled.compiled.grammar), self._spelling.longest)
            if not places.shortest_bytes <= self._spelling.single_bytes:
                return None
            endings = RuleEndings(places, self._spelling)
            is_legal = endings.table(endings.start) < NEVER
        except (UnreadableGrammarError, EndLostError):
            return None
        size = self._vocabulary.vocab_size
        mask = np.zeros((1, -(-size // 32)), dtype=np.int32)
        compiled.new_matcher().fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:size]
        return endings if np.array_equal(is_legal, bits) else None


class PreparingBackend:
    """A backend whose grammars' endings are made where they are compiled: not while others wait."""

    def __init__(self, backend: GrammarBackend, endings: EndingsCache) -> None:
        self.vocabulary: Vocabulary = backend.vocabulary
        self._backend = backend
        self._endings = endings

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``; raises what the backend raises."""
        compiled = self._backend.compile(spec)
        self._endings.of(compiled)
        return compiled


@dataclass(frozen=True, slots=True, eq=False)
class CompletingGrammar:
    """A compiled grammar whose texts end within ``max_tokens``, the stop token among them.

    Raises BudgetTooSmallError where no text is known that is short enough.
    """

    compiled: CompiledGrammar
    endings: Endings
    max_tokens: int

    def __post_init__(self) -> None:
        least = self.endings.cost(self.endings.start)
        if least > self.max_tokens:
            raise BudgetTooSmallError(self.max_tokens, None if least >= NEVER else least)

    @property
    def excluded(self) -> frozenset[int]:
        """As the grammar has it."""
        return self.compiled.excluded

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar, with the whole budget."""
        return CompletingMatcher(self, self.compiled.new_matcher())

    def new_style_matcher(self) -> GrammarMatcher | None:
        """The grammar's own: drafts need not end in time."""
        return self.compiled.new_style_matcher()


class CompletingMatcher:
    """A ``GrammarMatcher`` that keeps a way to the end of the text within the budget.

    inner: at the start of the grammar.

    Where a text has too many readings to follow (``EndLostError``), the budget is no longer kept:
    the matcher is then the inner one.
    """

    def __init__(self, grammar: CompletingGrammar, inner: GrammarMatcher) -> None:
        self._endings = grammar.endings
        self._grammar = grammar
        self._inner = inner
        self._states: list[Any] = [grammar.endings.start]
        self._steered: set[int] = set()

    @property
    def steered(self) -> Set[int]:
        """Positions in the text at which a row was filled that lacks tokens for the budget."""
        return self._steered

    @property
    def remaining(self) -> int:
        """Tokens that the text may still get."""
        return self._grammar.max_tokens - len(self._states) + 1

    @property
    def inner(self) -> GrammarMatcher:
        """The grammar's own matcher."""
        return self._inner

    @property
    def row_source(self) -> GrammarMatcher:
        """The inner matcher's while every token fits the budget; else this one."""
        return row_source(self._inner) if self._is_free else self

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        if not self._inner.accept_token(token_id):
            return False
        state = _LOST
        if self._states[-1] is not _LOST and not self._inner.is_terminated():
            try:
                state = self._endings.after(self._states[-1], token_id, self._inner)
            except EndLostError:
                state = _LOST
            if state is None or (
                state is not _LOST and self._endings.cost(state) >= self.remaining
            ):
                self._inner.rollback(1)
                return False
        self._states.append(state)
        return True

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        forbids = self._inner.fill_next_token_bitmask(bitmask, index)
        if self._is_free:
            return forbids
        row = np.asarray(bitmask)[index]  # a view, also of a tensor
        own = row.copy()
        row &= self._endings.row(self._states[-1], self.remaining, self._inner)
        if not np.array_equal(row, own):
            self._steered.add(len(self._states) - 1)
        return True

    def fork(self) -> CompletingMatcher:
        """An independent copy at the same position."""
        copy = CompletingMatcher(self._grammar, self._inner.fork())
        copy._states = self._states.copy()
        copy._steered = self._steered.copy()
        return copy

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        self._inner.rollback(num_tokens)
        if num_tokens > 0:
            del self._states[-num_tokens:]
            # The row of the position that is left now stays as it was.
            self._steered = {at for at in self._steered if at < len(self._states)}

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._inner.is_terminated()

    @property
    def _is_free(self) -> bool:
        state = self._states[-1]
        try:
            return state is _LOST or self._endings.is_free(state, self.remaining)
        except EndLostError:
            return True


def without_budget(matcher: GrammarMatcher) -> GrammarMatcher:
    """The grammar's own matcher at the same position, for guesses; whoever moves it, takes it back.

    Its rows cost less near the end of a budget.
    """
    return matcher.inner if isinstance(matcher, CompletingMatcher) else matcher
