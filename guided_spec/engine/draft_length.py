"""How many tokens a step may draft: always as many, or what has paid off so far.

``AdaptiveLength`` chooses K for each step. It takes the K with the most committed tokens a second,
by how likely draft tokens were to be accepted (``guided_spec.engine.acceptance``) and by what steps
took (``guided_spec.engine.step_cost``). K = 0 is plain decoding. What the grammar forces is no part
of it: forced tokens cost no drafter, are certain, and come with any K.

Its choice depends on measured time, but never on the noise of a step that is still to come. So the
rejection sampler's distribution stays what it is. For that, equal requests must not draw the same
noise; so a seed gives it another text each time. Greedy and coupled texts stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from guided_spec.config import EngineConfig
from guided_spec.engine.acceptance import Acceptance, Outcome, OwnAcceptance
from guided_spec.engine.parallel import is_parallel
from guided_spec.engine.step_cost import StepCost, Timing
from guided_spec.errors import ConfigError

__all__ = ["AdaptiveLength", "Brought", "DraftLength", "FixedLength", "Room", "build_draft_length"]

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
