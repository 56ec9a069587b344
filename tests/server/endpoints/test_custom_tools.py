"""Custom tools and allowed tools, in both of OpenAI's interfaces."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.running import ASK, BOOK, Running

PATTERN = r'call "\w{2,5}"\n[ab\\]{3}'
LARK = 'start: "say" (" " WORD)~1..3 "\\n"\nWORD: /[a-z"]{1,3}/\n'
RULES = {"regex": PATTERN, "lark": LARK}
CHECKS = {"regex": PATTERN, "lark": r'say( [a-z"]{1,3}){1,3}\n'}
FLAT = {"type": "function", **BOOK["function"]}


def flat(syntax: str, name: str = "note") -> Any:
    rule = {"type": "grammar", "syntax": syntax, "definition": RULES[syntax]}
    return {"type": "custom", "name": name, "description": "Take a note.", "format": rule}


def nested(syntax: str, name: str = "note") -> Any:
    rule = {"syntax": syntax, "definition": RULES[syntax]}
    form = {"type": "grammar", "grammar": rule}
    return {"type": "custom", "custom": {"name": name, "format": form}}


CREATE: dict[str, Any] = {"model": "bundled", "input": ASK, "max_output_tokens": 120}
CHAT: dict[str, Any] = {"model": "bundled", "messages": ASK, "max_tokens": 120}
ONE: dict[str, Any] = {"parallel_tool_calls": False, "tool_choice": "required"}


@pytest.mark.every_case
@pytest.mark.parametrize("syntax", RULES)
def test_a_response_calls_a_custom_tool(client: openai.OpenAI, syntax: str) -> None:
    asked: Any = {**CREATE, "tools": [flat(syntax)], **ONE}
    response = client.responses.create(**asked)
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert call.name == "note"
    assert re.fullmatch(CHECKS[syntax], call.input)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response().output[0]
    deltas = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
    (done,) = [one for one in events if one.type == "response.custom_tool_call_input.done"]
    assert final.type == "custom_tool_call"
    assert "".join(deltas) == done.input == final.input == call.input

    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"}
    history: Any = [*ASK, *[item.model_dump(exclude_none=True) for item in response.output], result]
    asked |= {"input": history, "tool_choice": "none"}
    second = client.responses.create(**asked)
    assert {item.type for item in second.output} == {"message"}


def test_events_are_openai_s(served: Running) -> None:
    body = {**CREATE, "tools": [flat("lark"), FLAT], **ONE, "stream": True}
    body["tool_choice"] = {"type": "custom", "name": "note"}
    text = served.post("/v1/responses", body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        reader.validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds.index("response.custom_tool_call_input.done") < kinds.index("response.completed")
    assert events[-1]["response"]["tools"] == body["tools"]


@pytest.mark.every_case
@pytest.mark.parametrize("syntax", RULES)
def test_a_chat_calls_a_custom_tool(client: openai.OpenAI, syntax: str) -> None:
    asked: Any = {**CHAT, "tools": [nested(syntax), BOOK], **ONE}
    asked["tool_choice"] = {"type": "custom", "custom": {"name": "note"}}
    reply = client.chat.completions.create(**asked)
    message = reply.choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, reply.choices[0].finish_reason) == ("note", "tool_calls")
    assert re.fullmatch(CHECKS[syntax], call.custom.input)
    text = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.function is None
            text += piece.model_dump()["custom"]["input"]
    assert text == call.custom.input
    result = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
    turns: Any = [*ASK, message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(
        **{**asked, "messages": turns, "tool_choice": "none", "max_tokens": 8}
    )
    assert not last.choices[0].message.tool_calls


def test_free_text_beside_a_function(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "custom", "name": "note"}, FLAT]
    choice: Any = {"type": "custom", "name": "note"}
    response = client.responses.create(**CREATE, tools=tools, tool_choice=choice)
    assert [item.type for item in response.output] == ["custom_tool_call"]


def test_some_tools_are_allowed(client: openai.OpenAI) -> None:
    tools: Any = [FLAT, flat("regex"), {**FLAT, "name": "other"}]
    for name, kind in (("other", "function"), ("note", "custom")):
        allowed: Any = {"mode": "required", "tools": [{"type": kind, "name": name}]}
        choice: Any = {"type": "allowed_tools", **allowed}
        response = client.responses.create(**CREATE, tools=tools, tool_choice=choice)
        calls = [item for item in response.output if item.type != "message"]
        assert {getattr(item, "name", None) for item in calls} == {name}
        assert response.tool_choice.model_dump() == choice
    inner: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "book"}}]}
    reply = client.chat.completions.create(
        **CHAT,
        tools=[nested("regex"), BOOK],
        tool_choice={"type": "allowed_tools", "allowed_tools": inner},
    )
    assert {call.type for call in reply.choices[0].message.tool_calls or []} == {"function"}


RULE = {"type": "grammar", "syntax": "lark", "definition": "start: missing"}


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "must be 1 to 64"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom", "not known here"),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
            "tools[0].format.syntax",
            "must be one of lark, regex",
        ),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "json"}}]},
            "tools[0].format",
            "must be",
        ),
        (
            {"tools": [{"type": "custom", "name": "x", "format": RULE}]},
            "tools[0].format.definition",
            "the tool 'x': the lark grammar",
        ),
        ({"tools": [FLAT, {"type": "mcp"}]}, "tools[1].type", "only function and custom"),
        (
            {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
            "tool_choice.mode",
            "must be one of auto, required",
        ),
        (
            {
                "tools": [FLAT],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "tool_choice.tools[0].name",
            "is not one of the tools: book",
        ),
        (
            {"tools": [FLAT], "tool_choice": {"type": "custom", "name": "x"}},
            "tool_choice.name",
            "is not one of the tools: book",
        ),
        ({"input": [{"type": "custom_tool_call", "name": "x"}]}, "input[0]", "name and input"),
    ],
)
def test_mistakes_are_named_as_they_were_sent(
    served: Running, options: Any, param: str, reason: str
) -> None:
    reply = served.post("/v1/responses", {**CREATE, **options})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], reason in error["message"]) == (param, True), error
    assert error["message"].startswith(("the tool", param)), error
