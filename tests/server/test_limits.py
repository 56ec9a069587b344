"""What one client may ask: keys, lengths, names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Chunk
from guided_spec.errors import ConfigError
from guided_spec.server.admission import Admission, Sample, Slots
from guided_spec.server.faults import ApiError
from guided_spec.server.service import ServerSettings
from guided_spec.types import SamplingParams
from tests.server.running import BOOK, LONG, running


def test_keys(llm: LLM) -> None:
    with running(llm, api_keys=("first", "s\u00e9cond")) as closed:
        url = f"{closed.url}/v1/models"
        assert httpx.get(f"{closed.url}/health").status_code == 200
        for wrong in ("", "Bearer fir", "Basic first"):
            reply = httpx.get(url, headers={"Authorization": wrong})
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{closed.url}/metrics").status_code == 401
        for key in ("first", "s\u00e9cond"):
            headers_: Any = {"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(url, headers=headers_).status_code == 200
        with (
            openai.OpenAI(base_url=f"{closed.url}/v1", api_key="no", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="Authorization: Bearer KEY"),
        ):
            client.models.list()


def test_lengths(llm: LLM) -> None:
    limits: dict[str, Any] = {"max_prompt_tokens": 40, "max_output_tokens": 20}
    limits |= {"max_schema_bytes": 200, "max_samples": 2, "max_body_bytes": 3000}
    tools = [{**BOOK, "function": {**BOOK["function"], "description": "x" * 300}}]
    user = [{"role": "user", "content": "Hi"}]
    cases: list[tuple[str, Any, int, str]] = [
        ("completions", {"prompt": "a b " * 100}, 400, "this server takes 40"),
        ("completions", {"prompt": "a", "max_tokens": 21}, 400, "writes at most 20"),
        ("completions", {"prompt": ["a"] * 3}, 400, "2 is the most"),
        ("completions", {"prompt": "a", "guided_regex": "é" * 101}, 400, "has 202 bytes"),
        ("completions", {"prompt": "a" * 4000}, 413, "longer than 3000 bytes"),
        ("completions", {"prompt": "a", "stop": ["a"] * 65}, 400, "at most 64 items"),
        ("completions", {"prompt": "a", "stop": "a" * 1025}, 400, "at most 1024 char"),
        ("completions", {"prompt": "a", "bad_words": ["a" * 65]}, 400, "at most 64 char"),
        ("chat/completions", {"messages": user, "tools": tools}, 400, "tools has"),
        ("chat/completions", {"messages": user, "max_completion_tokens": 21}, 400, "_tokens=21"),
    ]
    with running(llm, **limits, model_names=("small", "other")) as small:
        for path, body, status, reason in cases:
            reply = small.post(f"/v1/{path}", body)
            assert (reply.status_code, reason in reply.text) == (status, True), reply.text
        body = {"messages": user, "model": "other", "ignore_eos": True}
        reply = small.post("/v1/chat/completions", body)
        assert reply.json()["model"] == "small"
        assert reply.json()["usage"]["completion_tokens"] == 20
        small.require_service()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"body_seconds": 0.5},
        {"max_samples": 1.5},
        {"api_keys": ("",)},
        {"api_keys": ("a\nb",)},
        {"model_names": ()},
        {"tool_format": "chatty"},
    ],
)
def test_settings_are_checked(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**wrong)
    assert next(iter(wrong)) in str(caught.value)
    assert "a\\nb" not in str(caught.value)


def test_room_is_given_back() -> None:
    admission = Admission(num_slots=2, max_queue=1)
    with admission.enter(2), admission.enter(1):
        with pytest.raises(ApiError, match="3 samples") as caught, admission.enter(1):
            pass
        assert caught.value.headers == {"Retry-After": "1"}
    assert admission.num_taken == 0
    with admission.enter(9):  # more than there ever is room for, while nothing else runs
        assert admission.num_taken == 9
    with pytest.raises(ZeroDivisionError), admission.enter(1):
        _ = 1 / 0
    assert admission.num_taken == 0


def test_the_wait_follows_what_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("guided_spec.server.admission.time.perf_counter", lambda: now[0])
    admission = Admission(num_slots=1, max_queue=0)
    for _ in range(40):
        with admission.enter(1):
            now[0] += 10.0
    with admission.enter(1):
        assert admission.seconds_to_wait() == 10


class Texts:
    """Samples of one word each, which end when they are told to."""

    def __init__(self) -> None:
        self.begun: list[Sample] = []
        self.ends: dict[Sample, asyncio.Event] = {}

    async def start(self, sample: Sample) -> AsyncGenerator[Chunk, None]:
        """A sample as an engine numbers it that knows no other."""
        self.begun.append(sample)
        await self.ends.setdefault(sample, asyncio.Event()).wait()
        if sample.sample_index == 99:
            raise ApiError(500, "it failed")
        yield Chunk(0, 0, "word")


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_request_leaves_a_slot_to_others() -> None:
    async def main() -> None:
        slots, first, second = Slots(num_slots=4), Texts(), Texts()

        async def all_of(texts: Texts, count: int) -> set[tuple[int, int]]:
            samples = [Sample(0, at) for at in range(count)]
            async with aclosing(slots.run(samples, texts.start)) as chunks:
                return {(chunk.prompt_index, chunk.sample_index) async for chunk in chunks}

        many = asyncio.create_task(all_of(first, 6))
        await _settled()
        assert (len(first.begun), slots.num_waiting) == (3, 3)
        other = asyncio.create_task(all_of(second, 2))
        await _settled()
        assert (len(second.begun), slots.num_waiting) == (1, 4)
        for count in (4, 5, 6):  # one enters for each that ends
            first.ends[first.begun[count - 4]].set()
            await _settled()
            assert len(first.begun) + len(second.begun) == count + 1
        other.cancel()
        while not many.done():
            for event in first.ends.values():
                event.set()
            await _settled()
        assert await many == {(0, at) for at in range(6)}
        assert slots.num_waiting == 0

    asyncio.run(main())


def test_a_sample_that_fails_ends_the_others() -> None:
    async def main() -> None:
        slots, texts = Slots(num_slots=8), Texts()
        texts.ends[Sample(0, 99)] = asyncio.Event()
        texts.ends[Sample(0, 99)].set()
        samples = [Sample(0, 0), Sample(0, 99), *(Sample(0, at) for at in range(1, 9))]
        with pytest.raises(ApiError, match="it failed"):
            async for _ in slots.run(samples, texts.start):
                pass
        assert slots.num_waiting == 0

    asyncio.run(main())


def test_a_small_request_does_not_wait_for_one_that_fills_the_slots(llm: LLM) -> None:
    with running(llm) as served:
        body = {"prompt": "A", "n": 8, **LONG, "stream": True}
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            small = served.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
            assert small.status_code == 200
            assert served.metrics()["guided_spec_waiting_samples"] > 0
        served.require_service()


def test_samples_are_the_engine_s(llm: LLM) -> None:
    """However they enter, each has the seed that ``LLM.generate`` gives it."""
    asked: dict[str, Any] = {"n": 6, "seed": 5, "temperature": 1.0, "max_tokens": 8}
    alone = llm.generate("Hello", SamplingParams.from_model(llm.model, **asked))[0]
    with running(llm) as served:
        choices = served.post("/v1/completions", {"prompt": "Hello", **asked}).json()["choices"]
    assert [choice["text"] for choice in choices] == [one.text for one in alone.completions]
