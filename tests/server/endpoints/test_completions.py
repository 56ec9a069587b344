"""``/v1/completions``, ``/tokenize``, and vLLM's fields."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.server.running import ASK, Contact, Running


def test_texts_of_several_prompts(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "bundled", "max_tokens": 6, "n": 2, "temperature": 1}
    prompts = ["The name is", "The price is"]
    reply = client.completions.create(prompt=prompts, seed=3, **options)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    alone = client.completions.create(prompt=prompts[1], seed=3, **options)
    assert [one.text for one in alone.choices] == [one.text for one in reply.choices[2:]]
    with client.completions.create(prompt=prompts, seed=3, stream=True, **options) as stream:
        texts = dict.fromkeys(range(4), "")
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert list(texts.values()) == [one.text for one in reply.choices]


def test_token_ids_are_prompts(client: openai.OpenAI, served: Running) -> None:
    found = served.post("/tokenize", {"prompt": "The name is", "return_token_strs": True}).json()
    assert "".join(found["token_strs"]) == "The name is"
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 1024
    text = client.completions.create(model="bundled", prompt="The name is").choices[0].text
    for prompt in (found["tokens"], [found["tokens"]]):
        assert client.completions.create(model="bundled", prompt=prompt).choices[0].text == text


def test_openai_s_default_of_sixteen_tokens(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="bundled", prompt="The name is", extra_body={"ignore_eos": True}
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_a_chat_s_tokens(client: openai.OpenAI, served: Running) -> None:
    found = served.post("/tokenize", {"messages": ASK}).json()
    reply = client.chat.completions.create(model="bundled", messages=ASK, max_tokens=1)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == found["count"]
    for body in ({}, {"prompt": "a", "messages": ASK}):
        assert "prompt or messages" in served.post("/tokenize", body).json()["error"]["message"]


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "bundled", "prompt": "The name is", "max_tokens": 5}
    plain = client.completions.create(**options, logprobs=2).choices[0]
    assert client.completions.create(**options, echo=True).choices[0].text == (
        f"The name is{plain.text}"
    )
    found = plain.logprobs
    assert found is not None
    assert "".join(found.tokens or []) == plain.text
    offsets = found.text_offset or []
    assert all(
        plain.text[at:].startswith(t) for at, t in zip(offsets, found.tokens or [], strict=True)
    )
    assert all(len(top) == 2 for top in found.top_logprobs or [])
    with client.completions.create(**options, logprobs=2, stream=True) as stream:
        parts = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs]
    assert [offset for part in parts for offset in part.text_offset or []] == offsets
    mistakes: list[Any] = [{"echo": True, "logprobs": 1}, {"best_of": 3}]
    for wrong in mistakes:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**options, **wrong)
    with pytest.raises(openai.BadRequestError, match="at least one prompt"):
        client.completions.create(model="bundled", prompt=[])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs_of_characters_in_several_tokens(served: Running, *, is_streamed: bool) -> None:
    body = {
        "prompt": "x",
        "logprobs": 3,
        "guided_regex": "\U0001f469\u2603\u00e9",
        "max_tokens": 20,
    }
    reply = served.post("/v1/completions", {**body, "stream": is_streamed})
    if is_streamed:
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    else:
        choices = reply.json()["choices"]
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for each in found for token in each["tokens"]]
    offsets = [offset for each in found for offset in each["text_offset"]]
    data = [text_bytes(token) for token in tokens]
    text = b"".join(data).decode()
    assert text == "".join(choice["text"] for choice in choices) == "\U0001f469\u2603\u00e9"
    begins = [sum(map(len, data[:at])) for at in range(len(data))]
    assert offsets == [len(text.encode()[:begin].decode(errors="ignore")) for begin in begins]
    assert len(offsets) > len(text)


def text_bytes(token: str) -> bytes:
    """What a token of a reply writes."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))


SCHEMA = Contact.model_json_schema()


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"guided_json": SCHEMA}, r'\{"name": ".*", "phone": ".*"\}'),
        ({"guided_json": json.dumps(SCHEMA)}, r'\{"name": ".*", "phone": ".*"\}'),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"name": ".*", "phone": ".*"\}'),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "type": "structural_tag",
                        "format": {"type": "const_string", "value": "hm"},
                    }
                }
            },
            "hm",
        ),
    ],
)
def test_vllm_s_fields(client: openai.OpenAI, field: Any, pattern: str) -> None:
    options: dict[str, Any] = {"model": "bundled", "max_tokens": 40, "extra_body": field}
    chat = client.chat.completions.create(messages=ASK, **options).choices[0].message.content
    text = client.completions.create(prompt="Maria", **options).choices[0].text
    for found in (chat, text):
        assert re.fullmatch(pattern, found or ""), found


def test_vllm_s_top_k_that_keeps_all(served: Running) -> None:
    body = {"prompt": "a", "max_tokens": 4, "temperature": 1.0, "seed": 3}
    replies = [served.post("/v1/completions", {**body, "top_k": top_k}) for top_k in (-1, 0)]
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_field_that_is_null_is_left_out(served: Running, path: str) -> None:
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": "a", "suffix": None},
        "/v1/chat/completions": {"messages": ASK, "functions": None, "stream_options": None},
        "/v1/responses": {"input": "a", "previous_response_id": None},
    }
    reply = served.post(path, {**asked[path], "temperature": None})
    assert reply.status_code == 200, reply.text


def test_one_grammar_at_most(served: Running) -> None:
    body: dict[str, Any] = {"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}
    reply = served.post("/v1/completions", body)
    assert "guided_regex and guided_choice: pass one" in reply.json()["error"]["message"]
    body = {"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}}
    reply = served.post("/v1/completions", body)
    assert "json and regex; pass one" in reply.json()["error"]["message"]
    body = {"prompt": "a", "structured_outputs": {"json_object": False}, "max_tokens": 1}
    assert served.post("/v1/completions", body).status_code == 200
