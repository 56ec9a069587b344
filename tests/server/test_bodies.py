"""A body of any shape is read quickly, with memory near its length, and small requests go on."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from guided_spec.engine.llm import LLM
from guided_spec.server.endpoints.bodies import (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    TokenizeBody,
)
from guided_spec.server.endpoints.reading import read_body
from guided_spec.server.faults import ApiError
from tests.server.running import ASK, Running, running

LIMIT = 4 * 2**20
KINDS: dict[str, type[BaseModel]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "responses": ResponsesBody,
    "tokenize": TokenizeBody,
}


def repeated(head: str, item: str, tail: str, length: int = LIMIT) -> bytes:
    """Items with commas between them, in as many bytes."""
    count = (length - len(head) - len(tail)) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


def unknown_fields(length: int) -> bytes:
    return json.dumps({f"x{at}": 1 for at in range(length // 14)}).encode()


HOSTILE: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "nulls": ("completions", lambda n: repeated('{"prompt":[', "null", "]}", n)),
    "prompts": ("completions", lambda n: repeated('{"prompt":[', '["a"]', "]}", n)),
    "tokens": ("completions", lambda n: repeated('{"prompt":[[1],', "[null]", "]}", n)),
    "messages": ("chat", lambda n: repeated('{"messages":[', "1", "]}", n)),
    "tools": ("tokenize", lambda n: repeated('{"messages":[{}],"tools":[', "1", "]}", n)),
    "input": ("responses", lambda n: repeated('{"input":[', "[]", "]}", n)),
    "allowed": ("completions", lambda n: repeated('{"allowed_token_ids":[', '"a"', "]}", n)),
    "choice": ("completions", lambda n: repeated('{"guided_choice":[', "0", "]}", n)),
    "objects": ("chat", lambda n: repeated('{"messages":[', "{}", "]}", n)),
    "strings": ("completions", lambda n: repeated('{"prompt":[0,', '"\\\\"', "]}", n)),
    "unknown": ("chat", unknown_fields),
    "utf-16": (
        "chat",
        lambda n: (
            repeated('{"x":"\\"","messages":[', "{}", "]}", n // 2).decode().encode("utf-16-le")
        ),
    ),
    "deep": ("chat", lambda n: b'{"messages":' + b"[" * (n // 2) + b"]" * (n // 2) + b"}"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("shape", HOSTILE)
def test_no_shape_costs_more_than_its_length(shape: str) -> None:
    """In seconds of this thread alone, for the machine may be busy."""
    name, make = HOSTILE[shape]
    for length in (256 * 2**10, LIMIT):
        data = make(length)
        began = time.thread_time()
        with pytest.raises(ApiError) as caught:
            read_body(data, KINDS[name])
        assert time.thread_time() - began < 1.0  # 31 where each item has an error of its own
        assert caught.value.status == 400
        assert len(caught.value.message) < 500


@pytest.mark.slow
@pytest.mark.parametrize("shape", HOSTILE)
def test_no_shape_takes_memory(shape: str) -> None:
    name, make = HOSTILE[shape]
    data = make(LIMIT)
    tracemalloc.start()
    with pytest.raises(ApiError):
        read_body(data, KINDS[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * LIMIT


def test_many_unknown_fields_are_one_fault() -> None:
    for kind in KINDS.values():
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({f"x{at}": 1 for at in range(1000)})
        assert caught.value.error_count() <= 2  # one of these, and a field that is missing


def test_many_items_of_an_object_are_one_fault() -> None:
    many: dict[str, Any] = {f"x{at}": [] for at in range(2000)}
    for name, body in (
        ("completions", {"prompt": "a", "logit_bias": many}),
        ("responses", {"input": "a", "metadata": many}),
    ):
        with pytest.raises(ApiError, match=": .* at most") as caught:
            read_body(json.dumps(body).encode(), KINDS[name])
        assert caught.value.param == list(body)[-1]
        assert caught.value.status == 400


def test_what_is_long_and_right_is_read() -> None:
    text = json.dumps({"prompt": '",[{\\' * (LIMIT // 12)}).encode()
    tokens = json.dumps({"prompt": [7] * 200_000}).encode()
    for data in (text, tokens):
        record = read_body(data, CompletionBody)
        assert isinstance(record, CompletionBody)
        assert record.prompt == json.loads(data)["prompt"]


@pytest.fixture(scope="module")
def roomy(llm: LLM) -> Iterator[Running]:
    with running(llm) as made:
        yield made
        made.require_service()


def test_others_are_served_while_a_large_body_is_refused(roomy: Running) -> None:
    """The event loop is asked for its health all the time, and never takes long to say so."""
    body = HOSTILE["nulls"][1](LIMIT)

    async def main() -> tuple[list[int], float]:
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=roomy.url, timeout=60) as client:
            await client.get("/health")
            asked = [
                asyncio.create_task(client.post(path, content=body, headers=headers))
                for path in ("/v1/completions", "/tokenize")
            ]
            slowest = 0.0
            while not all(task.done() for task in asked):
                began = time.perf_counter()
                await client.get("/health")
                slowest = max(slowest, time.perf_counter() - began)
            return [task.result().status_code for task in asked], slowest

    statuses, slowest = asyncio.run(main())
    assert set(statuses) == {400}
    assert slowest < 1.5  # it was thirty seconds; the machine may be busy


def test_a_prompt_that_cannot_fit_is_not_tokenized(
    roomy: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(type(llm.tokenizer), "__call__", fail)
    text, tokens = "word " * 100_000, [1] * 5000
    user = {"role": "user", "content": text}
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [user]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": tokens}),
        ("/v1/chat/completions", {"messages": [user]}),
        ("/v1/responses", {"input": text}),
    ):
        reply = roomy.post(path, body)
        assert reply.status_code == 400, path
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert roomy.post("/v1/completions", {"prompt": "a", "bad_words": ["a" * 2000]}).is_client_error


def test_small_prompts_overtake_large_ones(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with large bodies hold one thread, whatever the tokenizer does with them."""
    encode, most = llm.encode, 0
    running_now: list[Any] = []

    def slow_encode(prompt: Any) -> list[int]:
        nonlocal most
        if len(prompt) < 10_000:
            return encode(prompt)
        running_now.append(prompt)
        most = max(most, len(running_now))
        time.sleep(0.2)
        running_now.pop()
        return [1]

    async def main(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            large = {"prompt": "word " * 10_000}
            waiting = [asyncio.create_task(client.post("/tokenize", json=large)) for _ in range(6)]
            while not running_now:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await client.post("/tokenize", json={"prompt": "word"})).status_code == 200
            assert not all(task.done() for task in waiting)
            assert {reply.status_code for reply in await asyncio.gather(*waiting)} == {200}

    with running(llm) as served:
        monkeypatch.setattr(llm, "encode", slow_encode)
        monkeypatch.setattr(llm, "max_model_len", 10**6)
        asyncio.run(main(served.url))
    assert most == 1


def test_tokenizing_takes_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_encode(_prompt: Any) -> list[int]:
        time.sleep(0.3)
        return [1]

    monkeypatch.setattr(llm, "encode", slow_encode)
    with running(llm, max_queue=0) as served:

        async def main() -> list[int]:
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                asked = [client.post("/tokenize", json={"prompt": "a"}) for _ in range(6)]
                return [reply.status_code for reply in await asyncio.gather(*asked)]

        assert sorted(asyncio.run(main())) == [200] * 4 + [429] * 2


def test_arguments_of_the_renderer_are_no_variables(roomy: Running) -> None:
    names: tuple[str, ...] = (
        "tokenize",
        "add_generation_prompt",
        "tools",
        "padding",
        "max_length",
        "truncation",
    )
    names += ("return_tensors", "chat_template", "conversation", "messages", "tokenizer_kwargs")
    for path in ("/tokenize", "/v1/chat/completions"):
        for name in names:
            body = {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False, name: 1}}
            error = roomy.post(path, body).json()["error"]
            assert error["message"].startswith(f"chat_template_kwargs.{name}: ")
            assert error["param"] == "chat_template_kwargs"
