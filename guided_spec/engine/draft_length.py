"""How many tokens a step may draft: always as many, or what has paid off so far.

``AdaptiveLength`` chooses K for each step. It takes the K with the most committed tokens a second,
by how likely draft tokens were to be accepted (``Acceptance``) and by what steps took
(``StepCost``). K = 0 is plain decoding. What the grammar forces is no part of it: forced tokens
cost no drafter, are certain, and come with any K.

Its choice depends on measured time, but never on the noise of a step that is still to come. So the
rejection sampler's distribution stays what it is. For that, equal requests must not draw the same
noise; so a seed gives it another text each time. Greedy and coupled texts stay the same.

``StepCost`` learns from the steps that were run what one costs in seconds, by batch size and K.

Each (batch size, K) has a cell of its own measurements; a straight line through all of them,
``a + b * K + c * B * (K + 1)``, stands in where a cell is empty.

How likely a draft token is to be accepted: by its place, by request, from what was accepted.

Tokens that the grammar forces are not counted here: they are certain, and they come with any K.
A place is the number of a token among those its drafter chose, from 0 on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from guided_spec.config import EngineConfig
from guided_spec.engine.parallel import is_parallel
from guided_spec.errors import ConfigError

__all__ = [
    "Acceptance",
    "AdaptiveLength",
    "Brought",
    "DraftLength",
    "FixedLength",
    "Outcome",
    "OwnAcceptance",
    "Room",
    "StepCost",
    "Timing",
    "build_draft_length",
]

MEMORY = 32  # measurements of a cell
STALE_STEPS = 64  # measurements of others after which all but the last one are dropped
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
        while number - self.last > STALE_STEPS and len(self._seconds) > 1:
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


PRIOR = 0.7  # of the first place, before anything was drafted
STRENGTH = 4.0  # trials that a place's prior is worth: the rate of the place before it
WINDOW = 96  # steps that an estimate looks back over
STALE = 32  # steps after which a place counts as not tried lately
STALE_WEIGHT = 6.0  # trials that are left of it then, so that new ones are heard
OWN_WINDOW = 24
OWN_STRENGTH = 4.0  # failures that a request's first guess, to be like the others, is worth


class Outcome(NamedTuple):
    """What one step brought for one request, tokens that the grammar forced left out.

    offered: draft tokens that K and the request's room allowed. accepted: those of them that were
    drafted and accepted.
    """

    offered: int
    accepted: int


class OwnAcceptance:
    """How one request differs from the others: its failures over those expected of it.

    A failure is a place that was reached and did not yield an accepted token.
    """

    __slots__ = ("_expected", "_failed")

    def __init__(self) -> None:
        self._failed = self._expected = OWN_STRENGTH

    @property
    def failure_ratio(self) -> float:
        """1.0 for a request like the others, less for one that is easier to draft for."""
        return self._failed / self._expected

    def count(self, outcome: Outcome, expected: Sequence[float]) -> None:
        """Add a step; ``expected[n]`` are the failures that the first n places yield on average."""
        offered, accepted = outcome
        is_failure = accepted < offered
        self._failed += is_failure - (self._failed - OWN_STRENGTH) / OWN_WINDOW
        reached = expected[accepted + is_failure]
        self._expected += reached - (self._expected - OWN_STRENGTH) / OWN_WINDOW


class Acceptance:
    """The rates of all requests together, by place.

    most: places, the largest K.
    """

    def __init__(self, most: int) -> None:
        self._accepted = [0.0] * most
        self._tried = [0.0] * most
        self._last = [0] * most
        self._steps = 0

    def rates(self, *, hopeful: bool = False) -> list[float]:
        """[most] the chance of each place, given that those before it were accepted.

        A place that was never tried has the rate of the one before it.
        hopeful: so has one that was not tried lately.
        """
        found: list[float] = []
        rate = PRIOR
        for accepted, tried, last in zip(self._accepted, self._tried, self._last, strict=True):
            if not (hopeful and self._steps - last > STALE):
                rate = (STRENGTH * rate + accepted) / (STRENGTH + tried)
            found.append(rate)
        return found

    def count(self, outcomes: Sequence[Outcome]) -> None:
        """Add one step of all its requests."""
        self._steps += 1
        places = len(self._tried)
        ended, failed = [0] * (places + 1), [0] * (places + 1)
        for offered, accepted in outcomes:
            ended[accepted] += 1
            failed[accepted] += accepted < offered
        reached = 0
        for place in range(places - 1, -1, -1):
            reached += ended[place + 1]  # got beyond it
            tried = reached + failed[place]
            if tried:
                keep = self._kept(place)
                self._accepted[place] = keep * self._accepted[place] + reached
                self._tried[place] = keep * self._tried[place] + tried
                self._last[place] = self._steps

    def _kept(self, place: int) -> float:
        keep, tried = 1.0 - 1.0 / WINDOW, self._tried[place]
        if self._steps - self._last[place] > STALE and tried > STALE_WEIGHT:
            keep = STALE_WEIGHT / tried
        return keep


FIRST = 5  # K of the first steps, if that many are allowed
FIRST_STEPS = 4  # before plain decoding is measured
BURST = 2  # steps of a trial in a row: a drafter that was left behind reads up in the first
THINK = 4  # steps between two thoughts about K: they take as long as a small kernel or two
HYSTERESIS = 1.005  # how much better another K has to be
PLAIN_SHARE = 0.006  # of the time, that may be lost to plain decoding
TRIAL_SHARE = 0.004  # of the time, that trials may lose to the best K
RESERVE = 12.0  # plain steps: what may be saved up of either at most
DOUBT = 0.5  # by what share a K may be cheaper than it looks where nothing is known of it
DEBT = 2.0  # plain steps: what may be owed at most
SHORTEST = 1e-9  # seconds
LARGEST_LOSS = 2.0  # times what a step should take: what is beyond is no fault of its K


class Room(NamedTuple):
    """A request of the step: how it differs from others, and the draft tokens that fit it."""

    own: OwnAcceptance
    tokens: int


class Brought(NamedTuple):
    """What a step brought.

    outcomes: of its requests. width: columns of its draft. forced: those for forced tokens.
    """

    outcomes: Sequence[Outcome]
    width: int
    forced: int


class DraftLength(Protocol):
    """Chooses K, one step after another.

    learns: whether it looks at ``rooms`` and at what a step brought; else neither is made.
    """

    learns: bool

    def begin(self, rooms: Sequence[Room]) -> int:
        """K of the step that begins now."""
        ...

    def end(self, brought: Brought, *, is_typical: bool = True) -> None:
        """The step begun last is over.

        is_typical: False where its time holds other work too, such as a prefill.
        """
        ...


class FixedLength:
    """The same K for every step."""

    learns = False

    def __init__(self, length: int) -> None:
        self._length = length

    def begin(self, rooms: Sequence[Room]) -> int:
        """K, whoever takes part."""
        del rooms
        return self._length

    def end(self, brought: Brought, *, is_typical: bool = True) -> None:
        """Nothing is learned."""


class AdaptiveLength:
    """The K with the most tokens a second.

    most: the largest K. clock: seconds; a step has to be over when ``end`` is called, which on a
        GPU means that its results were downloaded.

    Against plain decoding it keeps an account, in plain steps: what a step with a draft took longer
    than its tokens would have taken one by one. A small share of the time is paid in. Once it is
    empty, K is 0 until there is enough in it for a trial.
    """

    learns = True

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lengths = _ladder(most)
        self._clock = clock
        self._acceptance = Acceptance(most)
        self._cost = StepCost()
        self._rooms: Sequence[Room] = ()
        self._started = 0.0
        self._home = max(length for length in self._lengths if length <= FIRST)
        self._wanted, self._left = self._home, FIRST_STEPS  # K, and for how many more steps
        self._reached = tuple(k for k in self._lengths if k <= self._home)  # nobody knows of more
        self._gains = [1.0] * (most + 1)
        self._length = self._before = 0
        self._steps, self._is_trial = 0, False
        self._is_timed = self._is_priced = False  # the last step; plain decoding
        self._saved = self._spare = RESERVE  # what may be lost to plain decoding, and by trials

    def begin(self, rooms: Sequence[Room]) -> int:
        """K of the step that begins now; no more than the request with the most room can take."""
        self._rooms, self._before = rooms, self._length
        if self._left == 0:
            self._choose()
        self._left -= 1
        self._steps += 1
        if self._wanted == self._reached[-1]:  # what it costs is known by the next thought
            self._reached = tuple(k for k in self._lengths if k <= max(1, 2 * self._wanted))
        self._length = min(self._wanted, max((room.tokens for room in rooms), default=0))
        self._started = self._clock()
        return self._length

    def end(self, brought: Brought, *, is_typical: bool = True) -> None:
        """Learn from the step begun last."""
        seconds = max(self._clock() - self._started, SHORTEST)
        self._is_timed = is_typical and self._steps > 1  # the first one warms everything up
        if self._is_timed:
            batch, length = len(self._rooms), self._length
            timing = Timing(batch, length, brought.width, brought.forced, seconds)
            self._settle(self._cost.without_forced(timing))
            if length == 0 or self._before > 0:
                self._cost.add(timing)
            self._is_priced = self._is_priced or length == 0
        if self._length > 0:
            expected = [0.0, *accumulate(1.0 - rate for rate in self._acceptance.rates())]
            for room, outcome in zip(self._rooms, brought.outcomes, strict=True):
                room.own.count(outcome, expected)
            self._acceptance.count(brought.outcomes)

    def _choose(self) -> None:
        """Set the K that is wanted, and for how many steps."""
        self._left, self._is_trial = THINK, False
        self._gains = self._expect(self._acceptance.rates())
        if not self._is_priced:
            if self._is_timed:  # else this is no time to find out
                self._wanted, self._left = 0, BURST
            return
        values = self._values(self._gains)
        best = max(values, key=values.__getitem__)
        if values[best] > HYSTERESIS * values[self._home]:
            self._home = best
        self._wanted = self._home if self._saved > 0.0 else 0
        trial = self._trial_from_plain() if self._wanted == 0 else self._trial(values[self._home])
        if trial is not None:
            self._is_trial = self._wanted > 0
            self._wanted, self._left = trial, BURST

    def _trial(self, value: float) -> int | None:
        """Another K that may be worth more than ``value``, tokens a second; None: not now."""
        if self._spare <= 0.0:
            return None
        hopes = self._hopes()
        hopes.pop(self._wanted)
        length = max(hopes, key=hopes.__getitem__, default=self._wanted)
        if hopes.get(length, 0.0) <= HYSTERESIS * value:
            return None
        price = BURST * (self._seconds(length) - self._gains[length] / value) / self._seconds(0)
        return length if price <= self._spare else None

    def _trial_from_plain(self) -> int | None:
        """The K that is the best hope among those that can be afforded; None: not now."""
        if self._saved <= 0.0:
            return None
        plain = self._seconds(0)
        prices = {k: BURST * (self._seconds(k) / plain - 1.0) for k in self._reached if k > 0}
        cheap = [k for k in prices if prices[k] <= RESERVE / 2] or list(prices)[:1]
        hopes = self._hopes()
        length = max(cheap, key=hopes.__getitem__, default=0)
        return length if length > 0 and prices[length] <= self._saved else None

    def _hopes(self) -> dict[int, float]:
        """Tokens a second of each K if what was little or not lately measured turns out well."""
        batch = len(self._rooms)
        values = self._values(self._expect(self._acceptance.rates(hopeful=True)))
        return {
            length: value / (1.0 - DOUBT * self._cost.doubt(batch, length))
            for length, value in values.items()
        }

    def _settle(self, seconds: float) -> None:
        """Enter a step into the accounts, once plain decoding has its price."""
        if not self._is_priced:
            return
        plain, length = self._seconds(0), self._length
        seconds = min(seconds, LARGEST_LOSS * self._seconds(length))
        self._saved += PLAIN_SHARE * seconds / plain
        self._spare += TRIAL_SHARE * seconds / plain
        if length > 0:
            self._saved -= seconds / plain - self._gains[length]
        if self._is_trial:
            value = self._gains[self._home] / self._seconds(self._home)
            self._spare -= (seconds - self._gains[length] / value) / plain
        self._saved = max(-DEBT, min(self._saved, RESERVE))
        self._spare = max(-DEBT, min(self._spare, RESERVE))

    def _expect(self, rates: Sequence[float]) -> list[float]:
        """[most + 1] tokens that each K commits in a step, the mean of the requests."""
        found = [0.0] * len(rates)
        for own, room in self._rooms:
            reached, ratio = 1.0, own.failure_ratio
            for place, rate in enumerate(rates[:room]):
                reached *= max(0.0, 1.0 - ratio * (1.0 - rate))
                found[place] += reached
        size = max(1, len(self._rooms))
        return list(accumulate((tokens / size for tokens in found), initial=1.0))

    def _seconds(self, length: int) -> float:
        return self._cost.seconds(len(self._rooms), length)

    def _values(self, gains: Sequence[float]) -> dict[int, float]:
        """Tokens a second, and a request, of each K that is within reach."""
        return {length: gains[length] / self._seconds(length) for length in self._reached}


def _ladder(most: int) -> tuple[int, ...]:
    """The K that are tried: each up to 8, then about a quarter more each time, and ``most``.

    Between two of them the rate hardly changes, and each one more has to be measured.
    """
    found, length = [], 0
    while length < most:
        found.append(length)
        length += max(1, length // 4)
    return (*found, most)


def build_draft_length(config: EngineConfig) -> DraftLength:
    """What ``config.draft_length`` names.

    Raises ConfigError for "adaptive" in one of several processes that run one model: each would
    measure its own time, and they would part.
    """
    if config.draft_length == "fixed":
        return FixedLength(config.num_draft_tokens)
    if is_parallel():
        fix = "several processes run this model and must agree on K: use fixed"
        raise ConfigError("draft_length", config.draft_length, fix)
    return AdaptiveLength(config.num_draft_tokens)
