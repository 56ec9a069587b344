"""What a step costs in seconds, by batch size and K, learned from the steps that were run.

Each (batch size, K) has a cell of its own measurements; a straight line through all of them,
``a + b * K + c * B * (K + 1)``, stands in where a cell is empty.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

__all__ = ["StepCost", "Timing"]

MEMORY = 32  # measurements of a cell
STALE = 64  # measurements of others after which all but the last one are dropped
AGE = 3000  # measurements of others after which a cell is forgotten
OUTLIER = 2.0  # times the median: a collection, another process
LARGEST = 3.0  # times what was known: a compilation
FORGET = 1.0 / 256  # of the line, a measurement
RIDGE = 1e-4
LEAST = 0.2  # share of a measured time that is left whatever the line says
REFIT = 8  # measurements after which the line is drawn anew


class Timing(NamedTuple):
    """One measured step.

    batch: requests. length: K. width: columns of the draft. forced: those that are there for
        tokens that the grammar forced.
    """

    batch: int
    length: int
    width: int
    forced: int
    seconds: float


class _Cell:
    """The last measurements of one batch size and K, without what the forced columns cost."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MEMORY)
        self.last = 0  # the number of its last measurement among all
        self.mean = 0.0

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float, number: int) -> None:
        """Add one measurement. What is old gives way: the machine may have changed since."""
        while number - self.last > STALE and len(self._seconds) > 1:
            self._seconds.popleft()
        self._seconds.append(seconds)
        self.last = number
        ordered = sorted(self._seconds)
        most = OUTLIER * ordered[(len(ordered) - 1) // 2]
        kept = [value for value in ordered if value <= most]
        self.mean = sum(kept) / len(kept)


class StepCost:
    """Seconds of a step that drafts K tokens for B requests."""

    def __init__(self) -> None:
        self._cells: dict[int, dict[int, _Cell]] = {}
        self._line = _Line()
        self._count = 0

    def add(self, timing: Timing) -> None:
        """Learn from one step. Its forced columns are taken off at the line's price."""
        known = self.seconds(timing.batch, timing.length)
        if known > 0.0:
            timing = timing._replace(seconds=min(timing.seconds, LARGEST * known))
        self._count += 1
        self._line.add(timing)
        cells = self._cells.setdefault(_size_class(timing.batch), {})
        for length in [k for k, cell in cells.items() if self._count - cell.last > AGE]:
            del cells[length]  # the line knows better by now
        seconds = self.without_forced(timing)
        cells.setdefault(timing.length, _Cell()).add(seconds, self._count)

    def without_forced(self, timing: Timing) -> float:
        """What the step would have taken without its forced columns."""
        forced = self._line.column(timing.batch) * timing.forced
        return max(timing.seconds - forced, LEAST * timing.seconds)

    def doubt(self, batch: int, length: int) -> float:
        """1.0 for a cell without measurements, less with each, and more again as they get old."""
        cell = self._cells.get(_size_class(batch), {}).get(length)
        if cell is None:
            return 1.0
        return max(1.0 / (1.0 + len(cell)), min(1.0, (self._count - cell.last) / AGE))

    def seconds(self, batch: int, length: int) -> float:
        """Expected time of a step without forced tokens; 0.0 before the first measurement."""
        cells = self._cells.get(_size_class(batch), {})
        if length in cells:
            return cells[length].mean
        below = max((k for k in cells if k < length), default=None)
        above = min((k for k in cells if k > length), default=None)
        if below is not None and above is not None:
            share = (length - below) / (above - below)
            return cells[below].mean + share * (cells[above].mean - cells[below].mean)
        near = below if below is not None else above
        if near is None:
            # The line may pass through zero, where there is nothing to hold it.
            known = [cell.mean for cells in self._cells.values() for cell in cells.values()]
            return max(self._line.at(batch, length), LEAST * min(known, default=0.0))
        slope = self._line.at(batch, length) - self._line.at(batch, near)
        return max(cells[near].mean + slope, LEAST * cells[near].mean)


def _size_class(batch: int) -> int:
    """Batch sizes that are measured together: each up to 4, then two to a doubling."""
    if batch <= 4:
        return batch
    power = 1 << (batch.bit_length() - 1)
    return power if batch < power * 3 // 2 else power * 3 // 2


class _Line:
    """``a + b * K + c * B * (width + 1)`` by least squares, older measurements counting less."""

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._count = 0
        self._factors = [0.0, 0.0, 0.0]

    def add(self, timing: Timing) -> None:
        point = np.array([1.0, timing.length, timing.batch * (timing.width + 1)])
        self._targets += point * timing.seconds - FORGET * self._targets
        self._products += np.outer(point, point) - FORGET * self._products
        self._count += 1
        if self._count % REFIT == 0 or self._count < 2 * REFIT:
            self._factors = self._fit()

    def at(self, batch: int, length: int) -> float:
        a, b, c = self._factors
        return a + b * length + c * batch * (length + 1)

    def column(self, batch: int) -> float:
        """Seconds of one more column of the verify forward."""
        return self._factors[2] * batch

    def _fit(self) -> list[float]:
        """Nothing costs less than nothing: a negative factor is left out of the line."""
        used = [0, 1, 2]
        while True:
            products = self._products[np.ix_(used, used)]
            ridge = np.diag(RIDGE * products.diagonal() + 1e-12)
            found = np.zeros(3)
            found[used] = np.linalg.solve(products + ridge, self._targets[used])
            if found.min() >= 0.0:
                factors: list[float] = found.tolist()
                return factors
            used.remove(int(found.argmin()))
