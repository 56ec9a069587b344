"""Tools and a form of the answer in one request, as agents send them on every turn."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ParsedResponse

from tests.server.running import ASK, BOOK, Contact, Running

STRICT: Any = {**BOOK, "function": {**BOOK["function"], "strict": True}}
ONE: dict[str, Any] = {"model": "bundled", "parallel_tool_calls": False}
CREATE: dict[str, Any] = {**ONE, "messages": ASK, "tools": [STRICT]}
FLAT: Any = {"type": "function", **STRICT["function"]}


def check(arguments: str) -> None:
    assert json.loads(arguments).keys() == {"seats", "window"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_parsed_answer_or_a_call(client: openai.OpenAI, *, is_streamed: bool) -> None:
    for wanted in ("auto", "required"):
        options: Any = {**CREATE, "response_format": Contact, "tool_choice": wanted}
        if is_streamed:
            with client.chat.completions.stream(**options) as stream:
                list(stream)
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.parse(**options).choices[0]
        message = choice.message
        assert bool(message.tool_calls) != bool(message.content)
        assert wanted == "auto" or message.tool_calls
        if message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            check(message.tool_calls[0].function.arguments)
        else:
            assert isinstance(message.parsed, Contact)


def test_the_turns_of_an_agent(client: openai.OpenAI) -> None:
    options: Any = {**CREATE, "response_format": Contact}
    called = client.chat.completions.parse(**options, tool_choice="required", max_tokens=60)
    message = called.choices[0].message
    assert message.content is None
    (call, *_) = message.tool_calls or []
    check(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
    turns: Any = [*ASK, message.model_dump(warnings=False), result]
    last = client.chat.completions.parse(**{**options, "messages": turns}, tool_choice="none")
    assert isinstance(last.choices[0].message.parsed, Contact)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses(client: openai.OpenAI, *, is_streamed: bool) -> None:
    options: dict[str, Any] = {**ONE, "input": ASK, "tools": [FLAT]}
    options |= {"text_format": Contact, "max_output_tokens": 300}
    kinds = set()
    for choice in ("auto", "required", "none"):
        found: ParsedResponse[Contact]
        if is_streamed:
            with client.responses.stream(**options, tool_choice=choice) as stream:
                list(stream)
                found = stream.get_final_response()
        else:
            found = client.responses.parse(**options, tool_choice=choice)
        for item in found.output:
            kinds.add(item.type)
            if item.type == "function_call":
                check(item.arguments)
        is_call = found.output[0].type == "function_call"
        assert isinstance(found.output_parsed, Contact) != is_call
        assert choice == "auto" or is_call == (choice == "required")
    assert kinds == {"message", "function_call"}


UNIQUE = {"type": "array", "items": {"type": "number"}, "uniqueItems": True}
BROKEN = {"type": "object", "properties": {"k": UNIQUE}}


def test_the_one_at_fault_is_named(served: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BROKEN}}
    tool = {"type": "function", "function": {"name": "sort", "parameters": BROKEN}}
    plain = {"type": "json_object"}
    for tools, wanted, reason in (
        ([BOOK, tool], plain, "the tool 'sort': "),
        ([BOOK], form, "the response_format: "),
    ):
        body = {"messages": ASK, "tools": tools, "response_format": wanted}
        error = served.post("/v1/chat/completions", body).json()["error"]
        assert error["code"] == "unsupported_schema"
        assert reason in error["message"]
        assert "/properties/k: uniqueItems" in error["message"]
