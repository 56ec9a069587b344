"""Answers to clients that may leave: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from guided_spec.errors import GuidedSpecError
from guided_spec.server.faults import ApiError, api_error, fault_of_ours, json_response, stopping
from guided_spec.server.middleware import Message, Receive, Send
from guided_spec.server.spans import current_span

_CLIENT_LEFT = Response(status_code=499)  # nobody reads it


def event(reply: BaseModel, name: str | None = None) -> bytes:
    """One server-sent event."""
    return _event(reply.model_dump(), name)


def _event(value: Any, name: str | None) -> bytes:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_dump(value)}\n\n".encode("utf-8", "backslashreplace")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def whole_reply(request: Request, work: Coroutine[Any, Any, BaseModel]) -> Response:
    """The reply that ``work`` gives. It is cancelled when the client leaves."""
    found = await _unless_left(request, work)
    return _CLIENT_LEFT if found is None else json_response(found.model_dump())


async def open_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    last: bytes = b"",
    *,
    error_name: str | None = None,
) -> Response:
    """The events as they come. What fails before the first one is raised.

    last: ends the stream, also after an error. error_name: of the event of an error.
    """
    try:
        first = await _unless_left(request, anext(events, b""))
    except BaseException:
        await events.aclose()
        raise
    if first is None:
        await events.aclose()
        return _CLIENT_LEFT
    return EventStream(first, events, last, error_name)


async def _unless_left(request: Request, work: Any) -> Any:
    """The result of ``work``; None where the client leaves first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _end(working)
        await _end(leaving)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end; one that is done stays as it is."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class EventStream(Response):
    """Sends events until they end or the client leaves, and closes them in both cases.

    If its task is cancelled, as by a server that stops, the client gets an error event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        last: bytes,
        error_name: str | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._last = last
        self._error_name = error_name
        self._has_begun = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the response to one request."""
        del scope
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        sending = asyncio.ensure_future(self._send_all(start, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                current_span().record_status(499, "client_left")
        except asyncio.CancelledError:
            if self._has_begun and not sending.done():
                await _end(sending)
                await self._send_end(send, stopping())
            raise
        finally:
            await _end(sending)
            await _end(leaving)
            await self._events.aclose()

    async def _send_all(self, start: Message, send: Send) -> None:
        await send(start)
        self._has_begun = True
        fault: ApiError | None = None
        await send(_body(self._first))
        try:
            async for piece in self._events:
                await send(_body(piece))
        except GuidedSpecError as error:
            fault = api_error(error)
        except ApiError as error:
            fault = error
        except Exception as error:
            await self._send_end(send, fault_of_ours(error))
            raise  # for the log
        await self._send_end(send, fault)

    async def _send_end(self, send: Send, fault: ApiError | None) -> None:
        if fault is not None:
            await send(_body(_failure(fault, self._error_name)))
        await send(_body(self._last, more_body=False))


def _body(piece: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more_body}


def _failure(fault: ApiError, name: str | None) -> bytes:
    current_span().record_status(fault.status, fault.code or fault.kind)
    return _event(fault.body(), name)
