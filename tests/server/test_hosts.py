"""A page of another site cannot read what a server of this machine says."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from guided_spec.engine.llm import LLM
from guided_spec.server.app import build_server
from guided_spec.server.service import ServerSettings


def asked(llm: LLM, address: str, hosts: list[str], **settings: Any) -> list[httpx.Response]:
    """What ``/health`` says to each ``Host``."""
    app: Any = build_server(llm, ServerSettings(**settings), address, 8000).config.app

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.get("/health", headers={"Host": host}) for host in hosts]

    return asyncio.run(main())


def statuses(llm: LLM, address: str, hosts: list[str], **settings: Any) -> list[int]:
    """Of these answers."""
    return [reply.status_code for reply in asked(llm, address, hosts, **settings)]


OTHERS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]", "[", ""]
OWN = ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"]


def test_loopback_names_alone(llm: LLM) -> None:
    for address in ("127.0.0.1", "localhost", "::1"):
        assert statuses(llm, address, OWN) == [200] * len(OWN)
        assert statuses(llm, address, OTHERS) == [403] * len(OTHERS)
    assert statuses(llm, "127.0.0.9", ["127.0.0.9:8000", *OTHERS[:1]]) == [200, 403]


@pytest.mark.parametrize(
    ("address", "settings"),
    [
        ("127.0.0.1", {"api_keys": ("k",)}),
        ("127.0.0.1", {"allowed_hosts": ("*",)}),
        ("0.0.0.0", {}),
    ],
)
def test_any_name(llm: LLM, address: str, settings: dict[str, Any]) -> None:
    assert statuses(llm, address, OTHERS[:2], **settings) == [200, 200]


def test_names_that_are_told(llm: LLM) -> None:
    hosts = ["models.example:80", "localhost", "evil.example"]
    allowed = {"allowed_hosts": ("Models.example",)}
    assert statuses(llm, "127.0.0.1", hosts, **allowed) == [200, 200, 403]
    assert statuses(llm, "0.0.0.0", hosts, **allowed) == [200, 200, 403]


def test_the_refusal_says_what_to_do(llm: LLM) -> None:
    (reply,) = asked(llm, "127.0.0.1", ["a.b"])
    assert reply.json()["error"]["code"] == "unknown_host"
    assert "--allowed-host" in reply.json()["error"]["message"]
