"""The ends of texts whose grammar binds behind a marker: through the marker first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.after import AfterMatcher
from guided_spec.grammar.completion_endings import NEVER, Endings, pack_row
from guided_spec.grammar.marker import Marker
from guided_spec.grammar.protocol import GrammarMatcher, Matcher

__all__ = ["AfterEndings"]


class _Free(NamedTuple):
    """Before the marker: the state of its automaton."""

    marker: int


class AfterEndings:
    """``Endings`` of an ``AfterGrammar``: the shortest way spells the marker, and then ends.

    inner: of the grammar behind the marker. vocab_size: V.
    """

    def __init__(self, marker: Marker, inner: Endings, vocab_size: int) -> None:
        self._marker = marker
        self._inner = inner
        self._vocab_size = vocab_size
        self._missing = [self._spelled(state) for state in range(len(marker) + 1)]
        self._behind = inner.cost(inner.start)
        self._next: dict[int, NDArray[np.int32]] = {}

    @property
    def is_exact(self) -> bool:
        """As the inner grammar's are."""
        return self._inner.is_exact

    @property
    def is_filling_up(self) -> bool:
        """As the inner grammar's are."""
        return self._inner.is_filling_up

    @property
    def memory_size_bytes(self) -> int:
        """The rows of the marker, and what the inner grammar's take."""
        return self._inner.memory_size_bytes + 4 * self._vocab_size * len(self._next)

    @property
    def start(self) -> Any:
        """Before any token."""
        return _Free(0) if len(self._marker) else self._inner.start

    def cost(self, state: Any) -> int:
        """Tokens within which the text can be ended: the rest of the marker, and the grammar's."""
        if not isinstance(state, _Free):
            return self._inner.cost(state)
        return min(NEVER, self._missing[state.marker] + self._behind)

    def stride(self, state: Any, remaining: int) -> int:
        """Every token counts before the marker."""
        return 1 if isinstance(state, _Free) else self._inner.stride(state, remaining)

    def after(self, state: Any, token_ids: Sequence[int], matcher: GrammarMatcher) -> Any:
        """The state behind some tokens, no stop token among them; None where no way is known."""
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
        return max(self._missing) + self._behind < remaining

    def row(self, state: Any, remaining: int, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a state that costs less than ``remaining``."""
        if not isinstance(state, _Free):
            return self._inner.row(state, remaining, _inside(matcher))
        missing = self._next.get(state.marker)
        if missing is None:
            missing = self._next.setdefault(state.marker, self._missing_after(state.marker))
        return pack_row(missing < remaining - self._behind)

    def admits(self, state: Any, token_id: int, remaining: int, matcher: GrammarMatcher) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        if not isinstance(state, _Free):
            return self._inner.admits(state, token_id, remaining, _inside(matcher))
        then = self._marker.step(state.marker, token_id)
        return then is not None and self._missing[then] + self._behind < remaining

    def _spelled(self, state: int) -> int:
        """Tokens that spell the rest of the marker."""
        count = 0
        while state < len(self._marker):
            then = self._marker.step(state, self._marker.spelling[state])
            assert then is not None
            state, count = then, count + 1
        return count

    def _missing_after(self, state: int) -> NDArray[np.int32]:
        """int32 [V]: tokens that spell the rest of the marker behind each token."""
        step, missing = self._marker.step, [*self._missing, NEVER]
        thens = (step(state, token) for token in range(self._vocab_size))
        return np.array([missing[-1 if then is None else then] for then in thens], dtype=np.int32)


def _inside(matcher: GrammarMatcher) -> Matcher:
    """The matcher of the grammar behind the marker, which alone moves there."""
    assert isinstance(matcher, AfterMatcher)
    return matcher.inner
