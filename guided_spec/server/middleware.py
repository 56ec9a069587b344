"""What happens to every request before and after its endpoint: counting, spans, keys, the body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from guided_spec.server.faults import ApiError
from guided_spec.server.limits import TEXT_BYTES
from guided_spec.server.metrics import Metrics
from guided_spec.server.service import ServerSettings
from guided_spec.server.spans import open_span
from guided_spec.server.workers import IS_SMALL, SMALL_BYTES

# A digest of the key; "" without keys. Set for each request before its endpoint runs.
CALLER: ContextVar[str] = ContextVar("caller", default="")


def cache_salt(asked: str | None) -> str | None:
    """The salt of the prefix cache: callers with different keys share no prompts.

    asked: the salt that the request names, which divides one caller's prompts further.
    """
    caller = CALLER.get()
    return f"{caller}:{asked or ''}" if caller else asked


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_CLIENT_LEFT = 499
_OPEN_PATHS = ("/", "/health")  # the page holds nothing that is secret


class CountedRequests:
    """Counts requests by the path of their endpoint and their status."""

    def __init__(self, app: Application, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, is_over = time.perf_counter(), 500, False

        async def watched_receive() -> Message:
            nonlocal status, is_over
            message = await receive()
            if message["type"] == "http.disconnect" and not is_over:
                status, is_over = _CLIENT_LEFT, True
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status, is_over
            if message["type"] == "http.response.start" and not is_over:
                status = message["status"]
            elif not message.get("more_body", False):
                is_over = True
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.count_request(path, status, time.perf_counter() - began)


class TracedRequests:
    """Opens a span for each request that generates. What follows tells it more."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        with open_span(scope["path"], headers) as span:

            async def watched_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.record_status(message["status"])
                await send(message)

            await self._app(scope, receive, watched_send)


class RequiredKey:
    """Lets only requests with one of the keys through, if there are keys."""

    def __init__(self, app: Application, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_closed = scope["type"] == "http" and scope["path"] not in _OPEN_PATHS
        if is_closed and self._digests and not self._is_known(_key_of(scope)):
            fix = (
                "send the header Authorization: Bearer KEY, or x-api-key, with a key of this server"
            )
            fault = ApiError(401, fix, code="invalid_api_key")
            fault.headers["WWW-Authenticate"] = "Bearer"
            await fault.response()(scope, receive, send)
            return
        CALLER.set(_digest(_key_of(scope)).hex() if self._digests else "")
        await self._app(scope, receive, send)

    def _is_known(self, key: bytes) -> bool:
        # Digests have one length, and all are compared: the time tells nothing of the keys.
        given = _digest(key)
        return any([hmac.compare_digest(given, digest) for digest in self._digests])  # noqa: C419


class KnownHost:
    """Lets only requests through whose ``Host`` is a name of this server.

    A page of any site can give its own name this machine's address and ask for what is served here;
    the browser then sends the site's name. A client that sends none is no browser.
    """

    def __init__(self, app: Application, names: Collection[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and "*" not in self._names:
            for header, value in scope["headers"]:
                if header == b"host" and _host_name(value) not in self._names:
                    await _unknown_host(value).response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _host_name(host: bytes) -> str | None:
    """Without the port; None for what is no name."""
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname
    except ValueError:
        return None


def _unknown_host(host: bytes) -> ApiError:
    shown = host.decode("latin-1")
    message = (
        f"Host: {shown!r:.80} is not a name of this server; use its address, or start it with this "
        "name as --allowed-host or with an --api-key"
    )
    return ApiError(403, message, code="unknown_host")


class BoundedBody:
    """Reads a request's body, up to a length and for a time, before anything else sees it."""

    def __init__(self, app: Application, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            message = f"the body was not received within {self._settings.body_seconds:g} s"
            await _refuse(ApiError(408, message, code="body_timeout"), scope, receive, send)
            return
        except ApiError as fault:
            await _refuse(fault, scope, receive, send)
            return
        if body is None:
            return  # the client has left
        IS_SMALL.set(len(body) <= SMALL_BYTES)
        left = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return left.pop() if left else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Message, receive: Receive) -> bytes | None:
        limit = self._settings.max_body_bytes or TEXT_BYTES
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared[:18]) > limit:
            raise _too_long(limit)
        pieces, length, is_whole = [], 0, False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            pieces.append(piece)
            length += len(piece)
            if length > limit:
                raise _too_long(limit)
            is_whole = not message.get("more_body", False)
        return b"".join(pieces)


def _too_long(limit: int) -> ApiError:
    fix = "send less, or start the server with more max_body_bytes"
    return ApiError(413, f"the body is longer than {limit} bytes; {fix}", code="body_too_long")


async def _refuse(fault: ApiError, scope: Message, receive: Receive, send: Send) -> None:
    fault.headers["Connection"] = "close"  # the rest of the body is not read
    await fault.response()(scope, receive, send)


def _key_of(scope: Message) -> bytes:
    """The key as OpenAI's clients send it, or as Anthropic's do."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
