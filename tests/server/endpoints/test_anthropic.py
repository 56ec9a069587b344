"""``/v1/messages``: bodies by hand, and Anthropic's own client where it is installed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from guided_spec.engine.chat import ChatChunk, ToolCallDelta
from guided_spec.engine.llm import LLM
from guided_spec.server.endpoints.anthropic import MessageBlocks
from guided_spec.server.endpoints.anthropic_bodies import MessagesBody, as_chat
from guided_spec.server.faults import ApiError
from tests.server.endpoints.test_nested_fields import SCHEMA, places
from tests.server.running import ASK, BOOK, PATIENCE, Contact, Running, running

PATH = "/v1/messages"
TOOL = {
    "name": "book",
    "description": "Book seats on a train.",
    "input_schema": BOOK["function"]["parameters"],
}
CREATE: dict[str, Any] = {"model": "bundled", "messages": ASK, "max_tokens": 60}
CALL = {
    **CREATE,
    "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
FORM = {"format": {"type": "json_schema", "schema": SCHEMA}}


def events(reply: Any) -> list[dict[str, Any]]:
    """Each names its type twice."""
    pairs = [block.split("\n") for block in reply.text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [one["type"] for one in found]
    return found


def join(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, as the whole reply has them."""
    blocks: list[dict[str, Any]] = []
    for one in found:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append({**one["content_block"], "written": ""})
        elif one["type"] == "content_block_delta":
            assert one["index"] == len(blocks) - 1
            (kind, text) = list(one["delta"].items())[1]
            name = "written" if kind == "partial_json" else kind
            blocks[-1][name] += text
    for block in blocks:
        written = block.pop("written")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
            assert block["id"].startswith("toolu_")
    return blocks


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({**CREATE, "max_tokens": 9}, "max_tokens"),
        (CALL, "tool_use"),
        ({**CREATE, "output_config": FORM}, "end_turn"),
        ({**CREATE, "stop_sequences": ["zzz", "e"]}, "stop_sequence"),
    ],
    ids=["text", "call", "form", "stop"],
)
def test_whole_and_streamed_are_the_same(
    served: Running, body: dict[str, Any], reason: str
) -> None:
    whole = served.post(PATH, body).json()
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", reason)
    assert whole["stop_sequence"] == ("e" if reason == "stop_sequence" else None)
    found = events(served.post(PATH, {**body, "stream": True}))
    start, *_, delta, stop = found
    assert (start["type"], stop) == ("message_start", {"type": "message_stop"})
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    ends = {"stop_reason": reason, "stop_sequence": whole["stop_sequence"]}
    assert (delta["type"], delta["delta"]) == ("message_delta", ends)
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    counted = ("input_tokens", "cache_read_input_tokens")
    sums = {sum(usage[name] for name in counted) for usage in (delta["usage"], whole["usage"])}
    assert sums == {start["message"]["usage"]["input_tokens"]}
    blocks = join(found)
    assert [block.keys() for block in blocks] == [block.keys() for block in whole["content"]]
    for mine, theirs in zip(blocks, whole["content"], strict=True):
        assert mine | {"id": ""} == theirs | {"id": ""}
    if reason == "tool_use":
        assert blocks[0]["input"].keys() == {"seats", "window"}
    if reason == "end_turn":
        assert json.loads(blocks[0]["text"]).keys() == {"a"}


def test_a_form_beside_tools(served: Running) -> None:
    """A call, or text of the form."""
    for kind, is_call in (("any", True), ("none", False)):
        choice = {"type": kind, **({"disable_parallel_tool_use": True} if is_call else {})}
        body = {**CALL, "tool_choice": choice, "output_config": FORM}
        (block,) = served.post(PATH, body).json()["content"]
        assert (block["type"] == "tool_use") == is_call


