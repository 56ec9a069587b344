"""The ends of texts of any grammar, found by trying: a matcher is asked what may follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion_endings import NEVER, pack_row
from guided_spec.grammar.completion_tokens import SearchTokens
from guided_spec.grammar.llguidance_matcher import LLGuidanceMatcher
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["SearchEndings", "Way"]

MOST_TESTED = 512  # tokens of one row
_SMALL = 64  # tokens of a vocabulary that are always all tested
RISE = 64  # that one token is taken to add at most, in a vocabulary too large to test
_MOST_STEPS = 512  # of a search
_MOST_MOVED = 32  # of them, where others can be judged without
_CLOSING = (b'"', b"]", b"}")  # the ends of a JSON text that cannot go on
_TRIED = 8  # tokens of one position, in a search straight for the end
Way = tuple[int, ...]
"""Tokens from some state to the end of a text, the stop token last; () for none."""


class SearchEndings:
    """``Endings`` of any grammar: a state is a known way to the end, its tokens.

    The way behind a token is, in this order: the rest of the way before, if the token was its
    first; the way before itself, if the grammar takes it there; what a bounded search finds:
    breadth first in a small vocabulary, else straight for closing tokens. So it depends on the text
    alone, and the cost of a state falls by one along its way.

    In a vocabulary of more than 64 tokens, rows are free while ``RISE`` tokens are to spare; a
    grammar in which one token adds more than that may then break off. Where fewer are to spare, the
    way itself and the ``MOST_TESTED`` tokens with the lowest ids may be legal, and no others. In
    llguidance's JSON, where it costs more to try a token, these are whole characters, and 32 of
    them at most do other than keep the way (see ``_ways_kept``).
    """

    def __init__(
        self, compiled: CompiledGrammar, vocabulary: Vocabulary, tokens: SearchTokens | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens or SearchTokens(vocabulary)
        self._is_json = bool(getattr(compiled, "writes_json", False))
        self._excluded = np.array(sorted(compiled.excluded), dtype=np.int64)
        self._stops = np.array(sorted(vocabulary.stop_token_ids), dtype=np.int64)
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
        legal = self._legal(matcher)
        found: NDArray[np.bool_] = np.zeros_like(legal)
        found[self._stops] = legal[self._stops]
        keeps_way = self._ways_kept(state, matcher)
        moves, wanted = MOST_TESTED, legal & ~found
        if keeps_way is not None:
            moves, wanted = _MOST_MOVED, wanted & self._tokens.is_whole
        tested: list[int] = np.flatnonzero(wanted)[:MOST_TESTED].tolist()
        for token in dict.fromkeys([*state[:1], *tested]):
            if found[token]:
                continue
            if keeps_way is not None and keeps_way(token):
                found[token] = self.cost(state) < remaining
            elif moves and matcher.accept_token(token):
                moves -= 1
                way = self.after(state, token, matcher)
                matcher.rollback(1)
                found[token] = way is not None and self.cost(way) < remaining
        return pack_row(found)

    def _ways_kept(self, state: Way, matcher: GrammarMatcher) -> Callable[[int], bool] | None:
        """Tells tokens behind which ``state`` surely still is a way; None where nothing can tell.

        In a JSON text a token without quotes, brackets and backslashes opens and closes nothing. So
        what it stands before is complete where the same text was complete without it; whether the
        grammar takes it there, llguidance says without moving. Behind a backslash, or where nothing
        is closed at the end, as of a number, that is not so.
        """
        body, data = state[:-1], self._vocabulary.token_bytes
        if not (self._is_json and body and isinstance(matcher, LLGuidanceMatcher)):
            return None
        last = matcher.last_token
        if data[body[-1]][-1:] not in _CLOSING or (last is not None and data[last][-1:] == b"\\"):
            return None
        is_plain, count_legal = self._tokens.is_plain, matcher.count_legal

        def keeps_way(token: int) -> bool:
            # The way's own first token leads on to its rest, which is shorter.
            return bool(
                token != state[0] and is_plain[token] and count_legal((token, *body)) == len(state)
            )

        return keeps_way

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
            legal = self._legal(matcher) if count == len(way) else None
            if count:
                matcher.rollback(count)
            if legal is None:
                continue
            if stop := self._stop(legal):
                return (*way, *stop)
            waiting.extend((*way, token) for token in np.flatnonzero(legal).tolist())
        return ()

    def _straight(self, matcher: GrammarMatcher) -> Way:
        """One token after another, back where nothing follows; () where that leads nowhere."""
        way, options = list[int](), list[Iterator[int]]()
        found: Way = ()
        for _ in range(_MOST_STEPS):
            if len(options) == len(way):
                legal = self._legal(matcher)
                if stop := self._stop(legal):
                    found = (*way, *stop)
                    break
                options.append(iter(self._tokens.first(legal, _TRIED)))
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

    def _stop(self, legal: NDArray[np.bool_]) -> Way:
        """A stop token that is legal; () if none is."""
        return tuple(self._stops[legal[self._stops]][:1].tolist())

    def _legal(self, matcher: GrammarMatcher) -> NDArray[np.bool_]:
        """bool [V]"""
        row = np.zeros((1, -(-self._vocabulary.vocab_size // 32)), dtype=np.int32)
        matcher.fill_next_token_bitmask(row, 0)
        bits = np.unpackbits(row[0].view(np.uint8), bitorder="little")
        legal = bits[: self._vocabulary.vocab_size].astype(np.bool_)
        legal[self._excluded] = False
        return legal


def _follow(matcher: GrammarMatcher, way: Way) -> int:
    """Accept tokens up to the first refused one; returns how many."""
    for count, token in enumerate(way):
        if not matcher.accept_token(token):
            return count
    return len(way)
