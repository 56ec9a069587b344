"""Which requests hold a slot, and which wait for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from guided_spec.engine.request import Request, State


class Scheduler:
    """First come, first served, as soon as a slot is free and the grammar is compiled.

    num_slots: requests that can run at once; the others wait.
    """

    def __init__(self, num_slots: int) -> None:
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # by slot, ascending
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def __iter__(self) -> Iterator[Request]:
        """Every request that has not ended: first the running ones by slot, then the queue."""
        return iter([*self._running.values(), *self._waiting])

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    def running(self, state: State | None = None) -> list[Request]:
        """The requests that hold a slot, by slot; only those in ``state`` if one is given."""
        requests = list(self._running.values())
        return requests if state is None else [r for r in requests if r.state is state]

    def ready(self) -> list[Request]:
        """Waiting requests whose grammar is done, at most as many as there are free slots.

        A request whose grammar is still being compiled is overtaken by those behind it.
        """
        if not self._free:
            return []
        done = [r for r in self._waiting if r.job.grammar is None or r.job.grammar.done()]
        return done[: len(self._free)]

    def admit(self, request: Request) -> None:
        """Give a waiting request the lowest free slot."""
        self._waiting.remove(request)
        self._free.sort()
        request.text.slot = self._free.pop(0)
        request.state = State.PREFILL
        self._running = dict(sorted([*self._running.items(), (request.text.slot, request)]))

    def requeue(self, request: Request) -> None:
        """Take a running request's slot; it is the next one to be admitted."""
        self._free.append(request.text.slot)
        del self._running[request.text.slot]
        request.text.slot, request.state = -1, State.WAITING
        self._waiting.appendleft(request)

    def remove_finished(self) -> list[int]:
        """Take out the requests that have ended; returns the slots that became free."""
        if any(r.state is State.FINISHED for r in self._waiting):
            self._waiting = deque(r for r in self._waiting if r.state is not State.FINISHED)
        slots = [slot for slot, r in self._running.items() if r.state is State.FINISHED]
        for slot in slots:
            del self._running[slot]
        self._free.extend(slots)
        return slots
