"""From a request's bytes to the record of its fields, at a cost that does not depend on its shape.

FastAPI would do so on the event loop, and pydantic would make an error of each item of a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from guided_spec.server.endpoints.values import body_fault
from guided_spec.server.faults import ApiError, unreadable_body
from guided_spec.server.workers import SMALL_BYTES, Workers

MOST_VALUES = 2**18  # of a body; each list, object and string counts as four
_WEIGHT = 4


class BodyRoute(APIRoute):
    """A path whose body is read by ``read_body`` before FastAPI looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request of this path."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            read = _ReadRequest(request.scope, request.receive)
            data = await read.body()
            # A body of another type is FastAPI's to refuse.
            if data and "json" in read.headers.get("content-type", ""):
                if len(data) > SMALL_BYTES:
                    workers: Workers = request.app.state.workers
                    read.record = await workers.run(lambda: read_body(data, kind))
                else:
                    read.record = read_body(data, kind)
            return await handle(read)

        return read_and_handle


class _ReadRequest(Request):
    """A request whose JSON is a record already, which FastAPI's validation leaves as it is."""

    record: BaseModel | None = None

    async def json(self) -> Any:
        """The record, instead of parsing the body again."""
        return self.record


def read_body(data: bytes, kind: type[BaseModel]) -> BaseModel:
    """The record of a body. Raises ApiError for the first thing that is wrong."""
    if len(data) > SMALL_BYTES:
        _require_few_values(data)
    try:
        # Of bytes, json would guess another encoding, in which values cannot be counted so.
        return kind.model_validate(json.loads(data.decode("utf-8-sig")))
    except ValidationError as error:
        raise body_fault(error, kind) from None
    except json.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error.msg} at character {error.pos}"
        raise ApiError(400, message, code="invalid_json") from None
    except (ValueError, RecursionError):  # no UTF-8, a number of thousands of digits, deep nesting
        raise unreadable_body() from None


def _require_few_values(data: bytes) -> None:
    """Raise ApiError for JSON that would become many objects of Python."""
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = _WEIGHT * (unescaped.count(b'"') // 2)
    if count <= MOST_VALUES:
        outside = b"".join(unescaped.split(b'"')[::2])  # of strings
        opened = outside.count(b"[") + outside.count(b"{")
        count += outside.count(b",") + _WEIGHT * opened
    if count > MOST_VALUES:
        message = (
            f"the body holds more than {MOST_VALUES} values, of which a list, an object or a "
            f"string counts as {_WEIGHT}; send less, or long prompts as text"
        )
        raise ApiError(400, message, code="too_many_values")
