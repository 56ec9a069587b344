"""A constraint that binds behind a marker: free text first, then any backend's grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from guided_spec.grammar.markers.marker import Marker
from guided_spec.grammar.protocol import (
    CompiledGrammar,
    GrammarMatcher,
    WrappedMatcher,
)

__all__ = ["AfterGrammar", "AfterMatcher"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AfterGrammar:
    """A compiled grammar that binds behind ``marker``; immutable, shared by requests.

    budget: free tokens at most before the marker is written; None for any number.
    excluded: empty, since free text may hold every token. The matchers refuse the inner grammar's.
    """

    inner: CompiledGrammar
    marker: Marker
    budget: int | None = None
    excluded: frozenset[int] = frozenset()

    def new_matcher(self) -> AfterMatcher:
        """A matcher at the start of the free text."""
        return AfterMatcher(self, self.inner.new_matcher())

    def new_style_matcher(self) -> GrammarMatcher | None:
        """A matcher with the inner grammar's style behind the marker; None if it has none."""
        style = self.inner.new_style_matcher()
        return None if style is None else AfterMatcher(self, style)


class AfterMatcher(WrappedMatcher):
    """A ``GrammarMatcher`` in two parts: the marker's automaton, then the inner matcher.

    inner: at its start; it moves only on tokens behind the marker.
    """

    def __init__(self, grammar: AfterGrammar, inner: GrammarMatcher) -> None:
        self._grammar = grammar
        self._marker = grammar.marker
        super().__init__(inner)
        self._states = [0]  # of the automaton, before every token of the free part and behind it
        self._num_bound = 0  # tokens the inner matcher has accepted

    @property
    def is_bound(self) -> bool:
        """Whether the marker is complete: from here on the inner grammar rules."""
        return self._states[-1] == len(self._marker)

    @property
    def row_source(self) -> GrammarMatcher:
        """The inner matcher once it rules; this one before."""
        return self._inner.row_source if self.is_bound else self

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        if self.is_bound:
            is_excluded = token_id in self._grammar.inner.excluded
            if is_excluded or not self._inner.accept_token(token_id):
                return False
            self._num_bound += 1
            return True
        if self._is_spent and token_id != self._marker.spelling[self._states[-1]]:
            return False
        state = self._marker.step(self._states[-1], token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        if self.is_bound:
            return self._inner.fill_next_token_bitmask(bitmask, index)
        state = self._states[-1]
        if self._is_spent:
            row = self._marker.only(self._marker.spelling[state])
        else:
            row = self._marker.row(state)
        np.asarray(bitmask)[index] = row  # a view, also of a tensor
        return True

    def fork(self) -> AfterMatcher:
        """An independent copy at the same position."""
        copy = AfterMatcher(self._grammar, self._inner.fork())
        copy._states = self._states.copy()
        copy._num_bound = self._num_bound
        return copy

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens, on either side of the marker."""
        bound = min(num_tokens, self._num_bound)
        if bound:
            self._inner.rollback(bound)
            self._num_bound -= bound
        if num_tokens > bound:
            del self._states[bound - num_tokens :]

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted, which only the inner grammar does."""
        return self._num_bound > 0 and self._inner.is_terminated()

    @property
    def _is_spent(self) -> bool:
        budget = self._grammar.budget
        return budget is not None and len(self._states) > budget
