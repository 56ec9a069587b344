"""The clients of a server: who asks for little, who leaves, and who means no good."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp

from benchmarks.hostile.cases import CASES, COMPLETIONS, Case
from benchmarks.serving.requests import Request, make_requests
from benchmarks.serving.traffic import Answer, Client, Pattern, arrivals, connect

_HOLD_SECONDS = 5.0  # of a connection that sends or reads nothing
_SMALL = ("documents", "regex", "choice", "grammar")
_RAW = ("headers without end", "half a request", "a stream that nobody reads")
HOSTILE = (*(case.name for case in CASES), *_RAW)


class Outcome(NamedTuple):
    """What came of one client.

    kind: "small", "cancelled", or the name of a hostile case. fault: what is wrong with it, None
    if nothing is. answer: of a small request. said: the status and the code of the answer.
    """

    kind: str
    seconds: float
    fault: str | None = None
    answer: Answer | None = None
    said: str = ""


class Clients:
    """Draws who comes next, from a seed.

    hostile_share: of all clients. cancelled_share: of the others.
    """

    def __init__(self, url: str, seed: int, hostile_share: float, cancelled_share: float) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._shares = hostile_share, cancelled_share
        self._small = [one for name in _SMALL for one in make_requests(name, 64, 1.0, seed)]
        self._small += make_requests("documents", 32, 0.0, seed)  # free text
        self._hostile = list[str]()

    async def send(self, count: int, pattern: Pattern, *, is_hostile: bool) -> list[Outcome]:
        """``count`` clients, who come as the pattern says."""
        tasks, began = list[asyncio.Task[Outcome]](), time.perf_counter()
        async with connect(self._url, pattern) as client:
            for _, arrival in zip(range(count), arrivals(pattern), strict=False):
                await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
                one = self._next(client, is_hostile=is_hostile)
                tasks.append(asyncio.create_task(one))
            return await asyncio.gather(*tasks)

    def _next(self, client: Client, *, is_hostile: bool) -> Any:
        share, cancelled = self._shares
        if is_hostile and self._rng.random() < share:
            if not self._hostile:  # each of them before any comes again
                self._hostile = [*HOSTILE]
                self._rng.shuffle(self._hostile)
            return self._send_hostile(client.session, self._hostile.pop())
        request = self._rng.choice(self._small)
        if self._rng.random() < cancelled:
            return _cancelled(client, request, self._rng.uniform(0.0, 0.5))
        return _small(client, request)

    async def _send_hostile(self, session: aiohttp.ClientSession, name: str) -> Outcome:
        began = time.perf_counter()
        case = next((one for one in CASES if one.name == name), None)
        if case is None:
            said, fault = await _raw(self._url, name), None
        else:
            said, fault = await _post(session, case)
        return Outcome(name, time.perf_counter() - began, fault, said=said)


async def _small(client: Client, request: Request) -> Outcome:
    answer = await client.ask(request)
    fault = answer.fault
    if fault is None and answer.is_correct is False:
        fault = f"not what was asked for: {answer.text[-200:]!r}"
    return Outcome("small", answer.seconds, fault, answer)


async def _cancelled(client: Client, request: Request, seconds: float) -> Outcome:
    """It leaves after some time, wherever it is then."""
    with suppress(TimeoutError):
        await asyncio.wait_for(client.ask(request), seconds)
    return Outcome("cancelled", seconds)


async def _post(session: aiohttp.ClientSession, case: Case) -> tuple[str, str | None]:
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(case.path, data=case.make(), headers=headers) as reply:
            text = await reply.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__, f"no answer: {type(error).__name__}: {error}"
    code = ""
    with suppress(ValueError, KeyError, TypeError):
        code = json.loads(text)["error"]["code"] or ""
    said = f"{reply.status} {code}".strip()
    fault = None if reply.status in case.statuses else f"{said}: {text[:200]}"
    return said, fault


async def _raw(url: str, name: str) -> str:
    """What no library sends; the server may answer or hang up."""
    host, port = url.removeprefix("http://").split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    except OSError as error:
        return type(error).__name__
    body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\n"
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        if name == _RAW[0]:
            return await _endless_head(reader, writer, head)
        whole = (head + length + body).encode()
        writer.write(whole if name == _RAW[2] else whole[: len(whole) // 2])
        await writer.drain()
        await asyncio.sleep(_HOLD_SECONDS)
        return "left"
    except OSError as error:
        return type(error).__name__
    finally:
        writer.close()


async def _endless_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str
) -> str:
    writer.write(head.encode())
    end = time.perf_counter() + _HOLD_SECONDS
    while time.perf_counter() < end:
        writer.write(b"X-More: " + b"a" * 4000 + b"\r\n")
        await writer.drain()
        with suppress(TimeoutError):
            line = await asyncio.wait_for(reader.readline(), 0.01)
            return line.decode(errors="replace").strip() or "hung up"
    return "left"
