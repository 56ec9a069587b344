"""A body is as long as all of its pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from guided_spec.models.pictures.picture import Sight
from guided_spec.server.middleware import BoundedBody
from guided_spec.server.service import ServerSettings

LIMIT = 100


def answer_to(pieces: Iterable[bytes]) -> tuple[int, bytes]:
    """The status and the body that a request whose body comes in pieces is answered with."""
    left, sent = list(pieces), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope
        assert len((await receive())["body"]) <= LIMIT
        await send({"type": "http.response.start", "status": 200, "headers": []})

    bounded = BoundedBody(app, ServerSettings(max_body_bytes=LIMIT))
    asyncio.run(bounded({"type": "http", "headers": [], "method": "POST"}, receive, send))  # type: ignore[arg-type]
    return int(sent[0]["status"]), b"".join(one.get("body", b"") for one in sent[1:])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("pieces", "status"),
    [([100], 200), ([60, 40], 200), ([101], 413), ([60, 41], 413), ([1] * 101, 413)],
)
def test_pieces_are_added_up(pieces: list[int], status: int) -> None:
    found, told = answer_to(b"x" * piece for piece in pieces)
    assert found == status
    if status == 413:
        assert b"longer than 100 bytes; send less, or start the server with more max_body_b" in told


@pytest.mark.parametrize(
    ("own", "refusal", "most"),
    [
        (None, "it sees nothing", 4 * 2**20),
        (None, None, 32 * 2**20),
        (3000, None, 3000),
        (64 * 2**20, "it sees nothing", 64 * 2**20),
    ],
)
def test_models_that_read_pictures_take_more(
    own: int | None, refusal: str | None, most: int
) -> None:
    assert ServerSettings(max_body_bytes=own).body_bytes(Sight(refusal)) == most
