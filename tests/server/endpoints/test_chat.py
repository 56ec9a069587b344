"""``/v1/chat/completions`` with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.running import ASK, BOOK, Contact, Running

CREATE: dict[str, Any] = {"model": "bundled", "messages": ASK}


def join(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "bundled"
    assert client.models.retrieve("bundled") == model


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(**CREATE, response_format=Contact)
    assert reply.choices[0].message.parsed == Contact(name="Maria Lopez", phone="+49 170 5551234")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**CREATE, "max_tokens": 40}
    whole = client.chat.completions.create(**options)
    usage: Any = {"include_usage": True}
    with client.chat.completions.create(**options, stream=True, stream_options=usage) as stream:
        chunks = list(stream)
    assert join(chunks) == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage]
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 4


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_piece_has_the_usage_that_is_asked_for(
    served: Running, path: str, *, is_asked: bool
) -> None:
    """As OpenAI has it: None on all pieces but the last."""
    asks = {"prompt": "The name is"} if path == "/v1/completions" else {"messages": ASK}
    options = {"stream_options": {"include_usage": is_asked}, "stream": True, "max_tokens": 9}
    lines = served.post(path, {**asks, **options}).text.split("\n\n")
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len(pieces) > 2
    if not is_asked:
        assert not any("usage" in piece for piece in pieces)
        return
    assert [piece["usage"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["usage"]["completion_tokens"] == 9


def test_the_client_s_own_stream_of_a_parsed_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CREATE, response_format=Contact) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert message.parsed == Contact(name="Maria Lopez", phone="+49 170 5551234")


def test_samples_and_seeds(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**CREATE, "n": 3, "temperature": 2, "max_tokens": 12, "seed": -7}
    texts = [
        [choice.message.content for choice in client.chat.completions.create(**options).choices]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    with client.chat.completions.create(**options, stream=True) as stream:
        chunks = list(stream)
    assert [join(chunks, index) for index in range(3)] == texts[0]


def test_stop_strings(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(**CREATE, max_tokens=30).choices[0].message.content
    assert free is not None
    stop = free[8:11]
    options: dict[str, Any] = {**CREATE, "max_tokens": 30, "stop": [stop]}
    reply = client.chat.completions.create(**options).choices[0]
    assert (reply.message.content, reply.finish_reason) == (free.partition(stop)[0], "stop")
    with client.chat.completions.create(**options, stream=True) as stream:
        assert join(list(stream)) == free.partition(stop)[0]


def test_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**CREATE, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(bytes(token.bytes or []).decode() == token.token for token in tokens)
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
    with client.chat.completions.create(**options, stream=True) as stream:
        pieces = [piece for chunk in stream for piece in chunk.choices if piece.logprobs]
    streamed = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content or []]
    assert streamed == tokens


def test_logprobs_that_are_not_wanted(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**CREATE, "max_tokens": 8, "logprobs": False}
    reply = client.chat.completions.create(**options, top_logprobs=0)
    assert reply.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs=3: logprobs is false"):
        client.chat.completions.create(**options, top_logprobs=3)


def test_logit_bias_and_penalties(client: openai.OpenAI, served: Running) -> None:
    text = client.chat.completions.create(**CREATE, max_tokens=1).choices[0].message.content
    (token,) = served.post("/tokenize", {"prompt": text}).json()["tokens"]
    options: dict[str, Any] = {**CREATE, "logit_bias": {str(token): -100}, "presence_penalty": 1}
    other = client.chat.completions.create(**options, max_tokens=1, frequency_penalty=1, top_p=0.9)
    assert other.choices[0].message.content != text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call(client: openai.OpenAI, choice: Any, *, is_streamed: bool) -> None:
    options: dict[str, Any] = {**CREATE, "tools": [BOOK], "tool_choice": choice, "max_tokens": 60}
    options["parallel_tool_calls"] = False
    if is_streamed:
        with client.chat.completions.stream(**options) as stream:
            list(stream)
            completion: ChatCompletion = stream.get_final_completion()
    else:
        completion = client.chat.completions.create(**options)
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "book"
    assert json.loads(call.function.arguments).keys() == {"seats", "window"}
    assert completion.choices[0].finish_reason in ("tool_calls", "length")


def test_arguments_come_in_pieces(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**CREATE, "tools": [BOOK], "tool_choice": "required"}
    with client.chat.completions.create(**options, stream=True, max_tokens=50) as stream:
        calls = [
            call
            for chunk in stream
            for choice in chunk.choices
            for call in choice.delta.tool_calls or []
        ]
    assert calls[0].id
    assert calls[0].function is not None
    assert calls[0].function.name == "book"
    assert len([call for call in calls if call.index == 0]) > 1
    assert all(call.id is None for call in calls[1:] if call.index == 0)


def test_a_conversation_with_a_call_goes_on(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "bundled", "tools": [BOOK], "max_tokens": 60}
    first = client.chat.completions.create(messages=ASK, tool_choice="required", **options)
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "booked"}
    again: Any = [*ASK, message.model_dump(exclude_none=True), result]
    reply = client.chat.completions.create(messages=again, tool_choice="none", **options)
    assert not reply.choices[0].message.tool_calls


def test_content_in_parts_and_the_role_of_developers(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": text} for text in ("Please call Maria Lopez ", "at +4.")]
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]
    plain: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Please call Maria Lopez at +4."},
    ]
    texts = {
        client.chat.completions.create(model="bundled", messages=each, max_tokens=9)
        .choices[0]
        .message.content
        for each in (messages, plain)
    }
    assert len(texts) == 1


def test_json_object_and_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**CREATE, "max_completion_tokens": 40}
    reply = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)
    free = client.chat.completions.create(**options, response_format={"type": "text"})
    assert free == client.chat.completions.create(**options).model_copy(
        update={"id": free.id, "created": free.created}
    )


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


REFUSED = {"not": {"multipleOf": 2}}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("options", "reason", "code"),
    [
        (
            {"response_format": schema_format({"properties": {"k": REFUSED}, "type": "object"})},
            "/properties/k: not",
            "unsupported_schema",
        ),
        (
            {"response_format": schema_format({"properties": {"k": {"type": "objct"}}})},
            "/properties/k/type",
            "invalid_grammar",
        ),
        ({"response_format": {"type": "jsn"}}, "response_format.type='jsn'", "invalid_value"),
        ({"temperature": -1}, "temperature=-1", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1", "invalid_value"),
        ({"tools": [BOOK], "tool_choice": "x"}, "is not one of the tools: book", "invalid_value"),
        ({"messages": ["hi"]}, "messages[0]='hi': must be an object", "invalid_value"),
        ({"messages": [{"content": "hi"}]}, r"messages[0].role=None: must be", "invalid_value"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type='image_url': this model reads text",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": "a " * 2000}]},
            *("only 1023", "context_length_exceeded"),
        ),
        ({"web_search_options": {}}, "web_search_options=", "unknown_parameter"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "of their own", "invalid_value"),
        ({"n": 17}, "16 is the most", "invalid_value"),
        ({"max_tokens": 3, "guided_regex": "[ab]{30}"}, "allow at least", "budget_too_small"),
    ],
)
def test_mistakes_are_named(
    served: Running, options: Any, reason: str, code: str, *, is_streamed: bool
) -> None:
    reply = served.post("/v1/chat/completions", {**CREATE, "stream": is_streamed, **options})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        (
            {"max_completion_tokens": 3, "max_tokens": 99, "guided_regex": "[ab]{30}"},
            *("max_completion_tokens", "the grammar's shortest text takes"),
        ),
        ({"guided_choice": []}, "guided_choice", "guided_choice=[]: must be a non-empty"),
        (
            {"structured_outputs": {"choice": [""]}},
            *("structured_outputs.choice", "structured_outputs.choice='': each option"),
        ),
        ({"guided_json": "{x"}, "guided_json", "the json_schema is not JSON"),
        ({"guided_json": {"$ref": "a:b"}}, "guided_json", "the JSON schema cannot be"),
        ({"response_format": {}}, "response_format.type", "response_format.type=None: "),
    ],
)
def test_faults_name_what_was_sent(served: Running, options: Any, param: str, message: str) -> None:
    error = served.post("/v1/chat/completions", {**CREATE, **options}).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message)
    assert not any(name in error["message"] for name in ("complete=", "resources="))  # Python's


def test_errors_are_openai_s(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CREATE, response_format=schema_format(REFUSED))
    assert caught.value.code == "unsupported_schema"
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="only 1023") as caught:
        client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": "a " * 2000}]
        )
    assert caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="only 1023") as caught:
        client.completions.create(model="bundled", prompt="a " * 2000)
    assert caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; there is bundled"):
        client.chat.completions.create(model="gpt", messages=ASK)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
