"""An answer says why it ended, whole or as a stream."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from guided_spec.server.endpoints.chat import finish_reason
from tests.server.running import ASK, Contact, Running

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "The name is"},
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("reason", "told"), [("length", "length"), ("stop", "stop"), ("tool_calls", "tool_calls")]
)
def test_the_engine_s_reasons_in_openai_s_words(reason: str, told: str) -> None:
    assert finish_reason(reason) == told


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_tokens": 3, "ignore_eos": True}, "length"), ({"guided_regex": "ab"}, "stop")],
    ids=["cut off", "whole"],
)
@pytest.mark.parametrize("path", ASKED)
def test_a_text_that_was_cut_off_says_so(
    served: Running, path: str, options: dict[str, Any], reason: str
) -> None:
    body = {**ASKED[path], **options}
    (choice,) = served.post(path, body).json()["choices"]
    assert choice["finish_reason"] == reason
    events = served.post(path, {**body, "stream": True}).text.split("\n\n")
    pieces = [json.loads(line.removeprefix("data: ")) for line in events[:-2]]
    reasons = [piece["choices"][0]["finish_reason"] for piece in pieces]
    assert reasons == [None] * (len(reasons) - 1) + [reason]


NUMBER = "[0-9]{3}( [0-9]{3}){2,9}"
SHORT: dict[str, Any] = {"guided_regex": NUMBER, "max_tokens": 16}
LONG: dict[str, Any] = {"guided_regex": "[0-9]{3}", "max_tokens": 16}


@pytest.mark.every_case
@pytest.mark.parametrize("path", ASKED)
def test_the_usage_says_which_texts_were_shortened(served: Running, path: str) -> None:
    """Whole texts that were ended early: a value in them may be cut short."""
    body = {**ASKED[path], **SHORT, "n": 2}
    reply = served.post(path, body).json()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 2
    assert reply["usage"]["shortened_texts"] == 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = served.post(path, {**body, **options}).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["usage"] == reply["usage"]
    assert "shortened_texts" not in served.post(path, {**ASKED[path], **LONG}).json()["usage"]


def test_what_clients_do_with_a_shortened_value(client: openai.OpenAI) -> None:
    """OpenAI's parses of chats refuse it, and those of responses take it; both can be asked."""
    asked: dict[str, Any] = {"model": "bundled"}
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        client.chat.completions.parse(
            **asked, messages=ASK, response_format=Contact, max_completion_tokens=20
        )
    usage: Any = caught.value.completion.usage
    assert usage.shortened_texts == 1
    found = client.responses.parse(**asked, input=ASK, text_format=Contact, max_output_tokens=20)
    assert isinstance(found.output_parsed, Contact)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    counted: Any = found.usage
    assert counted.shortened_texts == 1


@pytest.mark.every_case
@pytest.mark.parametrize("path", [*ASKED, "/v1/responses"])
def test_a_shortened_text_may_be_refused(served: Running, path: str) -> None:
    if path == "/v1/responses":
        form = {"format": {"type": "regex_schema", "regex_schema": NUMBER}}
        body: dict[str, Any] = {"input": "A", "text": form, "max_output_tokens": 16}
    else:
        body = {**ASKED[path], **SHORT}
    reply = served.post(path, {**body, "on_short": "error"})
    fault = reply.json()["error"]
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert (reply.status_code, fault["code"], fault["param"]) == (400, "text_cut_short", name)
    assert fault["message"].startswith(f"{name}=16: the text was ended early to fit")
    stream = served.post(path, {**body, "on_short": "error", "stream": True}).text
    assert "text_cut_short" in stream
    assert served.post(path, {**body, "on_short": "return"}).status_code == 200
    assert served.post(path, {**body, "on_short": "raise"}).status_code == 400
