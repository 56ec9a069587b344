"""Responses that go on from earlier ones, and how long those are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from guided_spec.engine.chat import ChatChunk, ToolCallDelta
from guided_spec.engine.llm import LLM
from guided_spec.server.endpoints.responses import ResponseItems, lasting_items
from guided_spec.server.faults import ApiError
from guided_spec.server.stored import ResponseStore
from tests.server.running import ASK, BOOK, PATIENCE, Running, running

TOOL: Any = {"type": "function", "strict": True, **BOOK["function"]}
CREATE: dict[str, Any] = {"model": "bundled", "max_output_tokens": 60}
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def keeping(llm: LLM) -> Iterator[Running]:
    with running(llm, store_responses=3, api_keys=("one", "two")) as made:
        yield made


def ask(keeping: Running, key: str = "one") -> openai.OpenAI:
    url = f"{keeping.url}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_goes_on(keeping: Running, *, is_streamed: bool) -> None:
    with ask(keeping) as client:
        tools: Any = {"tools": [TOOL], "parallel_tool_calls": False}
        asked: Any = {**CREATE, "input": ASK[0]["content"], **tools, "tool_choice": "required"}
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                first: Any = stream.get_final_response()
        else:
            first = client.responses.create(**asked)
        (call,) = first.output
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
        second = client.responses.create(
            **{**CREATE, **tools, "tool_choice": "none"},
            input=[result],
            previous_response_id=first.id,
        )
        told = [*ASK, {"type": "function_call", **call.model_dump(include={"name", "arguments"})}]
        told[-1]["call_id"] = call.call_id
        whole = client.responses.create(
            **{**CREATE, **tools, "tool_choice": "none"}, input=[*told, result], store=False
        )
        assert second.output_text == whole.output_text
        assert second.usage is not None
        assert whole.usage is not None
        assert second.usage.input_tokens == whole.usage.input_tokens
        assert second.previous_response_id == first.id
        third = client.responses.create(
            **{**CREATE, **tools}, input="And?", previous_response_id=second.id
        )
        assert third.usage is not None
        assert third.usage.input_tokens > second.usage.input_tokens


def test_what_is_stored_can_be_read_and_forgotten(keeping: Running) -> None:
    with ask(keeping) as client, ask(keeping, "two") as other:
        made = client.responses.create(**CREATE, input="Hello")
        assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
        for stranger in (
            lambda: other.responses.retrieve(made.id),
            lambda: other.responses.delete(made.id),
            lambda: other.responses.create(**CREATE, input="x", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError, match="no such response is stored here"):
                stranger()
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(**CREATE, input="x", previous_response_id=made.id)
        body: Any = caught.value.body
        assert body["code"] == "response_not_found"
        assert body["param"] == "previous_response_id"
        assert f"previous_response_id={made.id!r}" in body["message"]


def test_not_everything_is_stored(keeping: Running) -> None:
    with ask(keeping) as client:
        kept = client.responses.create(**CREATE, input="Hello")
        unkept = client.responses.create(**CREATE, input="Hello", store=False)
        assert (kept.to_dict()["store"], unkept.to_dict()["store"]) == (True, False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unkept.id)
        for _ in range(3):
            client.responses.create(**CREATE, input="Hello")
        with pytest.raises(openai.NotFoundError, match="or no longer"):
            client.responses.retrieve(kept.id)


def test_a_call_that_was_cut_off_is_no_part_of_what_follows() -> None:
    items = ResponseItems()
    pieces = (
        ToolCallDelta(0, "a", "book", "{}", is_complete=True),
        ToolCallDelta(1, "b", "go", "{"),
    )
    list(items.feed(ChatChunk(0, text="Well.", tool_calls=pieces)))
    list(items.end("incomplete"))
    kept = lasting_items(items.items)
    assert [item["type"] for item in kept] == ["message", "function_call"]
    assert kept[1]["name"] == "book"


def test_without_a_store(served: Running) -> None:
    reply = served.post(PATH, {**CREATE, "input": "Hello", "max_output_tokens": 4}).json()
    assert reply["store"] is False
    for body in ({"previous_response_id": "resp_1"}, {"previous_response_id": reply["id"]}):
        refused = served.post(PATH, {**CREATE, "input": "Hello", **body})
        assert refused.status_code == 400
        assert "--store-responses" in refused.json()["error"]["message"]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        for act in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="stores no responses"):
                act(reply["id"])


class Clock:
    """Seconds, as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_bounds_of_a_store() -> None:
    clock = Clock()
    store = ResponseStore(3, 10.0, 200, clock=clock)
    for name in "abcd":
        store.add(name, {"id": name}, [name], "")
        clock.now += 1
    with pytest.raises(ApiError):
        store.find("a", "")
    assert store.find("b", "").items == b'["b"]'
    clock.now = 11.5
    with pytest.raises(ApiError, match="or no longer"):
        store.find("b", "")
    assert store.num_bytes == 2 * len(b'{"id":"c"}["c"]')
    store.add("large", {}, ["x" * 190], "")
    with pytest.raises(ApiError):
        store.find("d", "")
    assert store.find("large", "").num_bytes == store.num_bytes
    store.add("larger", {}, ["x" * 300], "")
    assert store.num_bytes == 0
    with pytest.raises(ApiError):
        store.find("larger", "")


def test_text_that_is_no_unicode_is_kept() -> None:
    store = ResponseStore(3, 10.0, 200)
    store.add("a", {"id": "\ud83d"}, ["\ud83d é"], "")
    assert store.find("a", "").items == '["\\ud83d é"]'.encode()
