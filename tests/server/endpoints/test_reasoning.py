"""Models that reason, and families of calls, over HTTP: tiny random models with their templates."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chat_templates import TEMPLATES, THINKING
from tests.server.running import BOOK, Running, running
from tests.tiny_llm import make_llm, tiny_tokenizer

ASK = [{"role": "user", "content": "Is it on?"}]
YES = {"type": "regex_schema", "regex_schema": "yes|no"}
BODY: dict[str, Any] = {"messages": ASK, "temperature": 1.0, "seed": 3, "max_tokens": 60}


@pytest.fixture(scope="module", params=[THINKING, TEMPLATES["harmony"]], ids=["think", "harmony"])
def tiny(request: pytest.FixtureRequest) -> Iterator[Running]:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = request.param
    with make_llm("llama", tokenizer=tokenizer, max_model_len=512) as llm, running(llm) as served:
        yield served


def joined(served: Running, body: Any) -> dict[str, str]:
    """The pieces of a stream, by the field that they are in."""
    text = served.post("/v1/chat/completions", {**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    found = {"content": "", "reasoning_content": "", "arguments": ""}
    for delta in (json.loads(line)["choices"][0]["delta"] for line in lines):
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            found["arguments"] += call["function"]["arguments"]
    return found


def test_reasoning_is_apart(tiny: Running) -> None:
    body: dict[str, Any] = {**BODY, "response_format": YES}
    opened = {**body, "chat_template_kwargs": {"opened": True}}
    reply = tiny.post("/v1/chat/completions", opened)
    if reply.status_code == 400:  # a template that does not read it
        assert "it reads" in reply.json()["error"]["message"]
        reply = tiny.post("/v1/chat/completions", opened := body)
    body, message = opened, reply.json()["choices"][0]["message"]
    pieces = joined(tiny, body)
    assert pieces["content"].strip() == message["content"].strip()
    assert pieces["reasoning_content"] == message.get("reasoning_content", "")
    assert message["content"].endswith(("yes", "no"))


@pytest.mark.parametrize("tiny", [THINKING], indirect=True, ids=["think"])
def test_a_call(tiny: Running) -> None:
    body = {**BODY, "tools": [BOOK], "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"max_tokens": 180, "chat_template_kwargs": {"enable_thinking": False}}
    reply = tiny.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    message = reply.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    pieces = joined(tiny, body)
    assert json.loads(pieces["arguments"]) == json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("tiny", [THINKING], indirect=True, ids=["think"])
def test_tokens_are_those_of_the_template_as_it_is_asked(tiny: Running) -> None:
    counts = []
    body: dict[str, Any] = {}
    for variables in ({}, {"opened": True}):
        body = {"messages": ASK, "chat_template_kwargs": variables}
        counts.append(tiny.post("/tokenize", body).json()["count"])
        reply = tiny.post("/v1/chat/completions", {**BODY, **body, "max_tokens": 1}).json()
        assert reply["usage"]["prompt_tokens"] == counts[-1]
    assert counts[0] < counts[1]
    body["chat_template_kwargs"] = {"chat_template": "x"}
    assert "of their own" in tiny.post("/tokenize", body).json()["error"]["message"]


@pytest.mark.parametrize("tiny", [TEMPLATES["harmony"]], indirect=True, ids=["harmony"])
def test_reasoning_is_an_item(tiny: Running) -> None:
    body = {"input": "Is it on?", "temperature": 1.0, "max_output_tokens": 60}
    reply = tiny.post("/v1/responses", body).json()
    assert reply["output"]
    assert {item["type"] for item in reply["output"]} <= {"reasoning", "message"}


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [TEMPLATES["mistral"]], indirect=True, ids=["mistral"])
def test_parallel_calls(tiny: Running) -> None:
    """Some of the samples make several; a stream has the same ones, each piece by its place."""
    body: dict[str, Any] = {**BODY, "tools": [BOOK], "tool_choice": "required"}
    body |= {"n": 8, "max_tokens": 250}
    choices = tiny.post("/v1/chat/completions", body).json()["choices"]
    whole = [[call["function"] for call in one["message"]["tool_calls"]] for one in choices]
    assert max(map(len, whole)) > 1
    text = tiny.post("/v1/chat/completions", {**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    found: list[list[dict[str, str]]] = [[] for _ in choices]
    ids = []
    for choice in (json.loads(line)["choices"][0] for line in lines):
        calls = found[choice["index"]]
        for piece in choice["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):  # a call begins with its name, and has it once
                assert piece["type"] == "function"
                ids.append(piece["id"])
                calls.append({"name": "", "arguments": ""})
            for name in calls[piece["index"]]:
                calls[piece["index"]][name] += piece["function"].get(name) or ""
    parsed, expected = (
        [[(call["name"], json.loads(call["arguments"])) for call in calls] for calls in each]
        for each in (found, whole)
    )
    assert parsed == expected
    assert len({*ids}) == len(ids) == sum(map(len, whole))
    alone = tiny.post("/v1/chat/completions", {**body, "parallel_tool_calls": False}).json()
    assert {len(choice["message"]["tool_calls"]) for choice in alone["choices"]} == {1}
