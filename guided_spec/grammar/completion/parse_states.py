"""Where a text stands in a grammar's rules: states that can be compared, unlike matchers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import LAST, Call, EndLostError, byte_sequences
from guided_spec.grammar.completion.shortest import RuleTexts, rest_of_call
from guided_spec.grammar.completion.spelling import Characters

__all__ = ["NOWHERE", "Frame", "ParseState", "ParseStates", "Run"]

NOWHERE = -1
_MOST_READINGS = 4096
_MOST_STATES = 1 << 16
_OBJECT_BYTES = 500  # of a state, an open call or a rule's state, with what it holds
_FEWEST = 8  # of ASCII, that are worth a run
_WIDE = byte_sequences(((0x80, 0xD7FF), (0xE000, LAST)))  # no token holds a surrogate


class Frame:
    """An open call: what follows when the called rule is complete.

    done: how often the rule will have been complete then. text: the shortest way from there to the
    end of the document. depth: open calls around it.
    """

    __slots__ = ("call", "depth", "done", "number", "parent", "text")

    def __init__(self, call: Call, done: int, parent: Frame | None, number: int) -> None:
        self.call, self.done, self.parent, self.number = call, done, parent, number
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.text = b""


class ParseState:
    """All readings of a text so far. Equal texts, and texts that may go on alike, share a state.

    number: of the state among its grammar's. text: the shortest way to the end of the document, of
    equals the smallest: behind the first byte of it, the rest of it is the shortest way again.
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
    """states: int32 [n + 1], where a text stands behind 0 to n of ``characters``."""

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
        self._thens: dict[int, int] = {}  # behind single bytes, of states without a row
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
        """int32 [states, 256]: the state behind each byte, ``NOWHERE`` where it is illegal.

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
        """The state behind some bytes; None where they are illegal."""
        number = state.number
        for byte in data:
            is_made = self._is_made[number]
            number = int(self._rows[number, byte]) if is_made else self._behind(number, byte)
            if number == NOWHERE:
                return None
        return self._states[number]

    def _behind(self, number: int, byte: int) -> int:
        """As the state's row has it. A text goes one way: the other bytes need not be known."""
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
        ways = [self._way(state, frame) for state, frame in items] + [b""] * can_end
        state.text = min(ways, key=lambda way: (len(way), way))
        if number >= len(self._rows):
            more = np.full_like(self._rows, NOWHERE)
            self._rows = np.concatenate([self._rows, more])
        self._states.append(state)
        self._is_made.append(False)
        return number

    def _way(self, state: int, frame: Frame) -> bytes:
        text = self._texts[state]
        assert text is not None
        return text + frame.text


def _most_common(states: NDArray[np.int32]) -> tuple[int, int]:
    """The state that stands there most often, and how often; ``NOWHERE`` does not count."""
    found = states[states != NOWHERE]
    if not len(found):
        return NOWHERE, 0
    numbers, counts = np.unique(found, return_counts=True)
    most = int(counts.argmax())
    return int(numbers[most]), int(counts[most])
