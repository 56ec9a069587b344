"""A wrong value is refused by name, with what may come; a wrong name gets the nearest one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from guided_spec.batch.inputs import Line
from guided_spec.batch.requests import RequestForm
from tests.server.running import ASK, BOOK, Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 8},
    TEXT: {"prompt": "A", "max_tokens": 8},
    RESPONSES: {"input": "A", "max_output_tokens": 8},
    MESSAGES: {"messages": ASK, "max_tokens": 8},
    "/tokenize": {"prompt": "A"},
    f"{MESSAGES}/count_tokens": {"messages": ASK},
}
BROKEN = {"type": "object", "properties": {"a": {"type": "strnig"}}}
SLIP = {"type": "object", "properties": {"a": {"type": "string", "patern": "a"}}}
CUSTOM: Any = {"type": "custom", "custom": {"name": "look"}}


def tool(schema: Any, **more: Any) -> Any:
    function = {"name": "other", "parameters": schema, **more}
    return {"type": "function", "function": function}


def form(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


def refusal(served: Running, path: str, changes: Any) -> dict[str, Any]:
    body = {**LEAST[path], **changes}
    body = {name: value for name, value in body.items() if value is not ...}
    reply = served.post(path, body)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("path", "name", "near"),
    [
        (CHAT, "temprature", "temperature"),
        (CHAT, "max_new_tokens", "max_tokens"),
        (CHAT, "max_output_tokens", "max_tokens"),
        (CHAT, "prompt", "messages"),
        (CHAT, "functions", "tools"),
        (CHAT, "json_schema", "response_format"),
        (TEXT, "max_new_tokens", "max_tokens"),
        (TEXT, "messages", "prompt"),
        (TEXT, "stop_strings", "stop"),
        (RESPONSES, "temprature", "temperature"),
        (RESPONSES, "max_new_tokens", "max_output_tokens"),
        (RESPONSES, "response_format", "text.format"),
        (MESSAGES, "max_token", "max_tokens"),
        (MESSAGES, "stop", "stop_sequences"),
        (MESSAGES, "temprature", "temperature"),
        (f"{MESSAGES}/count_tokens", "sytem", "system"),
        ("/tokenize", "promt", "prompt"),
    ],
)
def test_the_nearest_name(served: Running, path: str, name: str, near: str) -> None:
    error = refusal(served, path, {name: 1})
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    message = f"{name}=1: is not known here, leave it out; did you mean {near}?"
    assert error["message"].startswith(message)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("path", "changes", "param", "message"),
    [
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "the key 'x' must be an int"),
        (CHAT, {"verbosity": "lwo"}, "verbosity", "='lwo': must be 'low', 'medium' or 'high'"),
        (CHAT, {"on_short": "eror"}, "on_short", "did you mean error?"),
        (MESSAGES, {"on_short": "eror"}, "on_short", "did you mean error?"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0]", "='audio': must be 'text'"),
        (MESSAGES, {"max_tokens": ...}, "max_tokens", "max_tokens is missing: must be an int"),
        (CHAT, {"messages": ...}, "messages", "messages is missing: must be a list"),
        (RESPONSES, {"input": ...}, "input", "input is missing: must be a str, or a list"),
        (CHAT, {"temperature": "a"}, "temperature", "temperature='a': must be a number"),
        (CHAT, {"stop": 5}, "stop", "stop=5: must be a str, or a list, of which each is a str"),
        (TEXT, {"prompt": 5}, "prompt", "prompt=5: must be a str"),
        (CHAT, {"n": 0}, "n", "n=0: must be at least 1"),
        (CHAT, {"messages": [1]}, "messages[0]", "messages[0]=1: must be an object"),
        (CHAT, {"user": {"a": 1}}, "user", "must be a str"),
        (CHAT, {"store": "maybe"}, "store", "='maybe': must be True or False"),
        (CHAT, {"service_tier": "quick"}, "service_tier", "must be 'auto', 'default'"),
        (CHAT, {"metadata": {"a": 1}}, "metadata.a", "=1: must be a str"),
        (
            CHAT,
            {"stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "mean include_usage",
        ),
        (CHAT, {"prediction": {"type": "content", "content": "a", "x": 1}}, "prediction.x", "=1: "),
        (CHAT, {"chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo", "does not read"),
        (
            *(CHAT, {"chat_template_kwargs": {"enable_thinking": True}}),
            *("chat_template_kwargs.enable_thinking", "does not read"),  # False is nothing to ask
        ),
        (RESPONSES, {"include": ["fooo"]}, "include[0]", "include[0]='fooo': must be 'code_"),
        (RESPONSES, {"reasoning": {"summary": "autoo"}}, "reasoning.summary", "mean auto?"),
        (RESPONSES, {"input": [{"role": "usr", "content": "a"}]}, "input[0].role", "mean user?"),
        (MESSAGES, {"metadata": {"usr_id": "a"}}, "metadata.usr_id", "mean user_id?"),
        (
            MESSAGES,
            {"messages": [{"role": "usr", "content": "a"}]},
            "messages[0].role",
            "mean user?",
        ),
        (MESSAGES, {"output_config": {"effort": 5}}, "output_config.effort", "=5: must be a str"),
        (CHAT, {"messages": [{"role": "human", "content": "a"}]}, "messages[0].role", "mean user?"),
        (MESSAGES, {"cache_control": {"type": "x"}}, "cache_control.type", "'ephemeral'"),
        (
            MESSAGES,
            {"tools": [{"name": "a", "input_schema": {}, "cache_control": {"tpe": "x"}}]},
            *("tools[0].cache_control.tpe", "mean type?"),
        ),
        (
            MESSAGES,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}},
            *("tool_choice.disable_parallel_tool_use", "='x': must be True or False"),
        ),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": 5, "output": "a"}]},
            *("input[0].call_id", "=5: must be a str"),
        ),
        (
            CHAT,
            {"tools": [BOOK], "tool_choice": {"type": "functon"}},
            "tool_choice.type",
            "function?",
        ),
        (
            CHAT,
            {"response_format": form(5)},
            "response_format.json_schema.schema",
            "=5: must be a J",
        ),
        (MESSAGES, {"thinking": {"type": "enable"}}, "thinking.type", "mean enabled?"),
        (CHAT, {"tools": [BOOK], "tool_choice": "requird"}, "tool_choice", "auto, none, required"),
        (CHAT, {"tools": [BOOK], "tool_choice": "bok"}, "tool_choice", "did you mean book?"),
        (CHAT, {"tools": [{"type": "functon", "function": {}}]}, "tools[0].type", "function?"),
        (CHAT, {"tools": [BOOK, tool(BROKEN)]}, "tools[1].function.parameters", "'/properties/a/t"),
        (
            CHAT,
            {"tools": [tool(BROKEN)], "response_format": form({"type": "object"})},
            *("tools[0].function.parameters", "the tool 'other': not a JSON schema: at '/prop"),
        ),
        (
            CHAT,
            {"tools": [BOOK], "response_format": form(BROKEN)},
            *("response_format", "the response_format: not a JSON schema: at '/properties/a/type"),
        ),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": "other", "parameters": BROKEN}]},
            *("tools[0].parameters", "the tool 'other'"),
        ),
        (
            MESSAGES,
            {"tools": [{"name": "other", "input_schema": BROKEN}]},
            *("tools[0].input_schema", "the tool 'other'"),
        ),
        (MESSAGES, {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "'a b'"),
        (
            RESPONSES,
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{a"}]},
            *("input[0].arguments", "must be a JSON object"),
        ),
        *[
            (CHAT, {"tools": [tool(SLIP, strict=True)], **more}, "tools[0].function.parameters", r)
            for more in ({}, {"response_format": {"type": "json_object"}})
            for r in ("'/properties/a'", "'pattern'")
        ],
        (CHAT, {"response_format": form(SLIP, strict=True)}, "response_format", "'pattern' is one"),
        (
            CHAT,
            {"tools": [BOOK], "response_format": form(SLIP, strict=True)},
            *("response_format", "'pattern' is one"),
        ),
        (
            CHAT,
            {"response_format": form(SLIP, strict="a")},
            "response_format.json_schema.strict",
            "",
        ),
        *[
            (
                CHAT,
                {"tools": [BOOK, CUSTOM], "tool_choice": choice},
                *(f"{place}.type", "write {"),
            )
            for place, choice in (
                ("tool_choice", {"type": "function", "function": {"name": "look"}}),
                ("tool_choice", {"type": "custom", "custom": {"name": "book"}}),
                *[
                    (
                        "tool_choice.allowed_tools.tools[0]",
                        {
                            "type": "allowed_tools",
                            "allowed_tools": {
                                "mode": "auto",
                                "tools": [{"type": kind, kind: {"name": name}}],
                            },
                        },
                    )
                    for kind, name in (("function", "look"), ("custom", "book"))
                ],
            )
        ],
        (
            RESPONSES,
            {
                "tools": [{"type": "custom", "name": "look"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "look"}],
                },
            },
            *("tool_choice.tools[0].type", "the tool 'look' is a custom one"),
        ),
    ],
)
def test_a_wrong_value(served: Running, path: str, changes: Any, param: str, message: str) -> None:
    error = refusal(served, path, changes)
    assert (error["param"], message in error["message"]) == (param, True), error["message"]


def test_a_keyword_of_a_tool_that_is_misspelt_is_in_the_log(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of a response_format is, in every form of calls."""
    with caplog.at_level(logging.WARNING, "guided_spec"):
        body = {**LEAST[CHAT], "tools": [tool({"type": "object", "propertys": {}})]}
        assert served.post(CHAT, body).status_code == 200
    assert any("'properties' is one" in record.getMessage() for record in caplog.records)


def test_texts_that_were_cut_short_are_refused_everywhere_and_free_text_nowhere(
    served: Running,
) -> None:
    number = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    bound: dict[str, Any] = {
        CHAT: {"response_format": form(number)},
        TEXT: {"response_format": form(number)},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "a", "schema": number}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": number}}},
    }
    for path, changes in bound.items():
        body = {**LEAST[path], "on_short": "error"}
        assert served.post(path, body).status_code == 200
        assert refusal(served, path, {**changes, "on_short": "error"})["code"] == "text_cut_short"


def test_lines_of_a_batch() -> None:
    read = RequestForm("bundled", ("bundled",)).read
    whole = {"custom_id": "a", "method": "POST", "url": CHAT, "body": LEAST[CHAT]}
    for changes, reason in (
        ({"bdy": 1}, "'bdy' is no field of a line: it has .*; did you mean body?"),
        ({"url": "/v1/chat/completion"}, f"did you mean {CHAT}?"),
        ({"body": {**LEAST[CHAT], "temprature": 1}}, "did you mean temperature?"),
    ):
        refused: Any = read(1, Line(1, {**whole, **changes})).refusal
        told = (refused["error"] or refused["response"]["body"]["error"])["message"]
        assert all(part in told for part in reason.split(".*"))
