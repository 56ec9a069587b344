"""A server that is told to stop finishes what it has begun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from guided_spec.engine.llm import LLM
from tests.docs.pages import ROOT
from tests.server.running import PATIENCE, running, until
from tests.tiny_llm import make_llm

BODY: dict[str, Any] = {"prompt": "A", "max_tokens": 150, "ignore_eos": True}


class Asker(threading.Thread):
    """Asks for a stream, and keeps all of it."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.url = url
        self.body = body
        self.text = ""
        self.has_begun = threading.Event()

    def run(self) -> None:
        body = {**self.body, "stream": True}
        url = f"{self.url}/v1/completions"
        with (
            contextlib.suppress(httpx.RemoteProtocolError),  # cut off by the server
            httpx.stream("POST", url, json=body, timeout=PATIENCE) as reply,
        ):
            for text in reply.iter_text():
                self.text += text
                self.has_begun.set()


@pytest.mark.slow
def test_drain_loses_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four run and two wait when it begins; all are finished, and nobody else is let in."""
    worker: Any = llm._runner
    engine, is_closed = worker.setup.engine, threading.Event()
    step = engine.step

    def step_and_wait() -> None:
        step()
        if engine.load.running == 4:
            is_closed.wait(PATIENCE)

    with running(llm) as served:
        whole = served.post("/v1/completions", BODY).json()["choices"][0]["text"]
        monkeypatch.setattr(engine, "step", step_and_wait)
        askers = [Asker(served.url, BODY) for _ in range(6)]
        for asker in askers:
            asker.start()
        until(lambda: served.metrics()["guided_spec_waiting_samples"] == 2)
        served.server.should_exit = True
        until(lambda: _is_closed(served.url))
        is_closed.set()
        for asker in askers:
            asker.join(PATIENCE)
    for asker in askers:
        pieces = re.findall(r'"text":"((?:[^"\\]|\\.)*)"', asker.text)
        assert "".join(pieces).encode().decode("unicode_escape") == whole
        assert asker.text.endswith("data: [DONE]\n\n")


def test_a_drain_has_an_end(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """What runs or waits is told so: by an event, or by a status."""
    waited: list[httpx.Response] = []
    long = {**BODY, "n": 4, "max_tokens": 900}
    with running(llm, drain_seconds=1) as served:

        def wait() -> None:
            waited.append(served.post("/v1/completions", long))

        asker, waiter = Asker(served.url, long), threading.Thread(target=wait)
        asker.start()
        assert asker.has_begun.wait(PATIENCE)
        waiter.start()
        until(lambda: served.metrics()["guided_spec_waiting_samples"] >= 3)
        served.server.should_exit = True
        asker.join(PATIENCE)
        waiter.join(PATIENCE)
    assert '"code":"stopping"' in asker.text
    assert asker.text.endswith("data: [DONE]\n\n")
    assert waited[0].status_code == 503
    assert waited[0].json()["error"]["code"] == "stopping"
    assert not [record for record in caplog.records if record.exc_info]
    until(lambda: llm.load.running == 0)


def test_a_body_that_is_still_coming_is_told_too(llm: LLM) -> None:
    with running(llm, drain_seconds=1) as served, socket.socket() as slow:
        slow.settimeout(PATIENCE)
        slow.connect(("127.0.0.1", served.port))
        head = "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        slow.sendall(head.encode())
        until(lambda: len(served.server.server_state.tasks) == 1)
        served.server.should_exit = True
        reply = b""
        while piece := slow.recv(4096):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b'"code": "stopping"' in reply


@pytest.mark.slow
def test_a_model_that_goes_away_ends_the_stream_with_an_error() -> None:
    with make_llm("llama", max_model_len=512) as own, running(own) as served:
        asker = Asker(served.url, {**BODY, "max_tokens": 450, "guided_regex": "[a-z]{400}"})
        asker.start()
        assert asker.has_begun.wait(PATIENCE)
        own.close()
        asker.join(PATIENCE)
        assert '"code":"stopping"' in asker.text
        assert asker.text.endswith("data: [DONE]\n\n")
        assert "is closed" in served.post("/v1/completions", BODY).json()["error"]["message"]


def _is_closed(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return False  # it came while the door was closing; the next one finds it closed
    return False


@contextmanager
def command(*options: str) -> Iterator[subprocess.Popen[str]]:
    """``guided-spec serve`` in a process of its own."""
    arguments = [sys.executable, "-m", "guided_spec.cli.main", "serve", "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        arguments, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_sigterm() -> None:
    with command("--max-model-len", "512", "--api-key", "k", "--api-key", "l") as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        reply = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer l"})
        assert reply.json()["data"][0]["id"] == "bundled"
        headers = {"Authorization": "Bearer k"}
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={**BODY, "stream": True},
            headers=headers,
            timeout=PATIENCE,
        ) as stream:
            texts = stream.iter_text()
            text = next(texts)
            process.send_signal(signal.SIGTERM)
            text += "".join(texts)
        assert text.endswith("data: [DONE]\n\n")
        assert "Finished server process" in "".join(lines)
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_server_without_its_engine_ends() -> None:
    """So that what has started it starts it anew."""
    with command("--max-model-len", "512") as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        next(line for line in lines if "http://" in line)
        subprocess.run(
            ["pkill", "-KILL", "-P", str(process.pid), "-f", "engine.process"], check=True
        )
        assert process.wait(PATIENCE) == 1
        assert "exit status -9" in "".join(lines)
