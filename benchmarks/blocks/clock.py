"""How much of a run's time is left."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """seconds: from now on, in all."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative once they are over."""
        return self._end - self._now()

    def part(self, seconds: float) -> Clock:
        """Of a part, which ends with the whole at the latest."""
        return Clock(min(seconds, self.left), self._now)
