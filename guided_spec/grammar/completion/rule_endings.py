"""Endings by a grammar's rules: where its backend tells them, nothing is searched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import (
    LAST,
    Call,
    Endings,
    EndLostError,
    Rests,
    RuleTexts,
    UnreadableGrammarError,
    byte_sequences,
    rest_of_call,
)
from guided_spec.grammar.completion.rules import RuleSource
from guided_spec.grammar.completion.spelling import NO_TEXT, Characters, Spelling
from guided_spec.grammar.protocol import CompiledGrammar, legal_row
from guided_spec.grammar.text.row_filter import Probe
from guided_spec.ops.mask_words import pack_row

NOWHERE = -1
_MOST_READINGS = 4096
_MOST_STATES = 1 << 16
_OBJECT_BYTES = 500  # of a state, an open call or a rule's state, with what it holds
_FEWEST = 8  # of ASCII, that are worth a run
_WIDE = byte_sequences(((0x80, LAST),))


class Frame:
    """An open call: what follows when the called rule is complete.

    done: how often the rule will have been complete then. text: the shortest path from there to the
    end of the document. depth: open calls around it.
    """

    __slots__ = ("call", "depth", "done", "number", "parent", "text")

    def __init__(self, call: Call, done: int, parent: Frame | None, number: int) -> None:
        self.call, self.done, self.parent, self.number = call, done, parent, number
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.text = b""


class ParseState:
    """All readings of a text so far. Texts with the same continuations share a state.

    number: of the state among its grammar's. text: the shortest path to the end of the document,
    the smallest of several. After its first byte, the rest of it is again the shortest path.
    can_end: whether the document may end here.
    """

    __slots__ = ("can_end", "items", "number", "text")

    def __init__(self, number: int, items: tuple[tuple[int, Frame], ...], *, can_end: bool) -> None:
        self.number = number
        self.items = items
        self.can_end = can_end
        self.text = b""

    @property
    def depth(self) -> int:
        """Open calls of the reading that has most of them."""
        return max((frame.depth for _, frame in self.items), default=0)


class _Step(NamedTuple):
    """then: where ``characters`` lead, or ``NOWHERE``."""

    then: int
    characters: Characters


class Run(NamedTuple):
    """states: int32 [n + 1], the states after 0 to n of ``characters``."""

    characters: Characters
    states: NDArray[np.int32]


class ParseStates:
    """The states of one grammar, made as they are reached. Used by several threads."""

    def __init__(self, shortest: RuleTexts) -> None:
        self.shortest = shortest
        self._rules, self._texts = shortest.rules, shortest.texts
        self._lock = threading.RLock()
        self._frames: dict[tuple[Call, int, int], Frame] = {}
        self._known: dict[tuple[frozenset[tuple[int, int]], bool], int] = {}
        self._states: list[ParseState] = []
        self._rows: NDArray[np.int32] = np.full((64, 256), NOWHERE, dtype=np.int32)
        self._is_made: list[bool] = []
        self._thens: dict[int, int] = {}  # after single bytes, of states without a row
        self._steps: dict[int, _Step] = {}
        bottom = Frame(Call(-1, -1), 0, None, 0)
        start = self._state_of([(self._rules.root, bottom)])
        assert start != NOWHERE
        self.start = self._states[start]

    @property
    def is_filling_up(self) -> bool:
        """Whether half of all states are known: new texts should begin without any."""
        return len(self._states) > _MOST_STATES // 2

    def __getitem__(self, number: int) -> ParseState:
        return self._states[number]

    def rows(self, numbers: Iterable[int]) -> NDArray[np.int32]:
        """int32 [states, 256]: the state after each byte, ``NOWHERE`` where it is illegal.

        The rows of ``numbers`` are made; those of other states may not be. Read only.
        """
        with self._lock:
            for number in numbers:
                if not self._is_made[number]:
                    self._make_row(number)
            return self._rows

    def run(self, number: int, most: int) -> Run:
        """Characters that may be written one after another from a state, whichever they are.

        In a string that ends after any character it is the same state again and again, in one of
        bounded length a new state each time.
        """
        states, step = [number], self._step(number)
        characters = step.characters
        while step.then != NOWHERE and len(states) <= most:
            if not step.characters.holds(characters):
                break
            if step.then == number:
                states.extend([number] * self.shortest.num_bytes)
                break
            states.append(step.then)
            number, step = step.then, self._step(step.then)
        return Run(characters, np.array(states, dtype=np.int32))

    def _step(self, number: int) -> _Step:
        """Where most characters lead from a state."""
        step = self._steps.get(number)
        if step is None:
            row = self.rows((number,))[number]
            then, count = _most_common(row[:128])
            step = _Step(NOWHERE, Characters(0, is_wide=False))
            if count >= _FEWEST:
                own = sum(1 << byte for byte in np.flatnonzero(row[:128] == then).tolist())
                is_wide = all(self._leads(number, wide, then) for wide in _WIDE)
                step = _Step(then, Characters(own, is_wide=is_wide))
            self._steps[number] = step
        return step

    def _leads(self, number: int, sequence: list[tuple[int, int]], then: int) -> bool:
        numbers = {number}
        for low, high in sequence:
            rows = self.rows(numbers)
            numbers = {to for at in numbers for to in rows[at, low : high + 1].tolist()}
            if NOWHERE in numbers:
                return False
        return numbers == {then}

    @property
    def memory_size_bytes(self) -> int:
        """Of the states that are known, roughly."""
        objects = len(self._states) + len(self._frames) + len(self._rules.ends) + len(self._thens)
        return int(self._rows.nbytes) + _OBJECT_BYTES * objects

    def after(self, state: ParseState, data: bytes) -> ParseState | None:
        """The state after some bytes; None where they are illegal."""
        number = state.number
        for byte in data:
            is_made = self._is_made[number]
            number = int(self._rows[number, byte]) if is_made else self._after(number, byte)
            if number == NOWHERE:
                return None
        return self._states[number]

    def _after(self, number: int, byte: int) -> int:
        """The state's row at ``byte``, without making the row: a text needs one byte of it."""
        key = number << 8 | byte
        with self._lock:
            then = self._thens.get(key)
            if then is None:
                items = [
                    (then, frame)
                    for state, frame in self._states[number].items
                    for low, high, then in self._rules.chars[state]
                    if low <= byte <= high
                ]
                then = self._thens[key] = self._state_of(items) if items else NOWHERE
            return then

    def _make_row(self, number: int) -> None:
        edges = [
            (low, high, (then, frame))
            for state, frame in self._states[number].items
            for low, high, then in self._rules.chars[state]
        ]
        cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        row: NDArray[np.int32] = np.full(256, NOWHERE, dtype=np.int32)
        found: dict[tuple[tuple[int, int], ...], int] = {}
        for low, above in zip(cuts, cuts[1:], strict=False):
            items = [item for first, last, item in edges if first <= low and last >= above - 1]
            key = tuple(sorted((state, frame.number) for state, frame in items))
            if key not in found:
                found[key] = self._state_of(items) if items else NOWHERE
            row[low:above] = found[key]
        self._rows[number] = row
        self._is_made[number] = True

    def _state_of(self, items: Sequence[tuple[int, Frame]]) -> int:
        """The number of the state with these readings, and whatever they lead to without a byte."""
        kept, can_end = self._close(items)
        if not kept and not can_end:
            return NOWHERE
        key = (frozenset((state, frame.number) for state, frame in kept), can_end)
        number = self._known.get(key)
        if number is None:
            number = self._add(tuple(kept), can_end=can_end)
            self._known[key] = number
        return number

    def _close(self, items: Sequence[tuple[int, Frame]]) -> tuple[list[tuple[int, Frame]], bool]:
        rules, kept, can_end = self._rules, [], False
        waiting = [item for item in items if self._texts[item[0]] is not None]
        seen = {(state, frame.number) for state, frame in waiting}
        while waiting:
            state, frame = waiting.pop()
            if rules.chars[state]:
                kept.append((state, frame))
            can_end |= rules.ends[state] and frame.parent is None
            for then, above in self._without_a_byte(state, frame):
                if self._texts[then] is not None and (then, above.number) not in seen:
                    seen.add((then, above.number))
                    waiting.append((then, above))
            if len(seen) > _MOST_READINGS:
                raise EndLostError
        return kept, can_end

    def _without_a_byte(self, state: int, frame: Frame) -> list[tuple[int, Frame]]:
        rules = self._rules
        nexts = [(then, frame) for then in rules.skips[state]]
        for call in rules.calls[state]:
            if self._texts[call.rule] is not None:
                nexts.append((call.rule, self._enter(call, frame)))
            if call.least == 0:
                nexts.append((call.then, frame))
        if rules.ends[state] and frame.parent is not None:
            nexts.extend(self._leave(frame, frame.parent))
        return nexts

    def _enter(self, call: Call, frame: Frame) -> Frame:
        """The frame of a call; of a call that is a rule's last part, the one around it."""
        if (call.least, call.most) == (1, 1) and self._rules.is_bare_end(call.then):
            return frame
        return self._frame(call, 1, frame)

    def _leave(self, frame: Frame, parent: Frame) -> list[tuple[int, Frame]]:
        call, done = frame.call, frame.done
        nexts = [(call.then, parent)] if done >= call.least else []
        if call.most < 0 or done < call.most:
            # Once it may end, and may go on for ever, it no longer matters how often it was.
            more = min(done + 1, max(call.least, 1)) if call.most < 0 else done + 1
            nexts.append((call.rule, self._frame(call, more, parent)))
        return nexts

    def _frame(self, call: Call, done: int, parent: Frame) -> Frame:
        key = (call, done, parent.number)
        frame = self._frames.get(key)
        if frame is None:
            frame = Frame(call, done, parent, len(self._frames) + 1)
            rest = rest_of_call(call, self._texts, done) if self._can_end(call) else b""
            frame.text = rest + parent.text
            self._frames[key] = frame
        return frame

    def _can_end(self, call: Call) -> bool:
        return self._texts[call.rule] is not None and self._texts[call.then] is not None

    def _add(self, items: tuple[tuple[int, Frame], ...], *, can_end: bool) -> int:
        number = len(self._states)
        if number >= _MOST_STATES:
            raise EndLostError
        state = ParseState(number, items, can_end=can_end)
        ways = [self._text_of(state, frame) for state, frame in items] + [b""] * can_end
        state.text = min(ways, key=lambda way: (len(way), way))
        if number >= len(self._rows):
            more = np.full_like(self._rows, NOWHERE)
            self._rows = np.concatenate([self._rows, more])
        self._states.append(state)
        self._is_made.append(False)
        return number

    def _text_of(self, state: int, frame: Frame) -> bytes:
        text = self._texts[state]
        assert text is not None
        return text + frame.text


