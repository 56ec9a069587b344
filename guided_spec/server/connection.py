"""One client's connection: how much of a request's head is kept, and how long a client may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from guided_spec.server.faults import ApiError
from guided_spec.server.limits import ServerLimits

MOST_HEADERS = 100
MOST_HEAD_BYTES = 64 * 2**10  # of a request's line and headers, or of what follows its body


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits that httptools does not have.

    A head must be short and come in time. A client that reads nothing for a time is cut off, and
    whatever its request holds is freed.
    """

    def __init__(self, *args: Any, limits: ServerLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._num_headers = 0
        self._head_bytes = 0  # since the last byte of a body
        self._is_reading = False  # a request whose end has not come
        self._fault: ApiError | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; its first request must arrive in time."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers: the client has left."""
        _stop(self._head_timer)
        _stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come. What is kept of it without being a body is counted."""
        self._head_bytes += len(data)
        if not self._is_reading and self._head_timer is None:
            self._expect_head()
        super().data_received(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_too_long())

    def on_message_begin(self) -> None:
        """A request's first line begins."""
        self._num_headers = 0
        self._is_reading = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers after a body count too."""
        self._num_headers += 1
        if self._num_headers > MOST_HEADERS:
            self._fault = _too_long()
            raise ValueError(self._fault.message)  # ends the parsing, and send_400_response follows
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there; the application bounds the time for the body."""
        _stop(self._head_timer)
        self._head_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request's end; another may come."""
        self._head_bytes = 0
        self._is_reading = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The response is written, except what the client has not read yet."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_reading()
        if self._is_reading and self.cycle.response_complete:
            self.transport.close()  # the rest of the body is not needed

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, or was not to be parsed any further."""
        if self._fault is None:
            super().send_400_response(msg)
        else:
            self._refuse(self._fault)

    def pause_writing(self) -> None:
        """The client reads more slowly than the response is written."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The client has read on."""
        _stop(self._write_timer)
        self._write_timer = None
        super().resume_writing()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._end_waiting)

    def _expect_reading(self) -> None:
        _stop(self._write_timer)
        self._write_timer = self.loop.call_later(self._limits.write_seconds, self._cut_off)

    def _end_waiting(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # this response comes first; some clients end a body with a line
        elif self._is_reading:
            message = f"the headers were not received within {self._limits.head_seconds:g} s"
            self._refuse(ApiError(408, message, code="head_timeout"))
        else:
            self.transport.close()

    def _cut_off(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, fault: ApiError) -> None:
        """Send the error and close; a response that is being written ends here."""
        if self.cycle is None or self.cycle.response_complete:
            body = bytes(fault.response().body)
            lines = (
                f"HTTP/1.1 {fault.status} {fault.code}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                "Connection: close",
            )
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def _too_long() -> ApiError:
    message = f"the headers are more than {MOST_HEADERS} or {MOST_HEAD_BYTES} bytes; send less"
    return ApiError(431, message, code="headers_too_long")


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
