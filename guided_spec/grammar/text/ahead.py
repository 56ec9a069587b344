"""Whether a text can go on to where a filter has nothing left to forbid."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from guided_spec.grammar.protocol import legal_row
from guided_spec.grammar.text.row_filter import Probe
from guided_spec.ops.mask_words import set_bits

State = TypeVar("State", bound=Hashable)


class _Ahead(NamedTuple, Generic[State]):
    """state: the text's. away: a token that leads away. near: others, with their states."""

    state: State
    away: int | None
    near: Iterator[tuple[int, State]]


class Ahead(Generic[State]):
    """A depth-first search of one filter.

    advance: the state after a token; None where the filter forbids it. is_near: whether what comes
    next may turn out to be forbidden. vocab_size: V.

    What it remembers only saves time.
    """

    def __init__(
        self,
        advance: Callable[[State, int], State | None],
        is_near: Callable[[State], bool],
        vocab_size: int,
    ) -> None:
        self._advance, self._is_near, self._vocab_size = advance, is_near, vocab_size
        self._ways: dict[Hashable, tuple[int, ...]] = {}  # by kind, that led away last time

    def fork(self) -> Ahead[State]:
        """One that remembers nothing yet."""
        return Ahead(self._advance, self._is_near, self._vocab_size)

    def goes_on(self, state: State, kind: Hashable, text: Probe) -> bool:
        """Whether ``text``, which stands in ``state``, can come to where nothing is near.

        kind: of the state; those of one kind often have the same way.
        """
        if not self._is_near(state) or self._leads_away(state, self._ways.get(kind, ()), text):
            return True
        way, seen = list[int](), {state}
        waiting = [self._look(state, seen, text, spaced=False)]
        while waiting and waiting[-1].away is None:
            option = next(waiting[-1].near, None)
            if option is None:
                waiting.pop()
                text.rollback(len(way[-1:]))
                del way[-1:]
            elif text.accept_token(option[0]):
                way.append(option[0])
                spaced = option[1] is waiting[-1].state
                waiting.append(self._look(option[1], seen, text, spaced=spaced))
        text.rollback(len(way))
        if waiting:
            self._ways[kind] = (*way, waiting[-1].away or 0)
        return bool(waiting)

    def _leads_away(self, state: State, way: tuple[int, ...], text: Probe) -> bool:
        """Whether these tokens are legal, and lead away."""
        count, is_near = 0, True
        for token in way:
            then = self._advance(state, token)
            if then is None or not text.accept_token(token):
                break
            count, state, is_near = count + 1, then, self._is_near(then)
            if not is_near:
                break
        text.rollback(count)
        return not is_near

    def _look(self, state: State, seen: set[State], text: Probe, *, spaced: bool) -> _Ahead[State]:
        """What may follow, but for states in ``seen``; these are added to it."""
        near: list[tuple[int, State]] = []
        for token in set_bits(legal_row(text, self._vocab_size)):
            then = self._advance(state, token)
            if then is not None and not self._is_near(then):
                return _Ahead(state, token, iter(near))
            if then is not None and then not in seen:
                seen.add(then)
                near.append((token, then))
            elif then is state and not spaced:  # one space
                spaced = True
                near.append((token, then))
        return _Ahead(state, None, iter(near))
