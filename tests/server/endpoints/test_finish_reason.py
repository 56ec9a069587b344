"""An answer says why it ended, whole or as a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guided_spec.server.endpoints.chat import finish_reason
from tests.server.running import ASK, Running

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
