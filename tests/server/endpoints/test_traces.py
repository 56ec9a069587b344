"""A request may ask for the steps of its texts: as records, or as rows of the trace page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from guided_spec.engine.llm import LLM
from guided_spec.trace.page import StepMarkup
from guided_spec.trace.record import Trace, from_json
from tests.server.running import ASK, Contact, Running, running

CHAT: dict[str, Any] = {
    "messages": ASK,
    "temperature": 0,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "contact", "schema": Contact.model_json_schema()},
    },
}
TEXT: dict[str, Any] = {"prompt": "The name", "max_tokens": 8, "temperature": 0}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


def events(served: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream."""
    reply = served.post(path, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def traces(streamed: list[Any], index: int = 0) -> list[Any]:
    choices = [choice for one in streamed for choice in one["choices"]]
    return [c["trace"] for c in choices if "trace" in c and c["index"] == index]


def joined(pieces: list[Any]) -> Trace:
    steps = [step for piece in pieces for step in piece["steps"]]
    (trace,) = from_json(json.dumps([{**pieces[-1], "steps": steps}]))
    return trace


def outline(trace: Trace) -> Any:
    """All but times and probabilities, whose last digits depend on the batch."""
    steps = []
    for step in trace.steps:
        tokens = [*step.drafted, *([] if step.drawn is None else [step.drawn])]
        rows = [(t.id, t.text, t.source, t.outcome, t.allowed, t.place) for t in tokens]
        steps.append((step.start, step.num_kept, rows))
    return trace.text, trace.finish_reason, trace.grammar, steps


def named(rows: str) -> list[str]:
    """What rows of HTML tell of their tokens, without figures."""
    return re.findall(r'aria-label="(.*?)"|aria-describedby="(.*?)"|id="(.*?)"', rows)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_records(served: Running, path: str, body: dict[str, Any]) -> None:
    """Whole or streamed, they are the trace that the library gives."""
    whole = served.post(path, {**body, "trace": "json"}).json()["choices"][0]["trace"]
    (trace,) = from_json(json.dumps([whole]))
    pieces = traces(events(served, path, {**body, "trace": "json"}))
    assert len(pieces) > 1
    assert outline(joined(pieces)) == outline(trace)
    assert sum(step.num_kept for step in trace.steps) == len(trace.token_ids) > 0


def test_they_are_the_librarys(llm: LLM, served: Running) -> None:
    pieces = traces(events(served, "/v1/completions", {**TEXT, "trace": "json"}))
    params = replace(llm.default_params, max_tokens=8, temperature=0.0)
    own = llm.generate(TEXT["prompt"], params, trace=True)[0].trace
    assert own is not None
    assert outline(joined(pieces)) == outline(own)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_rows(served: Running, path: str, body: dict[str, Any]) -> None:
    """The rows of the pieces are those of the trace page, with ids that differ."""
    records = joined(traces(events(served, path, {**body, "trace": "json"})))
    pieces = traces(events(served, path, {**body, "n": 2, "trace": "html"}), 1)
    rows = "".join(piece["steps"] for piece in pieces)
    markup = StepMarkup(1, records.vocab_size, records.stop_token_ids)
    expected = "".join(markup.step(at, step) for at, step in enumerate(records.steps))
    assert named(rows) == named(expected) != []
    assert ["summary" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["summary"].startswith("<table>")
    whole = served.post(path, {**body, "trace": "html"}).json()["choices"][0]["trace"]
    assert len(re.findall('<li class="step">', whole["steps"])) == len(records.steps)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_nothing_is_recorded_unasked(
    served: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("a step was recorded")

    monkeypatch.setattr("guided_spec.trace.record.TraceRecorder.__init__", refuse)
    assert "trace" not in served.post(path, body).json()["choices"][0]
    assert traces(events(served, path, body)) == []


def test_without_a_playground(llm: LLM) -> None:
    with running(llm, playground=False) as plain:
        assert httpx.get(f"{plain.url}/").status_code == 404
        for path, body in PATHS:
            reply = plain.post(path, {**body, "trace": "html"})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "trace"
            assert "--playground" in reply.json()["error"]["message"]
            assert plain.post(path, body).status_code == 200


def test_other_forms_are_refused(served: Running) -> None:
    reply = served.post("/v1/completions", {**TEXT, "trace": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "trace"
