"""How likely a draft token is to be accepted: by its place, by request, from what was accepted.

Tokens that the grammar forces are not counted here: they are certain, and they come with any K.
A place is the number of a token among those its drafter chose, from 0 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Acceptance", "Outcome", "OwnAcceptance"]

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
