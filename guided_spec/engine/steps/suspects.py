"""Finds the request whose step raises, so that it fails alone.

The requests of a step that raised run in two halves, one after the other, and so on with a half
that raises again, until one request raises alone. A half has passed once each of its requests has
a token more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from guided_spec.engine.request import Request, State
from guided_spec.engine.scheduler import Scheduler

_LOG = logging.getLogger(__name__)


class _Suspect(NamedTuple):
    """goal: the progress with which it has passed."""

    request: Request
    goal: int

    @property
    def is_open(self) -> bool:
        """Whether it goes on and has not passed."""
        request = self.request
        return request.state is not State.FINISHED and request.progress < self.goal


class Suspects:
    """The groups that a scheduler admits one after the other; none while no step has raised."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups = deque[list[_Suspect]]()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def split(self, running: Sequence[Request], error: Exception) -> None:
        """Run apart the two halves of those whose step raised; the caller requeues them.

        running: two or more. Requests that raise together and not apart come here again and again:
        each time they stay apart for twice as many tokens, so that they end all the same.
        """
        tried = self._groups.popleft() if self._groups else []
        if tried:
            goals = {suspect.request: suspect.goal for suspect in tried}
        else:
            goals = {}
            for request in running:
                goals[request] = request.progress + 2**request.num_trials
                request.num_trials += 1
        _LOG.error("a step of %d requests raised; they run apart", len(running), exc_info=error)
        suspects = [_Suspect(request, goals[request]) for request in running]
        half = len(suspects) // 2
        rest = [suspect for suspect in tried if suspect.request not in running]
        for group in (rest, suspects[half:], suspects[:half]):
            if group:
                self._groups.appendleft(group)
        self._restrict()

    @property
    def has_passed(self) -> bool:
        """Whether the group that runs has done so."""
        return bool(self._groups) and not any(suspect.is_open for suspect in self._groups[0])

    def next_group(self) -> list[Request]:
        """Begin with the next group; returns the requests that passed and give up their slots."""
        passed = [suspect.request for suspect in self._groups.popleft()]
        self._restrict()
        if not self._groups:
            return []
        return [request for request in passed if request.state is not State.FINISHED]

    def _restrict(self) -> None:
        group = self._groups[0] if self._groups else None
        self._scheduler.restrict(None if group is None else {one.request for one in group})
