"""The end of a server: requests that are cut off when its time is over still get a response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from guided_spec.server.faults import stopping
from guided_spec.server.middleware import Application, Message, Receive, Send


class Drain:
    """The requests that have not ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, the task that runs is one of them."""
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    async def wait(self, seconds: float) -> None:
        """Until all have ended, or for a time."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)


class StoppableRequests:
    """Answers a request whose task is cancelled, which its server does when it stops.

    A stream that has begun ends itself, with an event.
    """

    def __init__(self, app: Application, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        with self._drain.holding():
            try:
                await self._app(scope, receive, watched_send)
            except asyncio.CancelledError:
                if not has_begun:
                    await stopping().response()(scope, receive, send)