def test_reasoning_then_text_then_a_call() -> None:
    """Each kind is a block of its own, closed before the next begins."""
    blocks = MessageBlocks()
    chunks = [
        ChatChunk(0, reasoning="Hm"),
        ChatChunk(0, reasoning="m."),
        ChatChunk(0, text="Well. "),
        ChatChunk(0, tool_calls=(ToolCallDelta(0, "abc", "book", '{"a"'),)),
        ChatChunk(
            0, tool_calls=(ToolCallDelta(0, "", "", ": 1}"), ToolCallDelta(1, "d", "go", ""))
        ),
        ChatChunk(0, tool_calls=(ToolCallDelta(1, "", "", "{}", is_complete=True),)),
    ]
    found = [one.model_dump() for chunk in chunks for one in blocks.feed(chunk)]
    kinds = [one["type"].removeprefix("content_block_") for one in found]
    begun = ["start", "delta", "delta", "stop", "start", "delta", "stop"]
    assert kinds == [*begun, "start", "delta", "delta", "stop", "start", "delta", "stop"]
    assert [one["index"] for one in found] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert found[7]["content_block"] == {
        **{"type": "tool_use", "id": "toolu_abc", "name": "book", "input": {}}
    }


HISTORY: list[Any] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "seats."}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "toolu_ab", "name": "book", "input": {"seats": 2}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_ab", "content": "full", "is_error": True},
            {"type": "text", "text": "Again."},
        ],
    },
]
FULL: dict[str, Any] = {
    **CREATE,
    "messages": HISTORY,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "book"},
    "thinking": {"type": "disabled"},
    "stop_sequences": ["x"],
    "top_k": 3,
    "output_config": {"effort": "low", **FORM},
    "metadata": {"user_id": "me"},
}


def test_blocks_become_messages() -> None:
    chat = as_chat(MessagesBody.model_validate(FULL), "{{ enable_thinking }}")
    function = {"name": "book", "arguments": '{"seats": 2}'}
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Two seats."},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "ab", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "ab", "content": "error: full"},
        {"role": "user", "content": "Again."},
    ]
    assert chat.tools == [BOOK]
    assert chat.tool_choice == {"type": "function", "function": {"name": "book"}}
    assert (chat.stop, chat.top_k, chat.max_tokens) == (["x"], 3, 60)
    assert chat.reasoning_effort == "low"
    assert chat.response_format == FORM["format"]
    assert chat.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("thinking", "template", "expected"),
    [
        (
            {"type": "enabled", "budget_tokens": 2048},
            "{{ enable_thinking }}",
            {"enable_thinking": True},
        ),
        ({"type": "adaptive"}, "{{ enable_thinking }}", None),
        ({"type": "disabled"}, "", None),
        (None, "{{ enable_thinking }}", None),
    ],
)
def test_thinking_is_a_variable_of_the_template(
    thinking: Any, template: str, expected: Any
) -> None:
    body = MessagesBody.model_validate({**CREATE, "thinking": thinking})
    assert as_chat(body, template).chat_template_kwargs == expected


def test_thinking_that_cannot_be_turned_on_is_refused() -> None:
    body = MessagesBody.model_validate({**CREATE, "thinking": {"type": "enabled"}})
    with pytest.raises(ApiError, match="thinking.type: this model's thinking cannot be"):
        as_chat(body, "")


FREE = {"input_schema", "schema", "input", "metadata", "cache_control"}
PLACES = [place for place in places(FULL) if not any(f"['{name}']" in place for name in FREE)]


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_field_is_refused_with_its_path(served: Running, place: str) -> None:
    changed = copy.deepcopy(FULL)
    eval(f"body{place}", {"body": changed})["no_such_field"] = 1  # noqa: S307 - a path of ours
    reply = served.post(PATH, changed)
    assert reply.status_code == 400, reply.text
    found = reply.json()
    shown = place.replace("['", ".").replace("']", "").lstrip(".")
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert found["error"]["code"] == "unknown_parameter"
    assert f"{shown}.no_such_field".lstrip(".") in found["error"]["message"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"messages": []}, "messages=[]: must"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role='tool': must be",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: must be a str"),
        (user({"type": "image", "source": {}}), "messages[0].content[0]: this model reads text"),
        (user({"type": "text"}), "messages[0].content[0].text: must be a str"),
        (user({"type": "thinking", "thinking": "x"}), "is the assistant's"),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0]: this model reads text",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type: 'web_search"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema: must be a JSON schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name='a b'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "some"}},
            "tool_choice.type='some': must be one of",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type='any': needs a tool"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format: must be"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strnig"}}}},
            "'strnig' is no type",
        ),
        ({"container": "x"}, "container='x': is not known here"),
        ({"stop_sequences": [""]}, "stop_sequences=''"),
        ({"messages": [{"role": "user", "content": "a " * 2000}]}, "only 1023"),
    ],
)
def test_mistakes_are_named(
    served: Running, changes: Any, reason: str, *, is_streamed: bool
) -> None:
    reply = served.post(PATH, {**CREATE, **changes, "stream": is_streamed})
    assert reply.status_code == 400, reply.text
    found = reply.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert reason in found["error"]["message"]


