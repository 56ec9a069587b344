"""The server: which path is answered by what, and the page at ``/``; uvicorn runs it."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from html import escape
from importlib.resources import files
from string import Template
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel

import guided_spec
from guided_spec.server.connection import BoundedConnection
from guided_spec.server.drain import Drain, StoppableRequests
from guided_spec.server.endpoints.anthropic import (
    MessageBody,
    MessagesHandler,
    TokenCount,
    count_tokens,
)
from guided_spec.server.endpoints.anthropic_bodies import CountBody, MessagesBody
from guided_spec.server.endpoints.bodies import (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    TokenizeBody,
)
from guided_spec.server.endpoints.chat import ChatHandler
from guided_spec.server.endpoints.completions import CompletionHandler
from guided_spec.server.endpoints.reading import BodyRoute
from guided_spec.server.endpoints.replies import (
    ChatReply,
    CompletionReply,
    DeletedResponse,
    ModelCard,
    ModelList,
    ResponseReply,
    TokenizeReply,
)
from guided_spec.server.endpoints.responses import ResponseHandler
from guided_spec.server.endpoints.tokens import tokenized
from guided_spec.server.faults import add_handlers, json_response
from guided_spec.server.listening import address, bind, listen
from guided_spec.server.middleware import (
    CALLER,
    BoundedBody,
    CountedRequests,
    KnownHost,
    RequiredKey,
    TracedRequests,
)
from guided_spec.server.service import ServedModel, ServerSettings, Service
from guided_spec.server.streaming import open_stream, whole_reply
from guided_spec.trace.page import asset, legend

_DONE = b"data: [DONE]\n\n"
_LAST_SECONDS = 5.0  # to report to clients that their requests are cut off
_MOST_TOKENS = 256  # what the playground's form says at first
_KEY = """<p class="field"><label for="key">API key</label>
<input id="key" type="password" autocomplete="off" required></p>"""
_PICTURES = """<p class="field"><label for="picture">Pictures</label>
<input id="picture" type="file" accept="image/*" multiple aria-describedby="picture-hint">
<span id="picture-hint" class="soft">Or drop or paste them.</span></p>
<ul id="pictures" class="pictures" aria-label="Pictures"></ul>"""


def serve(
    llm: ServedModel,
    settings: ServerSettings,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    until: Future[None] | None = None,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, or until something else is done.

    sockets: what ``listening.bind`` has taken before; None takes them now. Raises ConfigError for
    a host or a port that cannot be had.

    Then nobody new is let in, and requests that are running or waiting are finished, up to
    ``settings.drain_seconds``. Call it from the main thread, where signals arrive.
    """
    # uvicorn raises the signal again when it is done, and that is an end as it should be.
    signal.signal(signal.SIGTERM, _exit)
    taken = bind(host, port) if sockets is None else sockets
    server = build_server(llm, settings, host, port)

    def stop(_done: Future[None]) -> None:
        server.should_exit = True

    if until is not None:
        until.add_done_callback(stop)
    listen(taken)
    logging.getLogger("uvicorn.error").info("Listening on %s", address(host, taken))
    server.run(taken)


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def build_server(
    llm: ServedModel, settings: ServerSettings, host: str, port: int
) -> uvicorn.Server:
    """A server that is not running yet. port: 0 takes a free one.

    Without keys and ``settings.allowed_hosts``, a server of this machine alone answers to its
    loopback names alone: a browser would let a page of any site ask it under the site's name.
    """
    names = ("localhost", "127.0.0.1", "::1")
    is_open = not settings.api_keys and (host in names or host.startswith("127."))
    if is_open or settings.allowed_hosts:
        allowed = dict.fromkeys([*settings.allowed_hosts, *names, host])
        settings = replace(settings, allowed_hosts=tuple(allowed))
    connection: Any = partial(BoundedConnection, limits=settings)
    config = uvicorn.Config(
        build_app(llm, settings),
        http=connection,
        host=host,
        port=port,
        log_level="info",
        timeout_graceful_shutdown=int(settings.drain_seconds),
        # uvicorn counts the connection that it refuses too.
        limit_concurrency=settings.max_connections + 1,
        server_header=False,
        ws="none",
    )
    return uvicorn.Server(config)