def _most_common(states: NDArray[np.int32]) -> tuple[int, int]:
    """The most frequent state, and how often it occurs; ``NOWHERE`` does not count."""
    found = states[states != NOWHERE]
    if not len(found):
        return NOWHERE, 0
    numbers, counts = np.unique(found, return_counts=True)
    most = int(counts.argmax())
    return int(numbers[most]), int(counts[most])


class Longest:
    """The most that may be missing after a token, by a measure of texts.

    rests: by that measure. size: 0 of the empty text; see ``longest_rest``.
    is_lasting: the bound of a state also holds for all its successors, after any number of tokens.
    """

    def __init__(
        self, texts: list[bytes | None], rests: Rests, size: Callable[[bytes], int]
    ) -> None:
        self._texts, self._size = texts, size
        self._rest, self.is_lasting = rests
        self._after: dict[int, int] = {0: 0}  # calls that a token ends, by their frames
        self.of = lru_cache(maxsize=_MOST_KNOWN)(self._of)

    def _of(self, state: ParseState) -> int:
        """The bound after any token at a state."""
        ways = (max(self._from(s, f.text), self._leaving(f)) for s, f in state.items)
        return max(ways, default=0)

    def _from(self, state: int, text: bytes) -> int:
        return int(self._rest[state]) + self._size(text)

    def _leaving(self, frame: Frame) -> int:
        """Once the call is complete, or one around it."""
        around = list[Frame]()
        while frame.number not in self._after and frame.parent is not None:
            around.append(frame)
            frame = frame.parent
        worst = self._after[frame.number]
        for inner in reversed(around):
            call, parent = inner.call, inner.parent
            assert parent is not None
            worst = max(worst, self._from(call.then, parent.text))
            if (call.least, call.most) != (1, 1):
                again = self._size(rest_of_call(call, self._texts, inner.done + 1))
                worst = max(worst, self._from(call.rule, parent.text) + again)
            self._after[inner.number] = worst
        return worst