def test_tokens_are_counted(served: Running) -> None:
    tools = {"tools": CALL["tools"], "system": "Be brief."}
    for options in ({}, tools, {**tools, "thinking": {"type": "disabled"}}):
        asked = {"messages": ASK, **options}
        counted = served.post(f"{PATH}/count_tokens", asked)
        assert counted.status_code == 200, counted.text
        usage = served.post(PATH, {**asked, "max_tokens": 60}).json()["usage"]
        assert counted.json() == {
            "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
        }
    many = [{"role": "user", "content": "a " * 2000}]
    for body, reason in (
        ({}, "messages"),
        ({"messages": ASK, "max_tokens": 3}, "max_tokens=3: is not known here"),
        ({"messages": ASK, "tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"messages": many}, "only 1023"),
        ({"messages": ASK, "model": "other"}, "other"),
    ):
        refused = served.post(f"{PATH}/count_tokens", body)
        assert refused.status_code in (400, 404)
        assert reason in refused.json()["error"]["message"]
    served.require_service()


@pytest.fixture
def anthropic_client(served: Running) -> Iterator[Any]:
    anthropic: Any = pytest.importorskip("anthropic")
    with anthropic.Anthropic(
        base_url=served.url, api_key="x", max_retries=0, timeout=PATIENCE
    ) as made:
        yield made


def test_the_client_s_turns(anthropic_client: Any) -> None:
    asked: Any = {**CALL, "system": "Be brief."}
    called = anthropic_client.messages.create(**asked)
    (use,) = called.content
    assert (called.stop_reason, use.name) == ("tool_use", "book")
    assert use.input.keys() == {"seats", "window"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "booked"}
    turns = [
        *ASK,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    last = anthropic_client.messages.create(
        **{**asked, "messages": turns, "tool_choice": {"type": "none"}}
    )
    assert {block.type for block in last.content} == {"text"}


def test_the_client_s_stream_and_its_parsed_output(anthropic_client: Any) -> None:
    with anthropic_client.messages.stream(**CALL) as stream:
        kinds = {one.type for one in stream}
        message = stream.get_final_message()
    assert {"message_start", "content_block_start", "input_json", "message_stop"} <= kinds
    assert message.content[0].input.keys() == {"seats", "window"}
    counted = anthropic_client.messages.count_tokens(
        **{name: CALL[name] for name in ("model", "messages", "tools", "tool_choice")}
    )
    assert counted.input_tokens == message.usage.input_tokens + (
        message.usage.cache_read_input_tokens or 0
    )
    parsed = anthropic_client.messages.parse(**CREATE, output_format=Contact)
    assert isinstance(parsed.parsed_output, Contact)


def test_a_key_may_come_in_either_header(llm: LLM) -> None:
    with running(llm, api_keys=("secret",)) as closed:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({"Authorization": "Bearer other", "x-api-key": "secret"}, 401),
            ({}, 401),
        ):
            reply = closed.post(PATH, {**CREATE, "max_tokens": 2}, headers=headers)
            assert reply.status_code == status
            assert status == 200 or reply.json()["error"]["type"] == "authentication_error"