def build_app(llm: ServedModel, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application that serves ``llm``; it stays the caller's, to be closed afterwards.

    Any ASGI server runs it; ``serve`` does so with uvicorn.
    """
    settings = ServerSettings() if settings is None else settings
    settings = replace(settings, max_body_bytes=settings.body_bytes(llm.sight))
    service, drain = Service(llm, settings), Drain()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        _ = llm.load  # raises where a server's worker was forked after the model's start
        yield
        await drain.wait(_LAST_SECONDS)
        service.workers.close()

    app = FastAPI(
        lifespan=lifespan,
        title="guided_spec",
        version=guided_spec.__version__,
        docs_url=None,  # the pages load scripts from elsewhere
        redoc_url=None,
        responses={code: {"model": _FaultReply} for code in ("4XX", "5XX")},
    )
    app.router.route_class, app.state.workers = BodyRoute, service.workers
    add_handlers(app)
    _add_model_paths(app, service)
    _add_text_paths(app, service)
    _add_tokenize_path(app, service)
    if settings.playground:
        _add_playground(app, service)
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    # The one that is added last sees a request first.
    app.add_middleware(BoundedBody, settings=settings)
    app.add_middleware(RequiredKey, keys=settings.api_keys)
    if settings.allowed_hosts:
        app.add_middleware(KnownHost, names=settings.allowed_hosts)
    app.add_middleware(StoppableRequests, drain=drain)
    app.add_middleware(TracedRequests)
    app.add_middleware(CountedRequests, metrics=service.metrics, paths=paths)
    return app


class _Fault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class _FaultReply(BaseModel):
    error: _Fault


def _documented(reply: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The replies of a path, for the description of the interface."""
    return {200: {"model": reply, "content": {"text/event-stream": {}}}}


def _add_text_paths(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=_documented(ChatReply))
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Reply to a conversation."""
        return await _answered(request, body, ChatHandler(service, body), _DONE)

    @app.post("/v1/completions", responses=_documented(CompletionReply))
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Go on from prompts."""
        return await _answered(request, body, CompletionHandler(service, body), _DONE)

    @app.post("/v1/responses", responses=_documented(ResponseReply))
    async def responses(request: Request, body: ResponsesBody) -> Response:
        """Respond to a conversation."""
        handler = await service.workers.run(lambda: ResponseHandler(service, body))
        return await _answered(request, body, handler, error_name="error")

    @app.get("/v1/responses/{response_id}", responses={200: {"model": ResponseReply}})
    async def response(response_id: str) -> Response:
        """A response that was stored."""
        found = service.responses.find(response_id, CALLER.get())
        return Response(found.reply, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", responses={200: {"model": DeletedResponse}})
    async def forget_response(response_id: str) -> Response:
        """Forget a response, which others that went on from it do not need."""
        service.responses.remove(response_id, CALLER.get())
        return json_response(DeletedResponse(id=response_id).model_dump())

    @app.post("/v1/messages", responses=_documented(MessageBody))
    async def messages(request: Request, body: MessagesBody) -> Response:
        """Reply to a conversation, in the form of Anthropic's interface."""
        handler = await service.workers.run(lambda: MessagesHandler(service, body))
        return await _answered(request, body, handler, error_name="error")

    @app.post("/v1/messages/count_tokens", responses={200: {"model": TokenCount}})
    async def messages_tokens(body: CountBody) -> Response:
        """The tokens of a prompt, in the form of Anthropic's interface."""
        return json_response((await count_tokens(service, body)).model_dump())


async def _answered(
    request: Request,
    body: ChatBody | CompletionBody | ResponsesBody | MessagesBody,
    handler: ChatHandler | CompletionHandler | ResponseHandler | MessagesHandler,
    last: bytes = b"",
    *,
    error_name: str | None = None,
) -> Response:
    """The whole reply, or events if the body asks for a stream, see ``open_stream``."""
    if body.stream:
        return await open_stream(request, handler.events(), last, error_name=error_name)
    return await whole_reply(request, handler.whole())


def _add_tokenize_path(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses={200: {"model": TokenizeReply}})
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a prompt."""
        with service.admission.hold(1):
            return await tokenized(service, body)


def _add_playground(app: FastAPI, service: Service) -> None:
    most = service.max_tokens(None, "max_tokens")
    page = render_playground(
        most,
        asks_for_key=bool(service.settings.api_keys),
        reads_pictures=service.llm.sight.refusal is None,
    )
    headers = {"Content-Security-Policy": page.policy, "X-Content-Type-Options": "nosniff"}

    @app.get("/", response_class=HTMLResponse)
    async def playground() -> Response:
        """A page to try things on."""
        return HTMLResponse(page.html, headers=headers)


class Playground(NamedTuple):
    """One page, of the trace page's parts and those in ``playground/``.

    html: it needs nothing but the server. policy: its Content-Security-Policy, which lets its own
    scripts run alone.
    """

    html: str
    policy: str


def render_playground(
    max_tokens: int, *, asks_for_key: bool, reads_pictures: bool = False
) -> Playground:
    """The page.

    max_tokens: the most that a request may ask for. asks_for_key: whether requests must bring one.
    reads_pictures: whether they may hold pictures.
    """
    examples = json.loads(_playground_file("examples.json"))
    names = [escape(example["name"]) for example in examples]
    options = [f'<option value="{at}">{name}</option>' for at, name in enumerate(names)]
    scripts = asset("page.js"), _playground_file("page.js")
    html = Template(_playground_file("page.html")).substitute(
        style=asset("page.css") + _playground_file("page.css"),
        examples="\n".join(options),
        examples_json=json.dumps(examples).replace("<", "\\u003c"),
        max_tokens=min(max_tokens, _MOST_TOKENS),
        key=_KEY if asks_for_key else "",
        pictures=_PICTURES if reads_pictures else "",
        legend=legend(),
        trace_script=scripts[0],
        script=scripts[1],
    )
    return Playground(html, _policy(scripts))


def _playground_file(name: str) -> str:
    folder = files("guided_spec") / "server" / "playground"
    return (folder / name).read_text(encoding="utf-8")


def _policy(scripts: tuple[str, ...]) -> str:
    """Nothing from elsewhere, no framing, and only these scripts, each after a line break."""
    digests = [hashlib.sha256(f"\n{script}".encode()).digest() for script in scripts]
    sources = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _add_model_paths(app: FastAPI, service: Service) -> None:
    def card(name: str) -> ModelCard:
        length = service.llm.max_model_len
        parent = service.model_name if name in service.llm.loras else None
        known = {"created": service.started, "max_model_len": length, "parent": parent}
        return ModelCard.model_validate({"id": name, **known})

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are served."""
        return json_response({"status": "ok"})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters, for Prometheus."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.text(), media_type=kind)

    @app.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        """The model, under each of its names, and its adapters."""
        cards = [card(name) for name in service.served_names]
        return json_response(ModelList(data=cards).model_dump())

    @app.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}})
    async def model(name: str) -> Response:
        """The model, by a name."""
        service.require_model(name)
        return json_response(card(name).model_dump())
