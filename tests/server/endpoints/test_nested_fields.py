"""A field that is not known is refused at every depth of every body, with its path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.running import ASK, BOOK, Contact, Running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FREE = {"schema", "parameters", "logit_bias", "metadata", "chat_template_kwargs", "json", "parsed"}
CALL = {"id": "abc", "type": "function", "function": {"name": "book", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "done"}]},
        {"role": "user", "content": "Again."},
    ],
    "tools": [BOOK],
    "tool_choice": {"type": "function", "function": {"name": "book"}},
    "max_tokens": 40,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "a"},
            {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"},
        ],
    },
}
FORMATS: dict[str, Any] = {
    "object": {"type": "json_object", "schema": SCHEMA},
    "schema": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "flat schema": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA},
    "regex": {"type": "regex_schema", "regex_schema": "a"},
    "text": {"type": "text"},
    "tag": TAG,
}
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
    {"type": "function_call", "call_id": "call_a", "name": "book", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_a", "output": "ok"},
]
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
RESPONSES: dict[str, Any] = {
    "input": ITEMS,
    "text": {"format": FORM},
    "tools": [{"type": "function", **BOOK["function"]}],
    "tool_choice": {"type": "function", "name": "book"},
    "reasoning": {"effort": "medium"},
    "stream_options": {"include_obfuscation": False},
    "max_output_tokens": 40,
}
PLAIN = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**PLAIN, "stream_options": {"include_usage": True}, "stream": True}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a"}}),
    ("/v1/completions", {"prompt": "a", "response_format": FORMATS["schema"]}),
    ("/v1/responses", RESPONSES),
    ("/tokenize", {name: CHAT[name] for name in ("messages", "tools")}),
    *[("/v1/chat/completions", {**PLAIN, "response_format": form}) for form in FORMATS.values()],
    (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"structural_tag": TAG}, "max_tokens": 9},
    ),
]


def places(value: Any, path: str = "") -> Iterator[str]:
    """Where a field can stand in a body, as an expression of Python's; "" is its top."""
    if isinstance(value, dict):
        yield path
        for name, inner in value.items():
            if name not in FREE:
                yield from places(inner, f"{path}[{name!r}]")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, f"{path}[{index}]")


CASES = [(path, body, place) for path, body in BODIES for place in places(body)]


@pytest.mark.parametrize(("path", "body", "place"), CASES)
def test_it_is_refused_with_its_path(
    served: Running, path: str, body: dict[str, Any], place: str
) -> None:
    changed = copy.deepcopy(body)
    eval(f"body{place}", {"body": changed})["no_such_field"] = 1  # noqa: S307 - a path of ours
    reply = served.post(path, changed)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    shown = place.replace("['", ".").replace("']", "").lstrip(".")
    if "structural_tag" in str(body):  # which the backend reads, from its own top on
        shown = shown.partition("structural_tag")[2] or shown.partition("response_format")[2]
        assert f"{shown.lstrip('.')}.no_such_field".lstrip(".") in error["message"]
        return
    assert error["code"] == "unknown_parameter"
    assert f"{shown}.no_such_field".lstrip(".") in error["message"]
    assert error["param"] == f"{shown}.no_such_field".lstrip(".")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_without_it_they_are_served(served: Running, path: str, body: dict[str, Any]) -> None:
    """And null asks for nothing, wherever it stands."""
    assert served.post(path, body).status_code == 200
    changed = copy.deepcopy(body)
    for place in places(body):
        eval(f"body{place}", {"body": changed})["no_such_field"] = None  # noqa: S307
    reply = served.post(path, changed)
    assert reply.status_code == 200 or "structural_tag" in str(body), reply.text


@pytest.mark.parametrize("name", ["object", "schema", "flat schema"])
def test_each_place_of_a_schema_means_the_same(client: openai.OpenAI, name: str) -> None:
    """As llama.cpp, Together and Fireworks have it, as OpenAI, and as its Responses."""
    texts = {
        client.chat.completions.create(
            model="bundled", messages=ASK, max_tokens=20, response_format=form
        )
        .choices[0]
        .message.content
        for form in (FORMATS[name], FORMATS["schema"])
    }
    assert len(texts) == 1
    assert (texts.pop() or "").startswith('{"a": ')


def test_what_the_client_sends_back_is_known(client: openai.OpenAI) -> None:
    """A parsed message has more fields than were sent, and OpenAI's client sends them all."""
    again: Any = {"role": "user", "content": "And again?"}
    options: Any = {"model": "bundled", "response_format": Contact}
    first = client.chat.completions.parse(messages=ASK, **options)
    message: Any = first.choices[0].message.model_dump(warnings=False)
    assert message["parsed"]
    second = client.chat.completions.parse(messages=[*ASK, message, again], **options)
    assert isinstance(second.choices[0].message.parsed, Contact)
    parsed = client.responses.parse(model="bundled", input=ASK, text_format=Contact)
    items: Any = [*ASK, *[item.model_dump(warnings=False) for item in parsed.output], again]
    assert client.responses.parse(model="bundled", input=items, text_format=Contact).output_parsed
