"""What a connection may hold before a request is complete, and after its client stops reading."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from guided_spec.engine.llm import LLM
from guided_spec.server.connection import MOST_HEAD_BYTES, MOST_HEADERS
from tests.server.running import LONG, Running, running, until

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def bounded(llm: LLM) -> Iterator[Running]:
    with running(llm, head_seconds=1.0, write_seconds=1.0, api_keys=("k",)) as made:
        yield made
        reply = httpx.get(f"{made.url}/health")
        assert reply.status_code == 200


@pytest.fixture(scope="module")
def patient(llm: LLM) -> Iterator[Running]:
    """What ends a connection here is no time limit."""
    with running(llm, head_seconds=300.0, body_seconds=300.0) as made:
        yield made


def connect(served: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=20)


def answer(connection: socket.socket) -> bytes:
    """Up to the end of the connection."""
    data = b""
    try:
        while piece := connection.recv(4096):
            data += piece
    except ConnectionResetError:
        pass
    return data


def send_until_closed(connection: socket.socket, first: bytes, pieces: Iterator[bytes]) -> int:
    """How many bytes are taken before the server closes, 8 MB at most."""
    sent = 0
    try:
        connection.sendall(first)
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
            if sent > 8 * 2**20:
                break
            time.sleep(0.0005)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sent


@pytest.mark.parametrize(
    "more",
    [
        b"x: y\r\n" * (MOST_HEADERS + 1) + b"\r\n",
        b"x: " + b"y" * (MOST_HEAD_BYTES + 1),
    ],
    ids=["many", "long"],
)
def test_a_head_that_is_too_long(bounded: Running, more: bytes) -> None:
    with closing(connect(bounded)) as client:
        client.sendall(GET + more)
        reply = answer(client)
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_long"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (GET, b"a" * 500 + b": b\r\n"),
        (GET + b"x: ", b"y" * 5000),
        (b"GET /", b"y" * 5000),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"x: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 20),
        (CHUNKED + b"1\r\n{\r\n0\r\nx: ", b"y" * 5000),
    ],
    ids=["headers", "value", "path", "trailers", "trailer"],
)
def test_a_head_without_end(patient: Running, first: bytes, piece: bytes) -> None:
    def pieces() -> Iterator[bytes]:
        while True:
            yield piece

    with closing(connect(patient)) as client:
        # What is over the limit is on its way, in the buffers of both sides.
        assert send_until_closed(client, first, pieces()) < 6 * 2**20
    until(lambda: not patient.server.server_state.connections)


def test_headers_that_are_many_and_few_enough(bounded: Running) -> None:
    with closing(connect(bounded)) as client:
        headers = b"".join(b"x%d: %s\r\n" % (at, b"y" * 400) for at in range(MOST_HEADERS - 2))
        for _ in range(3):  # on one connection
            client.sendall(GET + headers + b"\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            while not client.recv(4096).endswith(b"}"):
                pass


@pytest.mark.parametrize(("sent", "status"), [(GET, b"HTTP/1.1 408 "), (b"", b"")])
def test_a_head_that_comes_too_slowly(bounded: Running, sent: bytes, status: bytes) -> None:
    began = time.monotonic()
    with closing(connect(bounded)) as client:
        client.sendall(sent)
        assert answer(client).startswith(status)
    assert 0.9 < time.monotonic() - began < 10


def test_a_body_that_nobody_wants_ends_the_connection(bounded: Running) -> None:
    began = time.monotonic()
    with closing(connect(bounded)) as client:
        client.sendall(CHUNKED + b"1\r\n{\r\n")  # without a key
        assert answer(client).startswith(b"HTTP/1.1 401 ")
    assert time.monotonic() - began < 4  # uvicorn keeps an idle connection for five seconds


def test_a_stream_that_nobody_reads_ends(llm: LLM) -> None:
    body: dict[str, Any] = {"prompt": "A", "n": 4, **LONG, "logprobs": 20, "stream": True}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with running(llm, write_seconds=1.0) as served:
        # Small buffers of the system, so that few events fill them.
        for listening in served.server.servers[0].sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with closing(socket.socket()) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", served.port))
            deaf.sendall(head.encode() + data)
            until(lambda: served.metrics()["guided_spec_running_samples"] > 0)
            until(served.is_idle)
            name = "guided_spec_requests_total{/v1/completions,499}"
            until(lambda: served.metrics().get(name, 0) == 1)
        served.require_service()


@pytest.mark.slow
def test_an_empty_line_after_a_body_ends_no_answer(llm: LLM) -> None:
    data = json.dumps({"prompt": "A", "n": 4, **LONG, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with running(llm, head_seconds=1.0) as served, closing(connect(served)) as client:
        client.sendall(head.encode() + data)
        client.sendall(b"\r\n")
        assert b"data: [DONE]" in answer(client)
