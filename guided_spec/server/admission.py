"""How many samples the server takes on, those that wait included."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from guided_spec.server.faults import ApiError

__all__ = ["Admission"]

_SHARE_OF_LAST = 0.2  # in the mean of how long samples take
_LONGEST_WAIT = 60


class Admission:
    """Refuses requests for which there is no room. Used by one event loop.

    num_slots: samples that run at once. max_queue: samples that may wait besides.
    """

    def __init__(self, num_slots: int, max_queue: int) -> None:
        self._num_slots = num_slots
        self._capacity = num_slots + max_queue
        self._taken = 0
        self._mean_seconds = 0.0

    @property
    def num_taken(self) -> int:
        """Samples of requests that have not ended."""
        return self._taken

    @contextmanager
    def enter(self, num_samples: int) -> Iterator[None]:
        """Hold room for a request. Raises ApiError, 429, where there is none.

        A request of more samples than there is room at all is served while nothing else is.
        """
        if self._taken and self._taken + num_samples > self._capacity:
            seconds = self.seconds_to_wait()
            message = f"{self._taken} samples run or wait already; ask again in {seconds} s"
            headers = {"Retry-After": str(seconds)}
            raise ApiError(429, message, code="queue_full", headers=headers)
        self._taken += num_samples
        began = time.perf_counter()
        try:
            yield
        finally:
            self._taken -= num_samples
            taken = time.perf_counter() - began
            self._mean_seconds += _SHARE_OF_LAST * (taken - self._mean_seconds)

    def seconds_to_wait(self) -> int:
        """When there may be room again, by how long the last requests took; at least 1."""
        rounds = self._taken / self._num_slots
        return max(1, min(_LONGEST_WAIT, math.ceil(rounds * self._mean_seconds)))
