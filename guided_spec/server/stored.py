"""Responses that are kept for a while, each with the conversation that led to it."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from guided_spec.server.faults import ApiError, invalid_value


class StoredResponse(NamedTuple):
    """reply, items: as JSON, which takes as many bytes as it says. ends: when it is forgotten.

    items: the conversation, with the response itself. caller: whose key it was asked with.
    """

    reply: bytes
    items: bytes
    caller: str
    ends: float

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.reply) + len(self.items)


class ResponseStore:
    """Keeps the newest responses, by their ids; thread-safe.

    most: how many; 0 keeps none. seconds: for how long each. max_bytes: of all of them.
    clock: gives seconds.

    A response is its caller's alone: for others it is not there.
    """

    def __init__(
        self,
        most: int,
        seconds: float,
        max_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # the oldest first
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything."""
        return self._most > 0

    @property
    def num_bytes(self) -> int:
        """What is kept takes."""
        with self._lock:
            self._forget_old()
            return self._num_bytes

    def add(
        self, response_id: str, reply: dict[str, Any], items: Sequence[Any], caller: str
    ) -> None:
        """Keep a response. One that is larger than all may be is forgotten at once."""
        ends = self._clock() + self._seconds
        stored = StoredResponse(_dump(reply), _dump(list(items)), caller, ends)
        with self._lock:
            self._kept[response_id] = stored
            self._num_bytes += stored.num_bytes
            self._forget_old()

    def find(self, response_id: str, caller: str, param: str | None = None) -> StoredResponse:
        """The response of an id. param: the argument that names it. Raises ApiError."""
        if not self.is_on:
            fix = "start it with --store-responses, or send the whole conversation as input"
            message = f"{param or response_id}: this server stores no responses; {fix}"
            raise invalid_value(message, param) if param else ApiError(404, message, code=_CODE)
        with self._lock:
            self._forget_old()
            stored = self._kept.get(response_id)
        if stored is None or stored.caller != caller:
            name = f"{param}={response_id!r:.80}" if param else f"{response_id!r:.80}"
            fix = "send the whole conversation as input"
            message = f"{name}: no such response is stored here, or no longer; {fix}"
            raise ApiError(404, message, code=_CODE, param=param)
        return stored

    def remove(self, response_id: str, caller: str) -> None:
        """Forget a response. Raises ApiError where there is none."""
        self.find(response_id, caller)
        with self._lock:
            self._drop(response_id)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            is_much = len(self._kept) > self._most or self._num_bytes > self._max_bytes
            if not is_much and self._kept[oldest].ends > now:
                return
            self._drop(oldest)

    def _drop(self, response_id: str) -> None:
        stored = self._kept.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes


_CODE = "response_not_found"


def _dump(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
