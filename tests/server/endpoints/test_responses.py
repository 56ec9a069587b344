"""``/v1/responses`` with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from guided_spec.engine.chat import ChatChunk, ToolCallDelta
from guided_spec.engine.outputs import Chunk
from guided_spec.errors import GrammarStateError
from guided_spec.server.endpoints.bodies import ResponsesBody
from guided_spec.server.endpoints.messages import style_variables
from guided_spec.server.endpoints.replies import CallItem, MessageItem, ReasoningItem
from guided_spec.server.endpoints.responses import ResponseItems
from guided_spec.server.endpoints.responses_bodies import as_chat
from guided_spec.server.faults import ApiError
from guided_spec.server.service import Service
from tests.server.running import ASK, BOOK, Contact, Running

TEXT = ASK[0]["content"]
TOOL: Any = {"type": "function", "strict": True, **BOOK["function"]}
CREATE: dict[str, Any] = {"model": "bundled", "input": TEXT}


def test_text(client: openai.OpenAI) -> None:
    response = client.responses.create(**CREATE, max_output_tokens=12)
    chat = client.chat.completions.create(model="bundled", messages=ASK, max_tokens=12)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert (response.status, response.incomplete_details is not None) == ("incomplete", True)


def test_a_parsed_response(client: openai.OpenAI) -> None:
    response = client.responses.parse(**CREATE, text_format=Contact)
    assert response.output_parsed == Contact(name="Maria Lopez", phone="+49 170 5551234")
    assert response.status == "completed"


@pytest.mark.parametrize(
    "options",
    [
        {"max_output_tokens": 10},
        {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60},
    ],
    ids=["text", "call"],
)
def test_events(served: Running, options: Any) -> None:
    """Each is one of OpenAI's, they are in order, and together they are the response."""
    whole = served.post("/v1/responses", {**CREATE, **options}).json()
    text = served.post("/v1/responses", {**CREATE, **options, "stream": True}).text
    pairs = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [e["type"] for e in events]
    reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        reader.validate_python(event, strict=False)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    without_ids = [
        [{k: v for k, v in item.items() if k != "id"} for item in one["output"]]
        for one in (last, whole)
    ]
    assert without_ids[0] == without_ids[1]
    found = [one["usage"].pop("input_tokens_details") for one in (last, whole)]
    assert last["usage"] == whole["usage"]
    assert found[0]["cached_tokens"] >= found[1]["cached_tokens"]  # what the first one left
    for index, item in enumerate(last["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (item.get("arguments") or item["content"][0]["text"])
        assert mine[-1]["item"] == item


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 20}),
    ],
)
def test_an_error_in_the_middle_is_a_named_event(
    served: Running, monkeypatch: pytest.MonkeyPatch, path: str, asked: Any
) -> None:
    """As the others are: who listens by names would miss it."""
    plain = Service.chunks

    async def broken(*args: Any, **options: Any) -> AsyncGenerator[Chunk, None]:
        async with aclosing(plain(*args, **options)) as chunks:
            async for chunk in chunks:
                yield chunk
                raise GrammarStateError("lost")

    monkeypatch.setattr(Service, "chunks", broken)
    text = served.post(path, {"model": "bundled", **asked, "stream": True}).text
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "lost"


def test_the_client_s_own_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(**CREATE, text_format=Contact) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert final.output_parsed == Contact(name="Maria Lopez", phone="+49 170 5551234")


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    tools: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 60}
    choice: Any = {"type": "function", "name": "book"}
    first = client.responses.create(**CREATE, tool_choice=choice, **tools)
    call = first.output[0]
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"seats", "window"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "booked"}
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        result,
    ]
    second = client.responses.create(model="bundled", input=history, tool_choice="none", **tools)
    assert {item.type for item in second.output} == {"message"}


def test_the_shape_is_openai_s(served: Running) -> None:
    reply = served.post("/v1/responses", {**CREATE, "max_output_tokens": 4, "instructions": "Go."})
    Response.model_validate(reply.json())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"input": []}, "input=[]: must hold"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type='item_reference'"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]: must have"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: 'web_search'"),
        (
            {"text": {"verbosity": "lots"}},
            "text.verbosity='lots': must be one of low, medium, high",
        ),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: must be"),
        ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server stores no"),
        ({"background": True}, "background: this server answers while its client waits"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort='lots': this model's chat template"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
)
def test_mistakes_are_named(served: Running, options: Any, reason: str) -> None:
    reply = served.post("/v1/responses", {**CREATE, **options})
    assert reply.status_code == 400, reply.text
    assert reason in reply.json()["error"]["message"]


SCHEMA = {"not": {"multipleOf": 2}}
REFUSED = {"type": "function", "name": "x", "parameters": {"properties": {"k": SCHEMA}}}


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            *("text.format", "positive spelling"),
        ),
        (
            {"tools": [REFUSED], "tool_choice": "required"},
            "tools[0].parameters",
            "/properties/k: not",
        ),
        ({"tools": [REFUSED]}, "tools[0].parameters", "/properties/k: not"),
        ({"tool_choice": "required"}, "tool_choice", "tool"),
        (
            {
                "text": {"format": {"type": "regex_schema", "regex_schema": "[ab]{30}"}},
                "max_output_tokens": 3,
            },
            *("max_output_tokens", "allow at least"),
        ),
        ({"input": "a " * 2000}, "input", "only 1023"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "must be",
        ),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort", "does not read it"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input[0].content[0].type='input_image': this model reads text",
        ),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_faults_name_the_arguments_of_this_endpoint(
    served: Running, options: Any, param: str, reason: str, *, is_streamed: bool
) -> None:
    reply = served.post("/v1/responses", {**CREATE, **options, "stream": is_streamed})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert reason in error["message"]
    assert error["param"] == param


