"""A server in a thread, and what the tests ask of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from guided_spec.engine.llm import LLM
from guided_spec.server.app import build_server
from guided_spec.server.service import ServerSettings

PATIENCE = 60.0  # seconds; only a fault takes as long

ASK: Any = [{"role": "user", "content": "Please call Maria Lopez at +49 170 5551234."}]
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}  # seconds of work
BOOK: Any = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book seats on a train.",
        "parameters": {
            "type": "object",
            "properties": {"seats": {"type": "integer"}, "window": {"type": "boolean"}},
            "required": ["seats", "window"],
            "additionalProperties": False,
        },
    },
}


class Contact(BaseModel):
    """What the bundled model finds in ``ASK``."""

    name: str
    phone: str


class Running(NamedTuple):
    """url: without a path."""

    url: str
    port: int
    server: uvicorn.Server

    def metrics(self) -> dict[str, float]:
        """By name, those with labels as ``name{label,...}``."""
        text = httpx.get(f"{self.url}/metrics").text
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(sample.labels.values())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """One request with a client of its own."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE, **options)

    def is_idle(self) -> bool:
        """Whether no text runs or waits."""
        found = self.metrics()
        names = ("guided_spec_running_samples", "guided_spec_waiting_samples")
        return all(found[name] == 0 for name in names)

    def require_service(self) -> None:
        """A normal request is served, and nothing else is running."""
        until(self.is_idle)
        reply = self.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] > 0


def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


@contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[Running]:
    """A server on a free port; stopped behind the block."""
    server = build_server(llm, ServerSettings(**settings), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
