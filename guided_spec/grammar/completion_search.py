"""The ends of texts of any grammar, found by trying: a matcher is asked what may follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion_endings import NEVER, pack_row
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["SearchEndings", "Way"]

MOST_TESTED = 512  # tokens of one row
_SMALL = 64  # tokens of a vocabulary that are always all tested
RISE = 64  # that one token is taken to add at most, in a vocabulary too large to test
_MOST_STEPS = 512  # of a search
_WIDE = 64  # options of a position at most, in a search for the shortest way
Way = tuple[int, ...]
"""Tokens from some state to the end of a text, the stop token last; () for none."""
_CLOSING = frozenset(b"\"']})>")


class SearchEndings:
    """``Endings`` of any grammar: a state is a known way to the end, its tokens.

    The way behind a token is, in this order: the rest of the way before, if the token was its
    first; the way before itself, if the grammar takes it there; what a bounded search finds:
    breadth first in a small vocabulary, else straight for closing tokens. So it depends on the text
    alone, and the cost of a state falls by one along its way.

    In a vocabulary of more than 64 tokens, rows are free while ``RISE`` tokens are to spare; a
    grammar in which one token adds more than that may then break off. Where fewer are to spare, the
    way itself and the ``MOST_TESTED`` tokens with the lowest ids may be legal, and no others.
    """

    def __init__(self, compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._excluded = compiled.excluded
        self._stops = frozenset(vocabulary.stop_token_ids)
        self._is_small = vocabulary.vocab_size <= _SMALL
        self._start = self._search(compiled.new_matcher())

    @property
    def is_filling_up(self) -> bool:
        """Nothing is kept between texts."""
        return False

    @property
    def start(self) -> Way:
        """A way from the start to the end; () if none was found."""
        return self._start

    def after(self, state: Way, token_id: int, matcher: GrammarMatcher) -> Way | None:
        """A way from behind a token; None if none was found."""
        if state and state[0] == token_id:
            return state[1:]
        if state and self._takes(matcher, state):
            return state
        return self._search(matcher) or None

    def cost(self, state: Way) -> int:
        """Tokens of the known way."""
        return len(state) or NEVER

    def is_free(self, state: Way, remaining: int) -> bool:
        """Whether every token leads to a cheaper text: never known in a small vocabulary."""
        return not self._is_small and self.cost(state) + RISE < remaining

    def row(self, state: Way, remaining: int, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """int32 [W]: the tokens behind which a way is known that costs less than ``remaining``."""
        found: NDArray[np.bool_] = np.zeros(self._vocabulary.vocab_size, dtype=np.bool_)
        legal = self._legal(matcher)
        found[[token for token in legal if token in self._stops]] = True
        for token in dict.fromkeys([*state[:1], *legal[:MOST_TESTED]]):
            if token not in self._stops and matcher.accept_token(token):
                way = self.after(state, token, matcher)
                matcher.rollback(1)
                found[token] = way is not None and self.cost(way) < remaining
        return pack_row(found)

    def _takes(self, matcher: GrammarMatcher, way: Way) -> bool:
        count = _follow(matcher, way)
        if count:
            matcher.rollback(count)
        return count == len(way)

    def _search(self, matcher: GrammarMatcher) -> Way:
        return (self._shortest(matcher) if self._is_small else ()) or self._straight(matcher)

    def _shortest(self, matcher: GrammarMatcher) -> Way:
        """Breadth first; () where the options are many, or the way long."""
        waiting = deque[Way]([()])
        for _ in range(_MOST_STEPS):
            if not waiting:
                break
            way = waiting.popleft()
            count = _follow(matcher, way)
            legal = self._legal(matcher) if count == len(way) else []
            if count:
                matcher.rollback(count)
            stop = next((token for token in legal if token in self._stops), None)
            if stop is not None:
                return (*way, stop)
            waiting.extend((*way, token) for token in legal)
        return ()

    def _straight(self, matcher: GrammarMatcher) -> Way:
        """One token after another, back where nothing follows; () where that leads nowhere."""
        way, options = list[int](), list[Iterator[int]]()
        found: Way = ()
        for _ in range(_MOST_STEPS):
            if len(options) == len(way):
                legal = self._legal(matcher)
                stop = next((token for token in legal if token in self._stops), None)
                if stop is not None:
                    found = (*way, stop)
                    break
                options.append(iter(self._preferred(legal)))
            token = next(options[-1], None)
            if token is not None and matcher.accept_token(token):
                way.append(token)
            elif token is None:
                options.pop()
                if not way:
                    break
                matcher.rollback(1)
                way.pop()
        if way:
            matcher.rollback(len(way))
        return found

    def _preferred(self, legal: list[int]) -> list[int]:
        """Closing tokens, then the longest of those that are not blank; at most eight."""
        data = self._vocabulary.token_bytes

        def rank(token: int) -> tuple[bool, bool, bool, bool, int, int]:
            text = data[token]
            closes = _CLOSING.issuperset(text)
            size = -len(text) if closes or few else len(text)
            quotes = closes and text.startswith(b'"')  # inside a string, brackets close nothing
            return (not quotes, not closes, text != b"0", text.isspace(), size, token)

        few = len(legal) <= _WIDE
        return sorted(legal, key=rank)[:8]

    def _legal(self, matcher: GrammarMatcher) -> list[int]:
        row = np.zeros((1, -(-self._vocabulary.vocab_size // 32)), dtype=np.int32)
        matcher.fill_next_token_bitmask(row, 0)
        bits = np.unpackbits(row[0].view(np.uint8), bitorder="little")
        tokens: list[int] = np.flatnonzero(bits[: self._vocabulary.vocab_size]).tolist()
        return [token for token in tokens if token not in self._excluded]


def _follow(matcher: GrammarMatcher, way: Way) -> int:
    """Accept tokens up to the first refused one; returns how many."""
    for count, token in enumerate(way):
        if not matcher.accept_token(token):
            return count
    return len(way)