def test_what_asks_for_nothing_is_taken(served: Running) -> None:
    plain = {
        "reasoning": {"effort": "medium"},
        "text": {"verbosity": "medium"},
        "background": False,
    }
    reply = served.post("/v1/responses", {**CREATE, **plain, "max_output_tokens": 4})
    assert reply.status_code == 200, reply.text
    none = {"reasoning": {"effort": "none"}}
    assert (
        served.post("/v1/responses", {**CREATE, **none, "max_output_tokens": 4}).status_code == 200
    )


@pytest.mark.parametrize(
    ("template", "effort", "verbosity", "expected"),
    [
        ("{{ reasoning_effort }}", "xhigh", None, {"reasoning_effort": "xhigh"}),
        ("{{ reasoning_effort }}", "medium", None, {"reasoning_effort": "medium"}),
        ("{{ enable_thinking }}", "none", "medium", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", None, {"enable_thinking": True}),
        ("{{ thinking }}", "none", None, {"thinking": False}),
        ("{{ enable_thinking }}", "medium", None, {}),
        ("{{ verbosity }}", None, "high", {"verbosity": "high"}),
        ("{{ verbosity_2 }}", "none", "medium", {}),
    ],
)
def test_styles(template: str, effort: Any, verbosity: Any, expected: Any) -> None:
    assert style_variables(effort, verbosity, template) == expected


@pytest.mark.parametrize(
    ("template", "effort", "verbosity", "reason"),
    [
        ("{{ enable_thinking }}", "lots", None, "reasoning_effort='lots': this model's"),
        ("{{ reasoning_efforts }}", "lower", None, "reasoning_effort='lower'.* none, minimal, "),
        ("{{ reasoning_effort }}", "low", "lots", "verbosity='lots'.* is low, medium or high"),
    ],
)
def test_styles_that_no_template_reads(
    template: str, effort: Any, verbosity: Any, reason: str
) -> None:
    with pytest.raises(ApiError, match=reason):
        style_variables(effort, verbosity, template)


def test_styles_that_change_nothing_are_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    template = "{{ a template of its own }}"
    for _ in range(2):  # values of which no other test is told
        assert style_variables("max", "high", template) == {}
        assert style_variables("none", "medium", template) == {}
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["reasoning_effort='max' changes nothing", "verbosity='high' changes nothing"]


def test_items_become_messages() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "call_ab", "name": "book", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "call_ab", "output": "ok"}
    items = [{"role": "user", "content": "hi"}, thought, call, done]
    body = ResponsesBody.model_validate({"input": items, "instructions": "Go."})
    system, user, assistant, tool = as_chat(body).messages
    assert (system["role"], user["content"]) == ("system", "hi")
    assert assistant["reasoning_content"] == "Hm."
    assert assistant["tool_calls"][0]["id"] == "ab" == tool["tool_call_id"]
    with pytest.raises(ApiError, match="name and arguments"):
        as_chat(ResponsesBody.model_validate({"input": [{"type": "function_call"}]}))


def test_reasoning_is_an_item_of_its_own() -> None:
    items = ResponseItems()
    chunks = [
        ChatChunk(0, reasoning="Let me", token_ids=(1, 2)),
        ChatChunk(0, reasoning=" see.", token_ids=(3,)),
        ChatChunk(0, text="Yes.", token_ids=(4, 5)),
    ]
    events = [event for chunk in chunks for event in items.feed(chunk)]
    events += list(items.end("completed"))
    reasoning, message = items.items
    assert isinstance(reasoning, ReasoningItem)
    assert isinstance(message, MessageItem)
    assert (reasoning.content[0].text, message.content[0].text) == ("Let me see.", "Yes.")
    assert items.reasoning_tokens == 3
    reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        reader.validate_python(event.model_dump())
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


def test_each_of_several_calls_is_an_item() -> None:
    items = ResponseItems()
    pieces = [
        *(ToolCallDelta(0, "a", "book", ""), ToolCallDelta(0, "", "", '{"seats": 1}')),
        *(ToolCallDelta(1, "b", "call", "{"), ToolCallDelta(1, "", "", "}")),
    ]
    events = [e for one in pieces for e in items.feed(ChatChunk(0, tool_calls=(one,)))]
    events += list(items.end("completed"))
    found = [(item.name, item.arguments) for item in items.items if isinstance(item, CallItem)]
    assert found == [("book", '{"seats": 1}'), ("call", "{}")]
    added = [e.output_index for e in events if e.type == "response.output_item.added"]
    done = [e.output_index for e in events if e.type == "response.output_item.done"]
    assert added == done == [0, 1]
    assert len({item.id for item in items.items}) == 2


def test_a_call_is_done_as_soon_as_its_arguments_are() -> None:
    items, calls = ResponseItems(), []
    pieces = [
        ToolCallDelta(0, "a", "book", '{"seats": 1'),
        ToolCallDelta(0, "", "", "}", is_complete=True),
    ]
    for piece in pieces:
        calls += [event.type for event in items.feed(ChatChunk(0, tool_calls=(piece,)))]
    assert calls[-3:] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert [event.type for event in items.end("incomplete")] == []
    assert items.items[0].status == "completed"