_TABLES = 32  # of int16 [V], that a grammar keeps
_NEVER = int(np.iinfo(np.int16).max)
_MOST_KNOWN = 1 << 16
_MANY = 2048  # tokens that are worth a look at what they are made of
_RUN = 16  # characters of them
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class RuleEndings(Endings):
    """``Endings`` by a grammar's rules: a state is a ``ParseState``, and nothing is searched.

    The cost of a state is the number of tokens that write the shortest path from it to the end of
    the document, and the stop token. It is attained: the first of these tokens leads to a state
    that costs one less, because the rest of a shortest path is the shortest path from there.

    Every byte of a shortest path has to be a token of the vocabulary.

    table: int16 [V] of a state, the costs after each token; the last ones are kept.
    """

    is_exact = True

    def __init__(self, states: ParseStates, spelling: Spelling) -> None:
        self.vocab_size = spelling.vocab_size
        self.shortest, self._states = states.shortest, states
        self._spelling = spelling
        self.table = lru_cache(maxsize=_TABLES)(self._make)
        self._most = lru_cache(maxsize=_MOST_KNOWN)(self._most_of)
        self._by_bytes = Longest(self.shortest.texts, self.shortest.by_bytes, len)

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

    def after(self, state: ParseState, token_ids: Sequence[int], probe: Probe) -> ParseState | None:
        """The state after some tokens; None where these rules do not allow them."""
        del probe
        then: ParseState | None = state
        for token_id in token_ids:
            data = self._spelling.token_bytes[token_id]
            then = self._states.after(then, data) if then is not None and data else None
        return then

    def stride(self, state: ParseState, remaining: int) -> int:
        """How many tokens can be taken before the state has to be known again.

        While more tokens remain than any text may still need, the state does not matter. So a text
        with many tokens left, as most have, is never tracked.
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
        """The bound by bytes, as if each took a token, where that many remain; else by tokens."""
        by_bytes = self._by_bytes
        return by_bytes if by_bytes.of(state) + 1 < remaining else self.by_tokens

    @cached_property
    def by_tokens(self) -> Longest:
        """The most tokens that may be missing after one."""
        size = self._spelling.num_tokens
        return Longest(self.shortest.texts, self.shortest.by_tokens(size), size)

    def _most_of(self, state: ParseState) -> int:
        return (
            int((self.table(state) + np.int16(1)).max()) - 1
        )  # one more than the largest is least

    def row(
        self,
        state: ParseState,
        remaining: int,
        probe: Probe,
        legal: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a state that costs less than ``remaining``."""
        del probe, legal
        return pack_row(self.table(state) < min(remaining, _NEVER))

    def legal(self, state: ParseState) -> NDArray[np.int32]:
        """int32 [W]: the tokens that the rules allow."""
        return pack_row(self.table(state) < _NEVER)

    def admits(self, state: ParseState, token_id: int, remaining: int, probe: Probe) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        if not 0 <= token_id < self._spelling.vocab_size or token_id in self._spelling.stops:
            return True  # whether such a token is legal, the grammar alone knows
        then = self.after(state, (token_id,), probe)
        return then is not None and self.cost(then) < min(remaining, _NEVER)

    def _make(self, state: ParseState) -> NDArray[np.int16]:
        """int16 [V]: the cost of the state after each token, 32,767 where it is illegal.

        0 for a stop token where the document may end. Read only.
        """
        spelling = self._spelling
        table: NDArray[np.int16] = np.full(spelling.vocab_size, _NEVER, dtype=np.int16)
        if state.can_end:
            table[spelling.stop_token_ids] = 0
        self._write_costs(state, table, self._write_run(state, table))
        return table

    def _write_run(self, state: ParseState, table: NDArray[np.int16]) -> NDArray[np.int64]:
        """Write the costs of the tokens made of one kind of character, as most are in a string.

        They need not be advanced byte by byte. Returns the other tokens that may be legal, as
        ``_write_costs`` takes them.
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
        if run.states[1] == state.number:  # nothing changes, however many they are
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
        """Write the costs after tokens, indices into ``Spelling.ids``, byte by byte."""
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

    @classmethod
    def of(cls, endings: RuleEndings) -> ReadRules:
        return cls(endings.shortest, endings.legal(endings.start))

    def agrees(self, compiled: CompiledGrammar, named: frozenset[int], spelling: Spelling) -> bool:
        """Whether the grammar's matchers begin with the same tokens.

        named: tokens that are read as marks. spelling: that knows none of them.
        """
        own = legal_row(compiled.new_matcher(), spelling.vocab_size)
        # Where marks are read, rules say nothing of other tokens with a byte that no text holds.
        told = ~spelling.without_text if named else np.int32(-1)
        return np.array_equal(self.first & told, own & told)


def read_source(source: RuleSource, spelling: Spelling) -> RuleEndings:
    """Read a grammar's rules, and what they say about any text of it.

    spelling: with the tokens that the source names.

    Raises UnreadableGrammarError where they are not understood, or where a shortest text holds a
    byte that no token is; EndLostError where even the start has too many readings.
    """
    shortest = RuleTexts(source.read(), spelling.longest)
    marks = frozenset({NO_TEXT} if source.named else ())  # a mark is one token
    if not shortest.shortest_bytes - marks <= spelling.single_bytes:
        raise UnreadableGrammarError("a byte of its shortest texts is no token")
    return RuleEndings(ParseStates(shortest), spelling)
