"""Clients of one server: when they come, what they ask, and how long they wait.

The pattern and the measures are those of vLLM's ``benchmark_serving_structured_output``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.serving.requests import Request
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.grammar.spec import GrammarSpec

_PATIENCE = aiohttp.ClientTimeout(total=600.0)
_DATA = b"data: "
_NAMES = {"json_schema": "json", "ebnf": "grammar", "lark": "grammar"}  # vLLM's, of the others too


@dataclass(frozen=True, slots=True)
class Pattern:
    """When requests come, and what they have in common.

    rate: requests a second; infinity sends each as soon as it may be sent. burstiness: the shape of
    the gamma distribution of the times between them; 1 is a Poisson process, less comes in bursts.
    max_concurrency: requests that run at a time; None is no limit. seconds: in which requests
    begin, over and over from the first; None sends each once. max_tokens: of an answer. seed: of
    the times between requests.

    Raises ConfigError for a value that is out of range.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seconds: float | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness", "max_concurrency", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, value, "must be more than 0")
        if self.seconds is not None and math.isinf(self.rate) and self.max_concurrency is None:
            fix = "needs request-rate or max-concurrency; else requests without end come at once"
            raise ConfigError("seconds", self.seconds, fix)


@dataclass(slots=True)
class Answer:
    """One request, as its client saw it.

    first: seconds to the first piece of text. gaps: seconds between pieces, each of one token or
    more. seconds: to the end. fault: why there is no answer; None for one that is whole.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    fault: str | None = None
    is_correct: bool | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token behind the first piece; None for an answer of one token."""
        return (self.seconds - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class Traffic(NamedTuple):
    """seconds: from the first request to the last answer."""

    answers: list[Answer]
    seconds: float


def arrivals(pattern: Pattern) -> Iterator[float]:
    """Seconds from the first request to each, without end."""
    rng, now = np.random.default_rng(pattern.seed), 0.0
    while True:
        yield now
        if not math.isinf(pattern.rate):
            scale = 1.0 / (pattern.rate * pattern.burstiness)
            now += float(rng.gamma(pattern.burstiness, scale))


async def drive(url: str, requests: Sequence[Request], pattern: Pattern) -> Traffic:
    """Send ``requests`` to the server at ``url``, by the name that it gives its model first.

    One request goes ahead, unmeasured. Raises GuidedSpecError where it is not answered.
    """
    async with connect(url, pattern) as client:
        trial = await client.ask(requests[0])
        if trial.fault is not None:
            raise GuidedSpecError(f"{url} does not answer the first request: {trial.fault}")
        return await _send(client, requests, pattern)


@asynccontextmanager
async def connect(url: str, pattern: Pattern) -> AsyncIterator[Client]:
    """Ask the server at ``url`` for what it names first of its models."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=_PATIENCE, connector=connector) as session:
        async with session.get("/v1/models", raise_for_status=True) as reply:
            model = (await reply.json())["data"][0]["id"]
        yield Client(session, model, pattern)


async def _send(client: Client, requests: Sequence[Request], pattern: Pattern) -> Traffic:
    slots = asyncio.Semaphore(pattern.max_concurrency or 2**30)
    end = math.inf if pattern.seconds is None else pattern.seconds
    due: Iterable[Request] = requests if pattern.seconds is None else itertools.cycle(requests)
    began, running = time.perf_counter(), []
    for request, arrival in zip(due, arrivals(pattern), strict=False):
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        await slots.acquire()
        if time.perf_counter() - began > end:
            break
        task = asyncio.create_task(client.ask(request))
        task.add_done_callback(lambda _task: slots.release())
        running.append(task)
    answers = await asyncio.gather(*running)
    return Traffic(answers, time.perf_counter() - began)


class Client(NamedTuple):
    """Of one server. model: the name by which it is asked."""

    session: aiohttp.ClientSession
    model: str
    pattern: Pattern

    async def ask(self, request: Request) -> Answer:
        """Stream one answer. A fault is part of it, not raised."""
        answer, began = Answer(), time.perf_counter()
        try:
            await self._stream(request, answer, began)
        except (aiohttp.ClientError, TimeoutError, GuidedSpecError) as error:
            answer.fault = f"{type(error).__name__}: {error}"
        answer.seconds = time.perf_counter() - began
        if answer.fault is None:
            answer.is_correct = request.is_correct(answer.text)
        return answer

    async def _stream(self, request: Request, answer: Answer, began: float) -> None:
        path, body = self._body(request)
        last = began
        async with self.session.post(path, json=body) as reply:
            if not reply.ok:
                text = (await reply.text())[:300]
                raise GuidedSpecError(f"{reply.status}: {text}")
            async for chunk in _events(reply):
                if "error" in chunk:
                    raise GuidedSpecError(json.dumps(chunk["error"]))
                if chunk.get("usage"):
                    answer.tokens = chunk["usage"]["completion_tokens"]
                if text := _text(chunk):
                    now = time.perf_counter()
                    if answer.text:
                        answer.gaps.append(now - last)
                    else:
                        answer.first = now - began
                    answer.text, last = answer.text + text, now
        if not answer.tokens:
            raise GuidedSpecError("the stream ended without a token, or without its usage")

    def _body(self, request: Request) -> tuple[str, dict[str, Any]]:
        is_chat = not isinstance(request.prompt, str)
        body = {
            "model": self.model,
            "messages" if is_chat else "prompt": request.prompt,
            "temperature": self.pattern.temperature,
            "repetition_penalty": 1.0,
            "max_tokens": self.pattern.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.grammar is not None:
            body["structured_outputs"] = _structured(request.grammar)
        return "/v1/chat/completions" if is_chat else "/v1/completions", body


def _structured(grammar: GrammarSpec) -> dict[str, Any]:
    """vLLM's field for a grammar, which both servers take."""
    source: Any = grammar.source
    if grammar.kind in ("json_schema", "choice", "structural_tag"):
        source = json.loads(source)
    return {_NAMES.get(grammar.kind, grammar.kind): source or True}  # json_object has no source


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.content:
        if line.startswith(_DATA) and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[len(_DATA) :])


def _text(chunk: dict[str, Any]) -> str:
    """Of a completion's or a chat's chunk."""
    if not chunk["choices"]:
        return ""
    choice = chunk["choices"][0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""
