"""Fields that clients' own types have: those that ask for what is done anyway are taken."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from anthropic.types.tool_param import ToolParam
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel

from guided_spec.server.endpoints.anthropic_bodies import MessagesBody
from guided_spec.server.endpoints.bodies import ChatBody, ResponsesBody
from tests.server.endpoints.test_values import CHAT, LEAST, MESSAGES, RESPONSES, TEXT, refusal
from tests.server.running import ASK, BOOK, Running

HINT = {"cache_control": {"type": "ephemeral"}}
BREAK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
USER: Any = {"role": "user", "content": "Hi"}
REFUSAL: Any = {"type": "refusal", "refusal": "No."}
CALL: Any = {"type": "function_call", "call_id": "call_1", "name": "book", "arguments": "{}"}
DONE: Any = {"type": "function_call_output", "call_id": "call_1", "output": "ok"}
FLAT: Any = {"type": "function", **BOOK["function"]}
USE: Any = {"type": "tool_use", "id": "toolu_1", "name": "book", "input": {}}
BLOCK: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}
PLAIN: Any = {"name": "book", "input_schema": {"type": "object"}}
NAMED: Any = {"type": "function", "name": "book"}


@pytest.mark.parametrize(
    ("mine", "theirs", "refused"),
    [
        (
            *(ChatBody, CompletionCreateParamsNonStreaming),
            {"audio", "function_call", "functions", "moderation", "web_search_options"},
        ),
        (
            *(ResponsesBody, ResponseCreateParamsNonStreaming),
            {"context_management", "conversation", "max_tool_calls", "moderation", "prompt"}
            | {"top_logprobs"},
        ),
        (
            *(MessagesBody, MessageCreateParamsNonStreaming),
            {"container", "diagnostics", "inference_geo", "speed", "user_profile_id"}
            | {"workspace_id"},
        ),
    ],
)
def test_fields_of_clients(mine: type[BaseModel], theirs: Any, refused: set[str]) -> None:
    """No field is refused but those that ask for what this server has not."""
    assert get_type_hints(theirs).keys() - mine.model_fields.keys() <= refused


def said(content: Any, **more: Any) -> Any:
    return [USER, {"role": "assistant", "content": content, **more}, USER]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}),
        (CHAT, {"service_tier": "fast"}),
        (CHAT, {"messages": [{**USER, **HINT}]}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "A", **BREAK}]}]},
        ),
        (CHAT, {"messages": said([REFUSAL])}),
        (CHAT, {"messages": said(None, refusal="No.")}),
        (CHAT, {"tools": [{**BOOK, **HINT}]}),
        (CHAT, {"tools": [BOOK], "tool_choice": NAMED, "max_tokens": 60}),
        (
            CHAT,
            {"prediction": {"type": "content", "content": [{"type": "text", "text": "A", **HINT}]}},
        ),
        (RESPONSES, {"reasoning": {"mode": "standard", "context": "auto"}}),
        (RESPONSES, {"reasoning": {"generate_summary": "auto"}}),
        (RESPONSES, {"input": said("A", phase="final_answer")}),
        (RESPONSES, {"input": said([REFUSAL])}),
        (
            RESPONSES,
            {"input": [USER, {**CALL, "caller": {"type": "direct"}}, {**DONE, "name": "book"}]},
        ),
        (RESPONSES, {"tools": [{**FLAT, "defer_loading": False, "allowed_callers": ["direct"]}]}),
        (
            RESPONSES,
            {"tools": [FLAT], "max_output_tokens": 60}
            | {"tool_choice": {"type": "function", "function": {"name": "book"}}},
        ),
        (
            RESPONSES,
            {
                "text": {
                    "format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
                }
            },
        ),
        (MESSAGES, {"messages": [{"role": "system", "content": "Be brief."}, *ASK]}),
        (MESSAGES, {"tools": [{**PLAIN, "eager_input_streaming": True, "defer_loading": False}]}),
    ],
)
def test_taken(served: Running, path: str, changes: Any) -> None:
    reply = served.post(path, {**LEAST[path], **changes})
    assert reply.status_code == 200, reply.text


def test_tools_of_anthropic() -> None:
    taken = {"type", "name", "description", "input_schema", "strict", "cache_control"}
    usual = {"defer_loading", "allowed_callers", "eager_input_streaming"}
    assert get_type_hints(ToolParam).keys() - taken - usual == {"input_examples"}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("path", "changes", "param", "message"),
    [
        (CHAT, {"n": True}, "n", "n=True: must be an int"),
        (CHAT, {"temperature": True}, "temperature", "must be a number"),
        (CHAT, {"logit_bias": {"5": True}}, "logit_bias.5", "must be a number"),
        (CHAT, {"stop_token_ids": [True]}, "stop_token_ids", "each is an int"),
        (TEXT, {"prompt": [1, True]}, "prompt", "must be a str, or a list"),
        (TEXT, {"logprobs": True}, "logprobs", "must be an int"),
        (MESSAGES, {"max_tokens": True}, "max_tokens", "must be an int"),
        (
            *(CHAT, {"stream_options": {"include_usage": 5, "include_obfuscation": 6}}),
            *("stream_options.include_usage", "include_usage=5: must be True or False"),
        ),
        (
            *(CHAT, {"prediction": {"type": "content", "content": 5}}),
            *("prediction.content", "prediction.content=5: must be a str, or a list"),
        ),
        (
            *(CHAT, {"structured_outputs": {"structural_tag": 5}}),
            *("structured_outputs.structural_tag", "structural_tag=5: must be a str, or a dict"),
        ),
        (CHAT, {"messages": said("A", refusal="No.")}, "messages[1].refusal", "one of them"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content", "None: must be text"),
        (RESPONSES, {"input": [{**USER, "role": "tool"}]}, "input[0].role", "function_call_output"),
        (RESPONSES, {"input": [CALL, {**DONE, "output": None}]}, "input[1].output", "must be text"),
        (RESPONSES, {"tools": [BOOK]}, "tools[0].function", 'write {"type": "function", "name"'),
        (
            *(RESPONSES, {"tools": [{**FLAT, "defer_loading": True}]}),
            *("tools[0].defer_loading", "must be False here, or left out"),
        ),
        (
            *(RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "function"}}),
            *("tool_choice.name", "tool_choice.name=None: must be a str"),
        ),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice.type", "'any': needs a tool"),
        (
            *(MESSAGES, {"tools": [PLAIN], "tool_choice": {"type": "tool"}}),
            *("tool_choice.name", "None: must be a str"),
        ),
        (
            *(MESSAGES, {"tools": [PLAIN], "tool_choice": {"type": "function", "name": "book"}}),
            *("tool_choice.type", "did you mean tool?"),
        ),
        (
            *(MESSAGES, {"messages": [{"role": "user", "content": [{**BLOCK, "content": 0}]}]}),
            *("messages[0].content[0].content", "must be a str, or a list"),
        ),
        (
            *(MESSAGES, {"messages": [{"role": "assistant", "content": [{**USE, "caller": 5}]}]}),
            *("messages[0].content[0].caller", "must be a dict"),
        ),
    ],
)
def test_refused(served: Running, path: str, changes: Any, param: str, message: str) -> None:
    error = refusal(served, path, changes)
    assert (error["param"], message in error["message"]) == (param, True), error
