"""A stream ends with its client: what makes its events is closed as soon as nobody reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from guided_spec.errors import ModelError
from guided_spec.server.faults import ApiError
from guided_spec.server.middleware import Message
from guided_spec.server.streaming import EventStream

PATIENCE = 5.0  # seconds; only a fault takes as long
LAST = b"data: [DONE]\n\n"


class Client:
    """Reads events, and leaves behind so many of them; None: never."""

    def __init__(self, leaves_after: int | None = None) -> None:
        self.pieces: list[bytes] = []
        self._leaves_after = leaves_after
        self._has_left = asyncio.Event()

    async def receive(self) -> Message:
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.pieces.append(message["body"])
            if len(self.pieces) == self._leaves_after:
                self._has_left.set()


class Events:
    """One event at once, and another one that never comes, or an error instead of it.

    is_closed: whether they were closed before their end.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.is_closed = False
        self._error = error

    async def come(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"second"
            if self._error is not None:
                raise self._error
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def answer(client: Client, events: AsyncGenerator[bytes, None]) -> None:
    stream = EventStream(b"first", events, LAST)
    await asyncio.wait_for(stream({}, client.receive, client.send), PATIENCE)


def test_a_client_that_leaves_ends_the_stream() -> None:
    async def main() -> None:
        client, events = Client(leaves_after=2), Events()
        await answer(client, events.come())
        assert client.pieces == [b"first", b"second"]
        assert events.is_closed

    asyncio.run(main())


@pytest.mark.every_case
@pytest.mark.parametrize(
    "error", [ModelError("broken"), ApiError(500, "broken")], ids=["engine", "server"]
)
def test_an_error_is_an_event_and_the_stream_still_ends(error: Exception) -> None:
    async def main() -> None:
        client, events = Client(), Events(error)
        await answer(client, events.come())
        first, second, failure, last = client.pieces
        assert (first, second, last) == (b"first", b"second", LAST)
        assert b"broken" in failure
        assert events.is_closed

    asyncio.run(main())


def test_a_fault_of_the_server_is_an_event_too() -> None:
    async def main() -> None:
        client, events = Client(), Events(RuntimeError("secret"))
        with pytest.raises(RuntimeError):  # for the log
            await answer(client, events.come())
        assert client.pieces[-1] == LAST
        assert b"the server failed: RuntimeError" in client.pieces[-2]
        assert b"secret" not in client.pieces[-2]
        assert events.is_closed

    asyncio.run(main())
