"""Many clients at once, and clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from guided_spec.engine.llm import LLM
from tests.server.running import ASK, LONG, PATIENCE, Contact, Running, running, until


def asynchronous(served: Running) -> openai.AsyncOpenAI:
    url = f"{served.url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE)


def test_clients_share_batches(served: Running) -> None:
    async def one(client: openai.AsyncOpenAI) -> Contact | None:
        reply = await client.chat.completions.parse(
            model="bundled", messages=ASK, response_format=Contact
        )
        return reply.choices[0].message.parsed

    async def streamed(client: openai.AsyncOpenAI) -> int:
        options: dict[str, Any] = {"model": "bundled", "messages": ASK, "max_tokens": 9}
        stream = await client.chat.completions.create(**options, stream=True)
        async with stream:
            return len([chunk async for chunk in stream])

    async def main() -> list[Any]:
        async with asynchronous(served) as client:
            runs = [one(client) for _ in range(6)] + [streamed(client) for _ in range(3)]
            return await asyncio.gather(*runs)

    *parsed, a, b, c = asyncio.run(main())
    assert parsed == [Contact(name="Maria Lopez", phone="+49 170 5551234")] * 6
    assert a > 2
    assert a == b == c
    served.require_service()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_slot(
    served: Running, path: str, *, is_streamed: bool
) -> None:
    body: dict[str, Any] = {"stream": is_streamed}
    body |= {"messages": ASK, **LONG} if "chat" in path else {}
    body |= {"prompt": "A", **LONG} if path == "/v1/completions" else {}
    if path == "/v1/responses":
        letters = {"type": "regex_schema", "regex_schema": "[a-z]{900}"}
        body |= {"input": "A", "text": {"format": letters}, "max_output_tokens": 950}
    name = f"guided_spec_requests_total{{{path},499}}"
    before = served.metrics().get(name, 0)

    async def main() -> None:
        async with httpx.AsyncClient() as client:
            asked = asyncio.create_task(_read(client, f"{served.url}{path}", body))
            while served.metrics()["guided_spec_running_samples"] == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(main())
    until(served.is_idle)
    until(lambda: served.metrics().get(name, 0) == before + 1)
    served.require_service()


async def _read(client: httpx.AsyncClient, url: str, body: Any) -> None:
    async with client.stream("POST", url, json=body, timeout=PATIENCE) as reply:
        async for _ in reply.aiter_text():
            pass


def test_a_full_queue_says_when_to_come_again(llm: LLM) -> None:
    with running(llm, max_queue=2) as small:
        body = {"prompt": "A", "n": 4, **LONG, "stream": True}

        async def main() -> httpx.Response:
            async with httpx.AsyncClient() as client:
                url = f"{small.url}/v1/completions"
                fill = asyncio.create_task(_read(client, url, body))
                while small.metrics()["guided_spec_running_samples"] < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                wait = asyncio.create_task(_read(client, url, {**body, "n": 2}))
                while small.metrics()["guided_spec_waiting_samples"] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                refused = await client.post(url, json={"prompt": "A"})
                for task in (fill, wait):
                    task.cancel()
                await asyncio.gather(fill, wait, return_exceptions=True)
                return refused

        refused = asyncio.run(main())
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        small.require_service()
