"""Clients that break off, stall, flood or send nonsense; normal requests work afterwards."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from guided_spec.engine.llm import LLM
from tests.server.running import ASK, LONG, Running, running, until

CHAT = "/v1/chat/completions"
LETTERS = {"format": {"type": "regex_schema", "regex_schema": "[a-z]{900}"}}
BODY = json.dumps({"messages": ASK, **LONG, "stream": True}).encode()


@pytest.fixture(scope="module")
def attacked(llm: LLM) -> Iterator[Running]:
    settings: dict[str, Any] = {"body_seconds": 1.0, "max_body_bytes": 200_000}
    with running(llm, **settings, max_connections=40) as made:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
        yield made
        made.require_service()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def head(length: int, path: str = CHAT) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def connect(served: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=20)


def status(connection: socket.socket) -> int:
    """Of the answer; 0 where the server has closed without one."""
    data = b""
    try:
        while b"\r\n" not in data and (piece := connection.recv(4096)):
            data += piece
    except ConnectionResetError:
        return 0
    return int(data.split(b" ")[1]) if data else 0


def deep(levels: int) -> str:
    return '{"messages": ' + "[" * levels + "]" * levels + "}"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": "\xff\xfe"}',
        b"\xff\xfe\x00",
        b"{",
        b"",
        b"null",
        b"[]",
        b'"text"',
        b'{"messages": NaN}',
        b'{"messages": [], "seed": 1' + b"0" * 5000 + b"}",
        deep(90_000).encode(),
        deep(900).encode(),
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "model": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}',
        b'{"messages": [{"role": "user", "content": "a"}], "stop": ["\\ud800"]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"99999999": 1}}',
        b'{"messages": [{"role": "user", "content": "a"}], "guided_regex": "(((a*)*)*)*\\ud800"}',
        b'{"messages": [{"role": "user", "content": "a"}], "guided_regex": "\\u0000("}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": "x", "n": {}}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}], "tool_choice": {}}',
        b'{"messages": [{"role": "\\u0000", "tool_calls": 3}], "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 3, '
        b'"messages": 4, "conversation": 5}, "max_tokens": 1}',
        json.dumps({"messages": ASK, "guided_json": {"a": [[[]]] * 3, "type": "object"}}).encode(),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize"])
def test_nonsense(attacked: Running, path: str, body: bytes) -> None:
    text = (
        body.replace(b'"messages": [{', b'"prompt": "a", "x": [{') if "chat" not in path else body
    )
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{attacked.url}{path}", content=text, headers=headers, timeout=60)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]


@pytest.mark.parametrize("nested", [200, 600, 5000])
def test_deep_schemas_and_messages(attacked: Running, nested: int) -> None:
    schema = '{"properties": {"a": ' * nested + "{}" + "}}" * nested
    content = '[{"text": ' * nested + "1" + "}]" * nested
    bodies = (
        f'{{"prompt": "a", "guided_json": {schema}}}',
        f'{{"messages": [{{"role": "user", "content": {content}}}]}}',
        f'{{"messages": [{{"role": "assistant", "content": "", "tool_calls": {content}}}]}}',
        f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": {content}}}',
    )
    for path, body in zip(("/v1/completions", CHAT, CHAT, CHAT), bodies, strict=True):
        headers = {"Content-Type": "application/json"}
        body = f'{body[:-1]}, "max_tokens": 1}}'
        reply = httpx.post(f"{attacked.url}{path}", content=body, headers=headers, timeout=60)
        assert reply.status_code in (200, 400), reply.text


def test_a_body_that_is_too_long(attacked: Running) -> None:
    with closing(connect(attacked)) as declared:
        declared.sendall(head(10**12))
        assert status(declared) == 413

    def pieces() -> Iterator[bytes]:  # without a declared length
        for _ in range(100):
            yield b" " * 10_000

    try:
        reply = httpx.post(f"{attacked.url}{CHAT}", content=pieces())
        assert reply.status_code == 413
    except (httpx.WriteError, httpx.RemoteProtocolError):
        pass  # the connection was closed before all of it was sent
    attacked.require_service()


def test_a_body_that_comes_too_slowly(attacked: Running) -> None:
    with closing(connect(attacked)) as slow:
        slow.sendall(head(len(BODY)) + BODY[:10])
        began = time.monotonic()
        assert status(slow) == 408
        assert time.monotonic() - began < 15
    attacked.require_service()


def test_leaving_at_every_byte_of_a_request(attacked: Running) -> None:
    whole = head(len(BODY)) + BODY
    for sent in range(len(whole)):
        with closing(connect(attacked)) as early:
            early.sendall(whole[:sent])
    attacked.require_service()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_leaving_at_every_event_of_an_answer(attacked: Running, path: str) -> None:
    asked: dict[str, Any] = {
        CHAT: {"messages": ASK, **LONG},
        "/v1/completions": {"prompt": "A", **LONG},
        "/v1/responses": {"input": "A", "text": LETTERS, "max_output_tokens": 950},
    }
    data = json.dumps({**asked[path], "stream": True}).encode()
    for count in range(8):
        with closing(connect(attacked)) as reader:
            reader.sendall(head(len(data), path) + data)
            seen = b""
            while seen.count(b"data: ") <= count:
                piece = reader.recv(4096)
                assert piece
                seen += piece
    attacked.require_service()


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_leaving_behind_the_request(attacked: Running, seconds: float) -> None:
    for _ in range(3):
        with closing(connect(attacked)) as late:
            late.sendall(head(len(BODY)) + BODY)
            time.sleep(seconds)
    attacked.require_service()


def test_a_client_that_does_not_read(attacked: Running) -> None:
    with closing(connect(attacked)) as deaf:
        deaf.sendall(head(len(BODY)) + BODY)
        until(lambda: attacked.metrics()["guided_spec_running_samples"] > 0)
        reply = attacked.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
        assert reply.status_code == 200
    attacked.require_service()


def test_a_thousand_connections(attacked: Running) -> None:
    """Some say nothing, some a part, the others all of a request; and all are there at once."""
    said = (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with ExitStack() as stack:
        open_ = [stack.enter_context(closing(connect(attacked))) for _ in range(1000)]
        until(lambda: len(attacked.server.server_state.connections) == 1000)
        for at, one in enumerate(open_):
            one.sendall(said[at % 3])
        assert {status(one) for one in open_[2::3]} == {503}
    until(lambda: not attacked.server.server_state.connections)
    attacked.require_service()


def test_what_is_no_http(attacked: Running) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"\r\n" * 9,
    ):
        with closing(connect(attacked)) as odd:
            odd.sendall(data)
            odd.shutdown(socket.SHUT_WR)
            assert status(odd) in (0, 400, 404, 405)
    attacked.require_service()


def test_paths_that_are_not_there(attacked: Running) -> None:
    for method, path, expected in (
        ("POST", "/", 405),
        ("GET", "/docs", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/../../etc", 404),
        ("POST", "/v1/" + "x" * 5000, 404),
    ):
        reply = httpx.request(method, f"{attacked.url}{path}")
        assert reply.status_code == expected, path
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert not [name for name in attacked.metrics() if "xxx" in name]
