"""No item twice in arrays whose items are to be unique: a filter of JSON texts.

A grammar has no memory for the items that it has written. The filter here has: it knows the items
of open arrays as values, so that ``1`` and ``1.0`` are equal, and objects whatever the order of
their keys. It clears every token that would complete an item again, and what leads to where only
such items are left: the comma after the last value of an ``enum``, or the first letter of the last
one. What is legal depends on the text alone, so that speculation stays exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.recipe import ItemRules
from guided_spec.grammar.text.ahead import Ahead
from guided_spec.grammar.text.item_state import (
    START,
    ItemState,
    Mode,
    advance,
    is_near,
    starting,
)
from guided_spec.grammar.text.key_tokens import KeyTokens, legal
from guided_spec.grammar.text.row_filter import Mark, Probe, clear_refused
from guided_spec.ops.mask_words import full_row, row_of, set_bits

_IN_STRING = (Mode.STRING, Mode.KEY)


class UniqueItemsFilter:
    """Clears tokens that complete an item once more, see ``RowFilter``; its state: ``ItemState``.

    tokens: of the vocabulary. rules: which arrays have unique items.
    """

    def __init__(self, tokens: KeyTokens, rules: ItemRules) -> None:
        self._tokens, self._rules = tokens, rules
        self._ahead = Ahead(self._advance, self._is_near, len(tokens.data))

    @property
    def wakes(self) -> frozenset[int]:
        """Tokens that hold a part of JSON's structure."""
        return self._tokens.special

    def start(self, length: int) -> Mark:
        """Outside of every array."""
        return self._mark(START, length)

    def admits(self, mark: Mark, token_id: int, text: Probe) -> bool:
        """Whether there is such a token: items are looked at once the grammar has taken it."""
        del mark, text
        return 0 <= token_id < len(self._tokens.data)

    def after(self, mark: Mark, text: Probe) -> Mark | None:
        """The mark after the last token; None where an item is there twice, or none is left."""
        state = self._advance(mark.state, text.token_ids[-1])
        if state is None or not self._goes_on(state, text):
            return None
        return mark if state is mark.state else self._mark(state, len(text.token_ids))

    def restrict(self, mark: Mark, row: NDArray[np.int32], text: Probe) -> bool:
        """Clear the tokens after which an item is there twice, or none is left."""
        state = mark.state
        suspects = sorted(set(self._suspects(state, row)))
        return clear_refused(row, suspects, lambda token: self._takes(state, token, text))

    def tokens_left(self, mark: Mark, length: int) -> int | None:
        """None: a table knows no items."""
        del mark, length
        return None

    def fork(self) -> UniqueItemsFilter:
        """A filter that remembers nothing yet."""
        return UniqueItemsFilter(self._tokens, self._rules)

    def interchangeable(self, mark: Mark, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [W]: of some legal tokens those that surely neither complete nor begin an item."""
        state: ItemState = mark.state
        if not state.is_read:
            return row
        if state.mode not in _IN_STRING or state.is_pending:
            return np.zeros_like(row)
        return row & ~row_of([*self._suspects(state, row)], len(self._tokens.data))

    def takes(self, mark: Mark, token_ids: Sequence[int]) -> bool:
        """Whether no item is there twice after these tokens; nothing else is asked of them."""
        state: ItemState | None = mark.state
        for token in token_ids:
            state = state and self._advance(state, token)
        return state is not None

    def _advance(self, state: ItemState, token_id: int) -> ItemState | None:
        data = self._tokens.data[token_id]
        if not data or (token_id not in self._tokens.special and not _sees_all(state)):
            return state
        return advance(self._rules, state, data)

    def _mark(self, state: ItemState, length: int) -> Mark:
        """Outside of arrays of unique items, tokens without structure change nothing."""
        may_end_items = len(self._tokens.nested) > 0 and _is_followed(state)
        is_active = _sees_all(state) or may_end_items
        return Mark(length, state, length) if is_active else Mark(length, state)

    def _suspects(self, state: ItemState, row: NDArray[np.int32]) -> Iterator[int]:
        """All tokens that may have to be taken out of the row, and others."""
        tokens = self._tokens
        if not state.is_read:
            yield from legal(tokens.nested, row)
        elif state.mode in _IN_STRING:
            yield from self._in_string(state, row)
        else:
            yield from set_bits(row & tokens.no_openers_row)
            if not self._rules[state.place].has_free_strings:
                for one in _beginning(state):
                    for end in range(min(len(one), tokens.longest) + 1):
                        yield from tokens.openers.get(one[:end], ())

    def _in_string(self, state: ItemState, row: NDArray[np.int32]) -> Iterator[int]:
        """Of a string or key: tokens that complete it as one that is near, or write more of it."""
        tokens = self._tokens
        yield from legal(tokens.dense if _is_calm(self._rules, state) else tokens.mixed, row)
        near = {one[len(state.text) :] for one in starting(state)}
        if near and state.is_pending:
            yield from (
                set_bits(row & full_row(len(tokens.data)))
                if state.escape
                else legal(tokens.escaping, row)
            )
        for rest in near:
            yield from tokens.closers.get(rest, ())
            is_free = state.mode is Mode.STRING and self._rules[state.place].has_free_strings
            for end in () if is_free else range(min(len(rest), tokens.longest) + 1):
                yield from tokens.texts.get(rest[:end], ())
                yield from tokens.escaped.get(rest[:end], ())

    def _takes(self, state: ItemState, token_id: int, text: Probe) -> bool:
        """Whether a token that the grammar takes is legal."""
        then = self._advance(state, token_id)
        if then is None or not self._is_near(then):
            return then is not None
        if not text.accept_token(token_id):
            return True  # which is for the grammar to say
        goes_on = self._goes_on(then, text)
        text.rollback(1)
        return goes_on

    def _is_near(self, state: ItemState) -> bool:
        return is_near(self._rules, state)

    def _goes_on(self, state: ItemState, text: Probe) -> bool:
        """Whether the text can go on without any item that is there twice."""
        return self._ahead.goes_on(state, state.mode, text)


def _sees_all(state: ItemState) -> bool:
    """Whether tokens without structure change the state, too."""
    return state.is_read or state.mode is Mode.KEY or bool(state.escape)


def _is_followed(state: ItemState) -> bool:
    """Whether an array of unique items may follow."""
    return state.place > 0 or (state.frame is not None and state.frame.place > 0)


def _is_calm(rules: ItemRules, state: ItemState) -> bool:
    """Whether a string may end, and another value begin, without any look ahead."""
    frame, place = state.frame, state.place
    if state.mode is Mode.KEY or not rules[place].has_free_strings:
        return False
    while frame is not None and frame.is_read:
        if frame.alike or (frame.is_unique and not rules[place].is_free):
            return False
        place, frame = frame.place, frame.around
    return True


def _beginning(state: ItemState) -> Iterator[bytes]:
    """The strings, or keys, that may come next and are near."""
    if state.mode is Mode.BEFORE_KEY and state.frame is not None:
        yield from (key for one in state.frame.alike for key, _ in one)
    elif state.mode in (Mode.VALUE, Mode.COLON):
        yield from (one for one in state.alike if isinstance(one, bytes))
