"""The experts of the tokens of requests that ask for them, from the forwards to the outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.engine.outputs import RoutedExperts
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder, RoutedRows
from guided_spec.ops.host import Download


class _Piece(NamedTuple):
    """Rows ``begin`` to ``end`` of what comes from the device."""

    experts: Download
    begin: int
    end: int

    @property
    def has_come(self) -> bool:
        return self.experts.copied is None or self.experts.copied.query()

    def rows(self) -> NDArray[np.int16]:
        # A copy: what else the forward recorded is not kept with it.
        found: NDArray[np.int16] = self.experts.wait()[self.begin : self.end].numpy().copy()
        return found


class TextRoutes:
    """The experts of the first tokens of one request's text, as its committed tokens are read.

    What is known stays: a text that had to go for others, and is read again, keeps the experts
    that chose its tokens.

    length: tokens of which they are known. layers: of the model; () before any is read.
    """

    def __init__(self) -> None:
        self.length = 0
        self.layers: tuple[int, ...] = ()
        self._known: list[NDArray[np.int16]] = []
        self._coming: deque[_Piece] = deque()

    def push(self, start: int, experts: Download, begin: int, count: int) -> None:
        """Take those of positions ``start`` to ``start + count - 1``, which begin at ``begin``."""
        known = self.length - start
        assert known >= 0, "a text is read from its start on"
        if known < count:
            self._coming.append(_Piece(experts, begin + known, begin + count))
            self.length = start + count
        while self._coming and self._coming[0].has_come:
            self._known.append(self._coming.popleft().rows())

    def copy(self, source: TextRoutes, length: int) -> None:
        """Begin with the first ``length`` tokens of ``source``, whose text begins alike."""
        self.length, self.layers = length, source.layers
        found = source.rows(length)
        self._known, self._coming = [found] if len(found) else [], deque()

    def rows(self, length: int) -> NDArray[np.int16]:
        """[n, L * top_k] of the first ``length`` tokens, or as many as are known."""
        self._known += [piece.rows() for piece in self._coming]
        self._coming.clear()
        self._known = [np.concatenate(self._known)] if self._known else []
        return self._known[0][:length] if self._known else np.zeros((0, 0), dtype=np.int16)

    def result(self, length: int) -> RoutedExperts | None:
        """Those of the first ``length`` tokens, or as many as are known; None before any is."""
        rows = self.rows(length)
        if not len(rows):
            return None
        return RoutedExperts(rows.reshape(len(rows), len(self.layers), -1), self.layers)


class Routes:
    """Which slots have texts whose experts are recorded.

    layers: of the model.
    """

    def __init__(self, layers: ExpertLayers) -> None:
        self._layers = layers
        self._texts: dict[int, TextRoutes] = {}

    def begin(self, slot: int, text: TextRoutes | None) -> None:
        """A request has got a slot. text: None where it does not ask."""
        if text is not None:
            text.layers = self._layers.layers
            self._texts[slot] = text

    def drop(self, slots: Iterable[int]) -> None:
        """The slots' texts have ended, or had to go."""
        for slot in slots:
            self._texts.pop(slot, None)

    def recorder(self, slots: Iterable[int]) -> ExpertRecorder | None:
        """For a forward over texts in ``slots``; None where none of them asks."""
        if self._texts.keys().isdisjoint(slots):
            return None
        return ExpertRecorder(self._layers)

    def push(self, found: RoutedRows | None, kept: Sequence[int] = ()) -> None:
        """Give the texts what a forward recorded.

        kept: tokens of the first rows that stay; of the other rows all do.
        """
        if found is None:
            return
        counts = [*kept, *found.counts[len(kept) :]]
        rows = zip(found.slots, found.starts, found.begins, counts, strict=True)
        for slot, start, begin, count in rows:
            if slot in self._texts:
                self._texts[slot].push(start, found.experts, begin, count)
