"""Endings by a grammar's rules: where its backend tells them, nothing is searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import Endings, UnreadableGrammarError
from guided_spec.grammar.completion.parse_states import NOWHERE, Frame, ParseState, ParseStates
from guided_spec.grammar.completion.rules import RuleSource
from guided_spec.grammar.completion.shortest import Rests, RuleTexts, rest_of_call
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.ops.mask_words import pack_row

__all__ = ["Longest", "ReadRules", "RuleEndings", "read_source"]


class Longest:
    """How much may be missing at most behind a token, by a measure of texts.

    rests: by that measure. size: 0 of the empty text; see ``longest_rest``.
    is_lasting: what is said of a state holds of all that follow it, behind any number of tokens.
    """

    def __init__(
        self, texts: list[bytes | None], rests: Rests, size: Callable[[bytes], int]
    ) -> None:
        self._texts, self._size = texts, size
        self._rest, self.is_lasting = rests
        self._behind: dict[int, int] = {0: 0}  # calls that a token ends, by their frames
        self.of = lru_cache(maxsize=_MOST_KNOWN)(self._of)

    def _of(self, state: ParseState) -> int:
        """Behind any token at a state."""
        ways = (max(self._from(s, f.text), self._leaving(f)) for s, f in state.items)
        return max(ways, default=0)

    def _from(self, state: int, text: bytes) -> int:
        return int(self._rest[state]) + self._size(text)

    def _leaving(self, frame: Frame) -> int:
        """Once the call is complete, or one around it."""
        around = list[Frame]()
        while frame.number not in self._behind and frame.parent is not None:
            around.append(frame)
            frame = frame.parent
        worst = self._behind[frame.number]
        for inner in reversed(around):
            call, parent = inner.call, inner.parent
            assert parent is not None
            worst = max(worst, self._from(call.then, parent.text))
            if (call.least, call.most) != (1, 1):
                again = self._size(rest_of_call(call, self._texts, inner.done + 1))
                worst = max(worst, self._from(call.rule, parent.text) + again)
            self._behind[inner.number] = worst
        return worst


_TABLES = 32  # of int16 [V], that a grammar keeps
_NEVER = int(np.iinfo(np.int16).max)
_MOST_KNOWN = 1 << 16
_MANY = 2048  # tokens that are worth a look at what they are made of
_RUN = 16  # characters of them
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class RuleEndings(Endings):
    """``Endings`` by a grammar's rules: a state is a ``ParseState``, and nothing is searched.

    A state costs the tokens that write the shortest way from it to the end of the document, and the
    stop token. It is attained: the first of these tokens leads to a state that costs one less,
    because the rest of a shortest way is the shortest way from there.

    Every byte of a shortest way has to be a token of the vocabulary.

    table: int16 [V] of a state, the costs behind each token; the last ones are kept.
    """

    is_exact = True

    def __init__(self, states: ParseStates, spelling: Spelling) -> None:
        self.vocab_size = spelling.vocab_size
        self._states = states
        self._spelling = spelling
        self.table = lru_cache(maxsize=_TABLES)(self._make)
        self._most = lru_cache(maxsize=_MOST_KNOWN)(self._most_of)
        self._by_bytes = Longest(states.shortest.texts, states.shortest.by_bytes, len)

    @property
    def is_filling_up(self) -> bool:
        """Whether further texts should get endings of their own."""
        return self._states.is_filling_up

    @property
    def memory_size_bytes(self) -> int:
        """Of the states and the tables."""
        num_tables = self.table.cache_info().currsize
        return self._states.memory_size_bytes + num_tables * 2 * self._spelling.vocab_size

    @property
    def start(self) -> ParseState:
        """The state of the empty text."""
        return self._states.start

    def cost(self, state: ParseState) -> int:
        """Tokens within which the text can be ended: at least 1."""
        return self._spelling.num_tokens(state.text) + 1

    def after(
        self, state: ParseState, token_ids: Sequence[int], matcher: GrammarMatcher
    ) -> ParseState | None:
        """The state behind some tokens; None where these rules do not allow them."""
        del matcher
        then: ParseState | None = state
        for token_id in token_ids:
            data = self._spelling.token_bytes[token_id]
            then = self._states.after(then, data) if then is not None and data else None
        return then

    def stride(self, state: ParseState, remaining: int) -> int:
        """While more remains than any text may still need, nobody has to know where one stands.

        So a text with room to its end, as most have, is never followed.
        """
        longest = self._longest(state, remaining)
        return max(1, remaining - longest.of(state) - 1) if longest.is_lasting else 1

    def is_free(self, state: ParseState, remaining: int) -> bool:
        """Whether every token leads to a state that costs less than ``remaining``. Exact."""
        return remaining > self.bound(state, remaining) or remaining > self._most(state)

    def bound(self, state: ParseState, remaining: int) -> int:
        """No token leads to a state that costs more; found without looking at the tokens.

        The fewer remain, the closer it is.
        """
        return self._longest(state, remaining).of(state) + 1

    def _longest(self, state: ParseState, remaining: int) -> Longest:
        """By bytes, as if each took a token, where that many remain: most texts have such room."""
        by_bytes = self._by_bytes
        return by_bytes if by_bytes.of(state) + 1 < remaining else self._by_tokens

    @cached_property
    def _by_tokens(self) -> Longest:
        size, shortest = self._spelling.num_tokens, self._states.shortest
        return Longest(shortest.texts, shortest.by_tokens(size), size)

    def _most_of(self, state: ParseState) -> int:
        return (
            int((self.table(state) + np.int16(1)).max()) - 1
        )  # one more than the largest is least

    def row(self, state: ParseState, remaining: int, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a state that costs less than ``remaining``."""
        del matcher
        return pack_row(self.table(state) < min(remaining, _NEVER))

    def legal(self, state: ParseState) -> NDArray[np.int32]:
        """int32 [W]: the tokens that the rules allow."""
        return pack_row(self.table(state) < _NEVER)

    def admits(
        self, state: ParseState, token_id: int, remaining: int, matcher: GrammarMatcher
    ) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        if not 0 <= token_id < self._spelling.vocab_size or token_id in self._spelling.stops:
            return True  # whether such a token is legal, the grammar alone knows
        then = self.after(state, (token_id,), matcher)
        return then is not None and self.cost(then) < min(remaining, _NEVER)

    def _make(self, state: ParseState) -> NDArray[np.int16]:
        """int16 [V]: the cost of the state behind each token, 32,767 where it is illegal.

        0 for a stop token where the document may end. Read only.
        """
        spelling = self._spelling
        table: NDArray[np.int16] = np.full(spelling.vocab_size, _NEVER, dtype=np.int16)
        if state.can_end:
            table[spelling.stop_token_ids] = 0
        self._write_costs(state, table, self._write_run(state, table))
        return table

    def _write_run(self, state: ParseState, table: NDArray[np.int16]) -> NDArray[np.int64]:
        """Inside a string most tokens are characters of one kind, and need not be followed.

        Writes their costs. Returns the tokens that may be legal beside, as ``_write_costs`` takes
        them.
        """
        spelling, states = self._spelling, self._states
        first = states.rows((state.number,))[state.number]
        legal: list[int] = np.flatnonzero(first != NOWHERE).tolist()
        if sum(len(spelling.heads[byte]) for byte in legal) <= _MANY:
            return _joined([spelling.heads[byte] for byte in legal])
        run = states.run(state.number, _RUN)
        if len(run.states) < 2:
            return _joined([part for byte in legal for part in self._heads(byte, int(first[byte]))])
        own, others, is_token = spelling.made_of(run.characters)
        if run.states[-1] == state.number:  # nothing changes, however many they are
            np.putmask(table, is_token, self._costs(run.states[:1])[-1])
        else:
            counts = spelling.num_characters[own]
            is_easy = counts < len(run.states)
            costs = self._costs(run.states)[run.states]
            table[spelling.ids[own[is_easy]]] = costs[counts[is_easy]]
            others = _joined([others, own[~is_easy]])
        found: NDArray[np.int64] = others[first[spelling.columns[0][others]] != NOWHERE]
        return found

    def _heads(self, byte: int, then: int) -> Iterator[NDArray[np.int64]]:
        """The tokens that begin with a byte; of many, those whose second byte is legal, too."""
        head = self._spelling.heads[byte]
        if len(head) <= _MANY:
            yield head
            return
        by_second = self._spelling.second(byte)
        yield by_second[-1]
        for second in np.flatnonzero(self._states.rows((then,))[then] != NOWHERE).tolist():
            yield by_second[second]

    def _write_costs(
        self, state: ParseState, table: NDArray[np.int16], tokens: NDArray[np.int64]
    ) -> None:
        """Write the costs behind tokens, indices into ``Spelling.ids``, byte by byte."""
        spelling, states = self._spelling, self._states
        at: NDArray[np.int32] = np.full(len(tokens), state.number, dtype=np.int32)
        ended: list[NDArray[np.int64]] = []
        ends: list[NDArray[np.int32]] = []
        for column in spelling.columns:
            count = int(np.searchsorted(tokens, len(column)))  # the others have no further byte
            if count < len(tokens):
                ended.append(tokens[count:])
                ends.append(at[count:])
            if not count:
                tokens = tokens[:0]
                break
            tokens, at = tokens[:count], at[:count]
            at = states.rows(_distinct(at))[at, column[tokens]]
            is_legal = at != NOWHERE
            tokens, at = tokens[is_legal], at[is_legal]
        numbers = np.concatenate([*ends, at[: len(tokens)]])
        table[spelling.ids[np.concatenate([*ended, tokens])]] = self._costs(numbers)[numbers]

    def _costs(self, numbers: NDArray[np.int32]) -> NDArray[np.int16]:
        """int16 [states]: the cost of each state among ``numbers``."""
        reached = _distinct(numbers)
        costs: NDArray[np.int16] = np.full(max(reached, default=-1) + 1, _NEVER, dtype=np.int16)
        for number in reached:
            costs[number] = min(_NEVER, self.cost(self._states[number]))
        return costs


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.sort(np.concatenate([_NONE, *parts]))


def _distinct(numbers: NDArray[np.int32]) -> list[int]:
    if not len(numbers):
        return []
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


class ReadRules(NamedTuple):
    """What is read of a grammar. first: int32 [W], the tokens that a text may begin with."""

    shortest: RuleTexts
    first: NDArray[np.int32]


def read_source(source: RuleSource, spelling: Spelling) -> ReadRules:
    """Read a grammar's rules, and what they say about any text of it.

    Raises UnreadableGrammarError where they are not understood, or where a shortest text holds a
    byte that no token is; EndLostError where even the start has too many readings.
    """
    shortest = RuleTexts(source.read(), spelling.longest)
    if not shortest.shortest_bytes <= spelling.single_bytes:
        raise UnreadableGrammarError("a byte of its shortest texts is no token")
    endings = RuleEndings(ParseStates(shortest), spelling)
    return ReadRules(shortest, endings.legal(endings.start))
